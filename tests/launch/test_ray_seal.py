"""What crosses Ray in place of the secret, and `p3 run --on ray` where Ray is not installed."""

import random
import sys

import pytest

from p3 import cli
from p3.launch.ray import seal
from p3.launch.ray.seal import KeyPair

SECRET = "0123456789abcdef" * 4


def test_who_has_the_other_private_number_reads_what_was_sealed_and_nobody_else():
    here, there, another = KeyPair(), KeyPair(), KeyPair()
    sealed = here.seal(SECRET, there.public)
    assert there.unseal(sealed, here.public) == SECRET
    assert len(sealed) == len(SECRET) and SECRET.encode()[:8] not in sealed
    for keys, public in ((another, here.public), (there, another.public)):
        with pytest.raises(UnicodeDecodeError):  # 64 bytes at random: ASCII once in 2^64 times
            keys.unseal(sealed, public)


def test_each_pair_seals_otherwise():
    there = KeyPair()
    assert len({KeyPair().seal(SECRET, there.public) for _ in range(4)} | {there.seal(SECRET, KeyPair().public)}) == 5


@pytest.mark.parametrize("public", [0, 1, -5, seal._PRIME - 1, seal._PRIME, seal._PRIME + 2])
def test_a_number_that_would_make_the_key_known_is_refused(public):
    with pytest.raises(ValueError, match="public number is invalid"):
        KeyPair().seal(SECRET, public)


def test_the_group_is_that_of_rfc_7919():
    """By its formula, 2^3072 - 2^3008 + ([2^2942 e] + 2625351) 2^64 - 1; and both primes are primes."""
    term = scaled_e = 1 << 3100
    for divisor in range(1, 1000):
        term //= divisor
        scaled_e += term
    assert seal._PRIME == (1 << 3072) - (1 << 3008) + ((scaled_e >> 158) + 2625351 << 64) - 1
    for prime in (seal._PRIME, seal._PRIME >> 1):
        assert pow(random.randrange(2, prime), prime - 1, prime) == 1


def test_without_ray_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "p3.launch.ray.engine", raising=False)
    assert cli.main(["run", "--on", "ray", "-n", "1", "true"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("p3: --on ray: Ray is not installed for ") and said.endswith("-m pip install ray\n")


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
