"""Both ends of every connection prove that they know the job's secret, before anything else is read from it.

A mutual challenge with HMAC-SHA256, in four fixed-size binary messages:

    connector -> acceptor   hello: magic, version, purpose, role, whether it will encrypt, nonce of 32 random bytes
    acceptor -> connector   challenge: nonce of 32 random bytes, whether it will encrypt
    connector -> acceptor   proof: HMAC(secret, "connector" + hello + challenge + acceptor's role)
    acceptor -> connector   proof: the same with "acceptor"

The connector proves first, so a stranger who connects gets no proof to guess the secret from; one whose proof is wrong
sees the connection close and learns nothing. Somebody has to prove first, and whoever can stand in the acceptor's place
gets that proof; to connect is easier than that (docs/security.md). The labels keep a proof from being reflected, and
the roles and the purpose keep it from being relayed to another kind of node or connection. What follows is neither
encrypted nor signed, unless both ends go on to TLS (P3_TLS=1) with a key that only they can make of the secret, hello
and challenge: see key(). That begins behind the proofs, so no stranger ever reaches the TLS library, and what the two
say of it cannot be altered in between.

Nothing here does I/O: `Connector` and `Acceptor` say what to send and judge what came.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Optional

from p3.errors import AuthenticationError

HANDSHAKE_TIMEOUT_S = 5.0  # for the acceptor: what a stranger can hold a connection open for
CONNECTOR_TIMEOUT_S = 8.0  # for the connector: a scheduler that is still starting answers late
PATIENCE_S = 3.0  # for the connector, whose attempts the acceptor drops: before it says so

CONTROL, DATA, WATCH, LOOK = 1, 2, 3, 4  # what a connection is for
_ROLES = {"scheduler": 1, "server": 2, "worker": 3, "watcher": 4}

_HELLO = struct.Struct("<4sBBB?32s")  # magic, version, purpose, connector's role, encrypts, nonce
_MAGIC = b"P3ct"
_VERSION = 2

HELLO_BYTES = _HELLO.size
NONCE_BYTES = 32
CHALLENGE_BYTES = NONCE_BYTES + 1
PROOF_BYTES = 32


class Dropped(AuthenticationError):
    """The acceptor closed before it said a word, or never said one, or broke the handshake off: full of strangers,
    perhaps, or still starting, so that another attempt is worth it."""


class Disagreed(AuthenticationError):
    """A node of this job, proved to be one, which encrypts what this one does not, or the other way round."""

    purpose: Optional[int] = None  # of the connection, as its acceptor knows it


class _End:
    """What both ends have in common."""

    def __init__(self, secret: bytes, hello: bytes, acceptor_role: str, encrypts: bool) -> None:
        self._secret, self._hello, self._acceptor_role, self._encrypts = secret, hello, acceptor_role, encrypts
        self.challenge: bytes

    def key(self, subject: str) -> bytes:
        """32 bytes for this connection alone, if both ends mean the same subject. Once they have proved themselves."""
        return self._mac(b"key " + subject.encode())

    def _mac(self, label: bytes) -> bytes:
        text = b"p3 " + label + b"\0" + self._hello + self.challenge + bytes([_ROLES[self._acceptor_role]])
        return hmac.new(self._secret, text, "sha256").digest()

    def _agree(self, other_encrypts: bool) -> None:
        if other_encrypts != self._encrypts:
            raise Disagreed(
                "it has P3_TLS=%d, but here P3_TLS=%d: set it to the same value on all nodes"
                % (other_encrypts, self._encrypts)
            )


class Connector(_End):
    """The side that opened the connection: send `hello`, read a challenge, send proof(challenge), read a proof, and
    verify() it."""

    def __init__(self, secret: bytes, role: str, purpose: int, acceptor_role: str, encrypts: bool = False) -> None:
        self.hello = _HELLO.pack(_MAGIC, _VERSION, purpose, _ROLES[role], encrypts, os.urandom(NONCE_BYTES))
        super().__init__(secret, self.hello, acceptor_role, encrypts)

    def proof(self, challenge: bytes) -> bytes:
        self.challenge = challenge
        return self._mac(b"connector")

    def verify(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._mac(b"acceptor")):
            raise AuthenticationError("it does not know this job's secret")
        self._agree(bool(self.challenge[NONCE_BYTES]))


class Acceptor(_End):
    """The side that was connected to: read a hello, send `challenge`, read a proof, send what accept(proof) returns,
    and agree().

    Afterwards `role` and `purpose` are what the connector proved. AuthenticationError: close without a word.
    """

    def __init__(self, secret: bytes, role: str, hello: bytes, encrypts: bool = False) -> None:
        magic, version, self.purpose, role_number, self._connector_encrypts, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise AuthenticationError("it does not speak P3's protocol")
        if version != _VERSION:
            raise AuthenticationError("it speaks version %d of P3's handshake, this node %d" % (version, _VERSION))
        self.role = next((name for name, number in _ROLES.items() if number == role_number), None)
        if self.role is None or self.purpose not in (CONTROL, DATA, WATCH, LOOK):
            raise AuthenticationError("it names an unknown role or purpose")
        self.challenge = os.urandom(NONCE_BYTES) + bytes([encrypts])
        super().__init__(secret, hello, role, encrypts)

    def accept(self, proof: bytes) -> bytes:
        if not hmac.compare_digest(proof, self._mac(b"connector")):
            raise AuthenticationError(
                "it does not know this job's secret: P3_SECRET or P3_SECRET_FILE differs, or it is a stranger"
            )
        return self._mac(b"acceptor")

    def agree(self) -> None:
        """Disagreed if only one of the two will encrypt; both have said so by now."""
        try:
            self._agree(self._connector_encrypts)
        except Disagreed as error:
            error.purpose = self.purpose
            raise
