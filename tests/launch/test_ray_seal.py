"""What crosses Ray in place of the secret, and `p3 run --on ray` where Ray is not installed."""

import sys

import pytest

from p3 import cli
from p3.launch.ray.seal import KeyPair

SECRET = "0123456789abcdef" * 4


def test_who_has_the_other_private_key_reads_what_was_sealed_and_nobody_else():
    here, there, another = KeyPair(), KeyPair(), KeyPair()
    sealed = here.seal(SECRET, there.public)
    assert there.unseal(sealed, here.public) == SECRET
    assert SECRET.encode()[:8] not in sealed
    altered = bytes([*sealed[:-1], sealed[-1] ^ 1])
    for keys, public, text in (
        (another, here.public, sealed), (there, another.public, sealed), (there, here.public, altered)
    ):  # fmt: skip
        with pytest.raises(ValueError, match="altered, or is for another process"):
            keys.unseal(text, public)


def test_each_text_is_sealed_otherwise():
    here, there = KeyPair(), KeyPair()
    assert len({here.seal(SECRET, there.public) for _ in range(4)} | {KeyPair().seal(SECRET, there.public)}) == 5


@pytest.mark.parametrize("public", [b"", b"\1" * 31, bytes(32), b"\1" + bytes(31)])
def test_what_is_no_key_or_would_make_the_secret_known_is_refused(public):
    with pytest.raises(ValueError, match="public key is invalid"):
        KeyPair().seal(SECRET, public)


def test_without_cryptography_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(ImportError, match="cryptography is not installed for .*-m pip install 'cryptography>=40'"):
        KeyPair()


def test_without_ray_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "p3.launch.ray.engine", raising=False)
    assert cli.main(["run", "--on", "ray", "-n", "1", "true"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("p3: --on ray: Ray is not installed for ")
    assert said.endswith("-m pip install ray 'cryptography>=40'\n")


@pytest.mark.parametrize(
    "options, text",
    [
        (["--gpus-per-worker", "1"], "are for --on ray alone"),
        (["--on", "ray", "--hostfile", "hosts"], "leave out --hostfile"),
    ],
)
def test_options_of_the_other_way_to_start_are_refused(capsys, options, text):
    assert cli.main(["run", *options, "-n", "1", "true"]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("gpus", ["1.5", "-1", "nan", "many"])
def test_a_share_of_gpus_that_ray_does_not_know_is_refused(capsys, gpus):
    with pytest.raises(SystemExit):
        cli.main(["run", "--on", "ray", "--gpus-per-worker", gpus, "-n", "1", "true"])
    assert "is not a whole number of GPUs, nor a part of one" in capsys.readouterr().err
