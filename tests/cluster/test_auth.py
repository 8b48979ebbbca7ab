"""The handshake: who knows the secret gets in, nobody else, and no proof serves for anything but its connection."""

import hashlib
import hmac

import pytest

from p3.cluster.connections import auth
from p3.errors import AuthenticationError

SECRET = b"0123456789abcdef"


def shake_hands(connector_secret=SECRET, acceptor="server", expected="server"):
    ours = auth.Connector(connector_secret, "worker", auth.DATA, expected)
    theirs = auth.Acceptor(SECRET, acceptor, ours.hello)
    ours.verify(theirs.accept(ours.proof(theirs.challenge)))
    return theirs


def test_two_that_share_the_secret_know_each_other():
    peer = shake_hands()
    assert (peer.role, peer.purpose) == ("worker", auth.DATA)


def test_a_wrong_secret_is_refused_by_the_acceptor_first():
    with pytest.raises(AuthenticationError, match="P3_SECRET"):
        shake_hands(connector_secret=b"fedcba9876543210")


def test_an_acceptor_without_the_secret_is_found_out():
    ours = auth.Connector(SECRET, "worker", auth.DATA, "server")
    ours.proof(bytes(33))
    with pytest.raises(AuthenticationError, match="does not know"):
        ours.verify(bytes(32))


def test_a_proof_cannot_be_reflected():
    ours = auth.Connector(SECRET, "worker", auth.DATA, "server")
    proof = ours.proof(bytes(33))
    with pytest.raises(AuthenticationError):
        ours.verify(proof)


def test_a_proof_for_a_server_does_not_serve_at_the_scheduler():
    with pytest.raises(AuthenticationError):
        shake_hands(acceptor="scheduler", expected="server")


@pytest.mark.parametrize("changed_byte", [5, 6, 7, 8, 39])  # purpose, role, encrypts, nonce
def test_a_changed_hello_invalidates_the_proof(changed_byte):
    ours = auth.Connector(SECRET, "worker", auth.DATA, "server")
    hello = bytearray(ours.hello)
    hello[changed_byte] ^= 1 if changed_byte != 6 else 1 ^ 3  # another valid role
    theirs = auth.Acceptor(SECRET, "server", bytes(hello))
    with pytest.raises(AuthenticationError):
        theirs.accept(ours.proof(theirs.challenge))


def test_what_the_acceptor_says_of_encryption_cannot_be_changed_on_its_way():
    ours = auth.Connector(SECRET, "worker", auth.DATA, "server", True)
    theirs = auth.Acceptor(SECRET, "server", ours.hello, True)
    altered = theirs.challenge[:-1] + b"\0"
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        theirs.accept(ours.proof(altered))


@pytest.mark.parametrize("connector, acceptor", [(True, False), (False, True)])
def test_two_of_which_one_encrypts_both_say_so(connector, acceptor):
    ours = auth.Connector(SECRET, "worker", auth.DATA, "server", connector)
    theirs = auth.Acceptor(SECRET, "server", ours.hello, acceptor)
    answer = theirs.accept(ours.proof(theirs.challenge))
    with pytest.raises(auth.Disagreed, match="P3_TLS=%d, but here P3_TLS=%d" % (connector, acceptor)):
        theirs.agree()
    with pytest.raises(auth.Disagreed, match="P3_TLS=%d, but here P3_TLS=%d" % (acceptor, connector)):
        ours.verify(answer)


def test_a_proof_is_good_for_one_nonce_only():
    ours = auth.Connector(SECRET, "worker", auth.DATA, "server")
    theirs = auth.Acceptor(SECRET, "server", ours.hello)
    old = ours.proof(bytes(33))
    with pytest.raises(AuthenticationError):
        theirs.accept(old)


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n", b"", b"P3ct\x01\x02\x03", b"P3ct\x02\x09\x03"])
def test_a_stranger_is_recognised_by_its_hello(hello):
    with pytest.raises(AuthenticationError):
        auth.Acceptor(SECRET, "server", hello.ljust(auth.HELLO_BYTES, b"\0"))


def test_the_proof_is_hmac_sha256_over_both_nonces_and_all_labels():
    """Pins the bytes: another implementation must be able to take part."""
    ours = auth.Connector(SECRET, "worker", auth.WATCH, "scheduler")
    assert ours.hello[:8] == b"P3ct\x02\x03\x03\x00" and len(ours.hello) == 40
    challenge = bytes(range(32)) + b"\0"
    expected = hmac.new(SECRET, b"p3 connector\0" + ours.hello + challenge + b"\x01", hashlib.sha256).digest()
    assert ours.proof(challenge) == expected
    key = hmac.new(SECRET, b"p3 key join\0" + ours.hello + challenge + b"\x01", hashlib.sha256).digest()
    assert ours.key("join") == key


def test_nonces_differ():
    assert auth.Connector(SECRET, "worker", 1, "server").hello != auth.Connector(SECRET, "worker", 1, "server").hello
