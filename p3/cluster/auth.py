"""Both ends of every connection prove that they know the job's secret, before anything else is read from it.

A mutual challenge with HMAC-SHA256, in four fixed-size binary messages:

    connector -> acceptor   hello: magic, version, purpose, role, nonce of 32 random bytes
    acceptor -> connector   nonce of 32 random bytes
    connector -> acceptor   proof: HMAC(secret, "connector" + hello + acceptor's nonce + acceptor's role)
    acceptor -> connector   proof: the same with "acceptor"

The connector proves first, so a stranger gets no proof to guess the secret from; one whose proof is wrong sees the
connection close and learns nothing. The labels keep a proof from being reflected, and the roles and the purpose keep
it from being relayed to another kind of node or connection. What follows is neither encrypted nor signed: whoever can
rewrite packets on the job's network is outside what this protects from.

Nothing here does I/O: `Connector` and `Acceptor` say what to send and judge what came.
"""

from __future__ import annotations

import hmac
import os
import struct

from p3.errors import AuthenticationError

HANDSHAKE_TIMEOUT_S = 5.0  # for the acceptor: what a stranger can hold a connection open for
CONNECTOR_TIMEOUT_S = 8.0  # for the connector: a scheduler that is still starting answers late

CONTROL, DATA, WATCH = 1, 2, 3  # what a connection is for
_ROLES = {"scheduler": 1, "server": 2, "worker": 3}

_HELLO = struct.Struct("<4sBBBx32s")  # magic, version, purpose, connector's role, nonce
_MAGIC = b"P3ct"
_VERSION = 1

HELLO_BYTES = _HELLO.size
NONCE_BYTES = 32
PROOF_BYTES = 32


def _proof(secret: bytes, label: bytes, hello: bytes, nonce: bytes, acceptor_role: str) -> bytes:
    text = b"p3 " + label + b"\0" + hello + nonce + bytes([_ROLES[acceptor_role]])
    return hmac.new(secret, text, "sha256").digest()


class Connector:
    """The side that opened the connection: send `hello`, read a nonce, send proof(nonce), read a proof, verify it."""

    def __init__(self, secret: bytes, role: str, purpose: int, acceptor_role: str) -> None:
        self.hello = _HELLO.pack(_MAGIC, _VERSION, purpose, _ROLES[role], os.urandom(NONCE_BYTES))
        self._secret = secret
        self._acceptor_role = acceptor_role

    def proof(self, nonce: bytes) -> bytes:
        self._expected = _proof(self._secret, b"acceptor", self.hello, nonce, self._acceptor_role)
        return _proof(self._secret, b"connector", self.hello, nonce, self._acceptor_role)

    def verify(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._expected):
            raise AuthenticationError("it does not know this job's secret")


class Acceptor:
    """The side that was connected to: read a hello, send `nonce`, read a proof, send what accept(proof) returns.

    Afterwards `role` and `purpose` are what the connector proved. AuthenticationError: close without a word.
    """

    def __init__(self, secret: bytes, role: str, hello: bytes) -> None:
        magic, version, self.purpose, role_number, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise AuthenticationError("it does not speak P3's protocol")
        if version != _VERSION:
            raise AuthenticationError("it speaks version %d of P3's handshake, here is %d" % (version, _VERSION))
        self.role = next((name for name, number in _ROLES.items() if number == role_number), None)
        if self.role is None or self.purpose not in (CONTROL, DATA, WATCH):
            raise AuthenticationError("it names an unknown role or purpose")
        self.nonce = os.urandom(NONCE_BYTES)
        self._secret = secret
        self._own_role = role
        self._hello = hello

    def accept(self, proof: bytes) -> bytes:
        if not hmac.compare_digest(proof, _proof(self._secret, b"connector", self._hello, self.nonce, self._own_role)):
            raise AuthenticationError(
                "it does not know this job's secret: P3_SECRET or P3_SECRET_FILE differs, or it is a stranger"
            )
        return _proof(self._secret, b"acceptor", self._hello, self.nonce, self._own_role)
