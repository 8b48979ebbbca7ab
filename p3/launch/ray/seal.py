"""How the job's secret crosses Ray, whose messages anybody on the network can read unless RAY_USE_TLS is on.

Two processes that have told each other a public number share a key that those who overheard both numbers do not have
(Diffie and Hellman's exchange, in a group that RFC 7919 publishes). It protects against reading alone: who can alter
Ray's messages, or send some, runs programs of their choice on every node anyway (docs/security.md).

Ray's workers get this file's code by value, so it uses nothing but the standard library.
"""

from __future__ import annotations

import hmac
import secrets

# ffdhe3072 of RFC 7919: a prime p of which (p - 1) / 2 is one, too. 2 generates the squares.
_PRIME = int(
    "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1D8B9C583CE2D3695A9E13641146433FBCC939DCE249B3EF9"
    "7D2FE363630C75D8F681B202AEC4617AD3DF1ED5D5FD65612433F51F5F066ED0856365553DED1AF3B557135E7F57C935"
    "984F0C70E0E68B77E2A689DAF3EFE8721DF158A136ADE73530ACCA4F483A797ABC0AB182B324FB61D108A94BB2C8E3FB"
    "B96ADAB760D7F4681D4F42A3DE394DF4AE56EDE76372BB190B07A7C8EE0A6D709E02FCE1CDF7E2ECC03404CD28342F61"
    "9172FE9CE98583FF8E4F1232EEF28183C3FE3B1B4C6FAD733BB5FCBC2EC22005C58EF1837D1683B2C6F34A26C1B2EFFA"
    "886B4238611FCFDCDE355B3B6519035BBC34F4DEF99C023861B46FC9D6E6C9077AD91D2691F7F7EE598CB0FAC186D91C"
    "AEFE130985139270B4130C93BC437944F4FD4452E2D74DD364F2E21E71F54BFF5CAE82AB9C9DF69EE86D2BC522363A0D"
    "ABC521979B0DEADA1DBF9A42D5C4484E0ABCD06BFA53DDEF3C1B20EE3FD59D7C25E41D2B66C62E37FFFFFFFFFFFFFFFF",
    16,
)  # fmt: skip
_BYTES = 384
_EXPONENT_BITS = 275  # at least, says the RFC: twice the strength of the group


class KeyPair:
    """Of one process, for one text to each other one: seal() at one end and unseal() at the other, each with the
    other's public number."""

    def __init__(self) -> None:
        self._private = secrets.randbits(_EXPONENT_BITS) | 1 << _EXPONENT_BITS
        self.public = pow(2, self._private, _PRIME)

    def seal(self, text: str, public: int) -> bytes:
        """ASCII only, of any length. ValueError if the other's number is none that a KeyPair has."""
        return self._mask(text.encode("ascii"), public)

    def unseal(self, sealed: bytes, public: int) -> str:
        return self._mask(sealed, public).decode("ascii")

    def _mask(self, data: bytes, public: int) -> bytes:
        if not 1 < public < _PRIME - 1:
            raise ValueError("the other end's public number is invalid")
        key = pow(public, self._private, _PRIME).to_bytes(_BYTES, "big")
        both = b"".join(number.to_bytes(_BYTES, "big") for number in sorted((self.public, public)))
        blocks = -(-len(data) // 32)
        stream = b"".join(
            hmac.digest(key, b"p3 seal" + both + block.to_bytes(4, "big"), "sha256") for block in range(blocks)
        )
        return bytes(byte ^ mask for byte, mask in zip(data, stream))
