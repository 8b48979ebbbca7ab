"""Stands for a process that a fork server forks: python -ISu ask.py SOCKET PYTHON SCRIPT ARGUMENT...

It passes signals on to that process and ends as that does. If there is no such server, or it must not run it, this
becomes `PYTHON SCRIPT ARGUMENT...`.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("net", "mnt", "uts", "ipc", "user", "pid")


def stand_for(path, arguments):
    """What the server runs, with these arguments of Python's, if it does. Returns if it does not."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the script may run, and be sent one, before this can pass it on
    connection = ask(path, arguments)
    if connection is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return
    for number in SIGNALS:
        signal.signal(number, lambda number, _: connection.send(b"%d" % number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    answer = connection.recv(4)
    end_as(struct.unpack("<i", answer)[0] if answer else signal.SIGKILL)


def ask(path, arguments):
    """The connection to the server that runs them; None if none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "namespaces": {kind: os.readlink("/proc/self/ns/" + kind) for kind in NAMESPACES},
    }
    try:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        return connection if connection.recv(2) == b"ok" else None
    except OSError:
        return None


def end_as(status):
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    stand_for(sys.argv[1], sys.argv[3:])
    os.execv(sys.argv[2], sys.argv[2:])
