"""A man in the middle."""

import contextlib
import socket
import threading


class Relay:
    """Whoever stands between two nodes: passes on what they say, keeps it, and alters a byte when told to."""

    def __init__(self, target_port):
        self.seen = bytearray()
        self.alter = threading.Event()
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target_port))
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while True:
                data = bytearray(source.recv(1 << 16))
                if not data:
                    break
                self.seen += data
                if self.alter.is_set():
                    data[len(data) // 2] ^= 1
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
