"""Imports libraries, and forks the tests' processes that need them: serve.py SOCKET MODULE...

It imports them, those that are installed, when it is first asked. Each connection is one process: it sends what it is
to run, with its standard streams, and gets 4 bytes, its status as of wait(), when that has ended. What it sends
meanwhile are numbers of signals for it; when the connection ends, so does the process. It enters the namespaces of the
one that asks, as on a host of a lab. Without an answer it runs nothing: whose environment differs in what libraries
read when they are imported has to start as any other.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
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
OF_TORCH = (  # what torchrun tells its workers, and what is read when they join
    "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_", "WORLD_SIZE", "MASTER_",
    "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DISABLE_SHARE_", "GLOO_",
)  # fmt: skip
NOT_READ = (  # prefixes of variables; see read_at_import
    "DMLC_", "P3_", "P3S_", "MXNET_EXEC_", "KMP_", "NVPL_", "TORCHINDUCTOR_", "PYTEST_", "HOME", "PWD", "OLDPWD",
    "SHLVL", "_", *OF_TORCH,
)  # fmt: skip
NAMESPACES = {"net": 0x40000000, "mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000}  # that can be entered
CREDENTIALS = struct.Struct("3i")  # process, user, group


def main(path, *modules):
    """Returns in each process that it forks: what that shall run."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
        sys.exit()
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    keep_at_exit([one for one in list(sys.modules.values()) if "-packages" in (getattr(one, "__file__", "") or "")])
    gc.collect()
    gc.freeze()  # what all share is not written to, and so not copied
    return serve(listener)


def keep_at_exit(modules):
    """When a forked process ends, Python takes apart what the script has made as ever, but not these modules: that is
    the most of what many a test's process would compute."""

    kept = set(map(id, modules))

    def keep():
        for name in [name for name, module in sys.modules.items() if id(module) in kept]:
            del sys.modules[name]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))

    atexit.register(keep)  # the first one, so that it runs last
    # Nor do the libraries: behind what the script has registered, or loaded, the process ends.
    ctypes.CDLL(None).on_exit(ctypes.CDLL(None)._exit, None)


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
                for stream in [*request["streams"], request["enters"][0]]:
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
        others = [kind for kind, name in request["namespaces"].items() if os.readlink("/proc/self/ns/" + kind) != name]
        if all(kind in NAMESPACES and os.geteuid() == 0 for kind in others):
            if read_at_import(request["environment"]) == read_at_import(AT_START):
                who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
                request["enters"] = [os.pidfd_open(CREDENTIALS.unpack(who)[0]), sum(map(NAMESPACES.get, others))]
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
    asker, namespaces = request["enters"]
    if namespaces and ctypes.CDLL(None, use_errno=True).setns(asker, namespaces) != 0:
        raise OSError(ctypes.get_errno(), "entering the namespaces of the process that asks")
    os.close(asker)
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["arguments"]
    is_module = sys.argv[0] == "-m"
    name = sys.argv.pop(1) if is_module else sys.argv[0]
    others = [path for path in sys.path[1:] if path not in paths(AT_START)]
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(name))
    sys.path[:] = [folder, *paths(os.environ), *others]
    if AUTOLOAD in paths(os.environ):  # runs at the start of any other Python
        runpy.run_path(os.path.join(AUTOLOAD, "sitecustomize.py"))
    sys.modules["__main__"] = script = types.ModuleType("__main__")
    if is_module:
        return compile("runpy._run_module_as_main(%r)" % name, "-m", "exec"), {"runpy": runpy}  # as Python does it
    script.__file__ = name
    with open(name, "rb") as file:
        return compile(file.read(), name, "exec"), script.__dict__


if __name__ == "__main__":
    exec(*become(main(*sys.argv[1:])))
