"""How the job's secret crosses Ray, whose messages anybody on the network can read unless RAY_USE_TLS is on.

Two processes that have told each other a public key of X25519 (RFC 7748) share a key that those who overheard both do
not have; ChaCha20-Poly1305 (RFC 8439) seals the text with it. It protects against reading alone: who can send messages
of Ray's runs programs of their choice on every node anyway (docs/security.md).

Ray's workers get this file's code by value. `cryptography` is imported where it is needed, so that a node that lacks it
can say so.
"""

from __future__ import annotations

import os
import sys

_NONCE_BYTES = 12


class KeyPair:
    """Of one process, for texts to others: seal() at one end and unseal() at the other, each with the other's public
    key. ImportError, which says what to install, without `cryptography`."""

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError:
            raise ImportError(
                "cryptography is not installed for %s. Run: %s -m pip install 'cryptography>=40'"
                % (sys.executable, sys.executable)
            ) from None
        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def seal(self, text: str, public: bytes) -> bytes:
        """Of any length. ValueError if `public` is no key that leads to a secret one."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(public).encrypt(nonce, text.encode(), None)

    def unseal(self, sealed: bytes, public: bytes) -> str:
        """ValueError also if `sealed` was altered, or is for another pair of keys."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher(public).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None).decode()
        except InvalidTag:
            raise ValueError("what was sealed was altered, or is for another process") from None

    def _cipher(self, public: bytes):
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise ValueError("the other end's public key is invalid") from None
        both = b"p3 seal" + b"".join(sorted((self.public, public)))
        return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, salt=None, info=both).derive(shared))
