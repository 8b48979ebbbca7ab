"""The actor that runs a process of the job on the node where Ray has put it: what sshd and ssh do on other hosts.

It starts `p3 exec --secret-stdin` and holds the end of its input: however the actor ends, that input ends with it, and
`p3 exec` ends what it runs. Ray's workers get this file's code by value, so that one without P3 can say that it lacks
it; nothing but the standard library and Ray is imported here, and by seal.py what it seals with.

Threads: Ray calls each method in a thread of its own; read() by one caller at a time.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from typing import Dict, List, Optional, Sequence, Tuple

from p3.launch.ray.seal import KeyPair

_LOOK_S = 0.5  # for the end of a process whose children hold its output open
_CHUNK_BYTES = 1 << 16


class Agent:
    def __init__(self) -> None:
        self._keys: Optional[KeyPair] = None
        self._child: Optional[subprocess.Popen] = None
        self._output = selectors.DefaultSelector()  # of the child, what has not ended yet

    def greet(self) -> dict:
        """The address of this node, and the public key to seal the secret with; or the problem, if it has none."""
        import ray

        greeting = {"address": ray.util.get_node_ip_address()}
        try:
            self._keys = KeyPair()
        except ImportError as error:
            return {**greeting, "problem": str(error)}
        return {**greeting, "public": self._keys.public}

    def start(
        self, words: Sequence[str], env: Dict[str, str], without: Sequence[str], folder: str, public: bytes,
        sealed: bytes,
    ) -> Optional[str]:  # fmt: skip
        """Runs Python with these words, once. `env`: added to the environment that Ray gives, `without` these names.
        Returns what went wrong, if it cannot be started."""
        secret = self._keys.unseal(sealed, public)
        own = {name: value for name, value in os.environ.items() if name not in without}
        pipe = subprocess.PIPE
        try:
            self._child = subprocess.Popen(
                [sys.executable, *words], env={**own, **env}, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return "%s: %s" % (error.filename, error.strerror)
        for number, stream in ((1, self._child.stdout), (2, self._child.stderr)):
            self._output.register(stream, selectors.EVENT_READ, number)
        self._tell(secret.encode("ascii") + b"\n")
        return None

    def read(self) -> Tuple[List[Tuple[int, bytes]], Optional[int]]:
        """Waits for what comes next on standard output (1) and error (2), or for the end: then the exit code."""
        while self._output.get_map():
            has_ended = self._child.poll() is not None  # before the look, which then finds its last words
            ready = self._output.select(_LOOK_S)
            chunks = [(key.data, os.read(key.fd, _CHUNK_BYTES)) for key, _ in ready]
            for (key, _), (_, data) in zip(ready, chunks):
                if not data:
                    self._output.unregister(key.fileobj)
            if any(data for _, data in chunks):
                return [chunk for chunk in chunks if chunk[1]], None
            if not ready and has_ended:
                break  # what it has left behind will not hold us up
        return [], self._child.wait()

    def signal(self, number: int) -> None:
        """To all processes of the command's group."""
        self._tell(bytes([number]))

    def _tell(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._child.stdin.write(data)
