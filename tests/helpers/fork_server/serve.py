"""A process that has imported libraries, and forks the tests' processes that need them: serve.py SOCKET MODULE...

Each connection is one process: it sends what it is to run, with its standard streams, and gets 4 bytes, its status as
of wait(), when that has ended. What it sends meanwhile are numbers of signals for it; when the connection ends, so does
the process. Without an answer it runs nothing: whose environment differs in what libraries read when they are imported
has to start as any other.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types

LIMIT = 1 << 20  # bytes of a request
ROOT = os.path.abspath(__file__).rsplit("/tests/", 1)[0]
QUICK = os.path.join(ROOT, "tests", "helpers", "quick_import")
AUTOLOAD = os.path.join(ROOT, "p3", "_autoload")
AT_START = dict(os.environ)  # libraries write there when they are imported
die_with = runpy.run_path(os.path.join(ROOT, "p3", "launch", "dying_with.py"))["die_with"]
NOT_READ = (  # prefixes of variables; see read_at_import
    "DMLC_", "P3_", "MXNET_EXEC_", "KMP_", "NVPL_", "TORCHINDUCTOR_", "PYTEST_", "HOME", "PWD", "OLDPWD", "SHLVL", "_",
)  # fmt: skip


def main(path, *modules):
    """Returns in each process that it forks: what that shall run."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what all share is not written to, and so not copied
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    return serve(listener)


def serve(listener):
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)  # ends with the one that started this
    started = {}  # connection -> process, and its descriptor
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                sys.exit()
            if key.fileobj is listener:
                connection = listener.accept()[0]
                request = begin(connection)
                if request is None:
                    connection.close()
                    continue
                sys.stdout.flush()
                process = os.fork()
                if process == 0:
                    waiting.close()
                    for other in [listener, connection, *started]:
                        other.close()
                    return request
                for stream in request.pop("streams"):
                    os.close(stream)
                ended = os.pidfd_open(process)
                started[connection] = process, ended
                waiting.register(connection, selectors.EVENT_READ)
                waiting.register(ended, selectors.EVENT_READ, connection)
            elif key.data is None:
                pass_on(key.fileobj, started, waiting)
            else:
                end(key.data, started, waiting)


def begin(connection):
    """The request; None if it cannot run here."""
    with contextlib.suppress(OSError, ValueError):
        message, descriptors, _, _ = connection.recvmsg(LIMIT, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        streams = array.array("i")
        for _, _, data in descriptors:
            streams.frombytes(data)
        request = json.loads(message)
        request["streams"] = list(streams)
        if all(os.readlink("/proc/self/ns/" + kind) == request["namespaces"][kind] for kind in ("net", "mnt")):
            if read_at_import(request["environment"]) == read_at_import(AT_START):
                connection.send(b"ok")
                return request
        for stream in streams:
            os.close(stream)
    return None


def read_at_import(environment):
    """What libraries may read there when they are imported: not what P3 does, which scripts import themselves, what is
    read later, what they write, and what tells of the test."""
    read = {name: value for name, value in environment.items() if not name.startswith(NOT_READ)}
    read["PYTHONPATH"] = [path for path in paths(environment) if path == QUICK or not path.startswith(ROOT)]
    return read


def paths(environment):
    return [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def pass_on(connection, started, waiting):
    if connection not in started:  # both have ended at once
        return
    process, _ = started[connection]
    number = b""
    with contextlib.suppress(ConnectionError):
        number = connection.recv(16)
    if number:
        os.kill(process, int(number))
    else:  # end() waits for it: until then its number is no other process's
        waiting.unregister(connection)
        os.kill(process, signal.SIGKILL)


def end(connection, started, waiting):
    process, ended = started.pop(connection)
    _, status = os.waitpid(process, 0)
    waiting.unregister(ended)
    os.close(ended)
    with contextlib.suppress(KeyError):
        waiting.unregister(connection)
    with contextlib.suppress(OSError):
        connection.send(struct.pack("<i", status))
    connection.close()


def become(request):
    """This process is from here on as one that was started to run the script."""
    os.setsid()
    die_with(os.getppid())
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["arguments"]
    others = [path for path in sys.path[1:] if path not in paths(AT_START)]
    sys.path[:] = [os.path.dirname(os.path.abspath(sys.argv[0])), *paths(os.environ), *others]
    if AUTOLOAD in paths(os.environ):  # runs at the start of any other Python
        runpy.run_path(os.path.join(AUTOLOAD, "sitecustomize.py"))
    script = types.ModuleType("__main__")
    script.__file__ = sys.argv[0]
    sys.modules["__main__"] = script
    with open(sys.argv[0], "rb") as file:
        code = compile(file.read(), sys.argv[0], "exec")
    return code, script.__dict__


if __name__ == "__main__":
    exec(*become(main(*sys.argv[1:])))
