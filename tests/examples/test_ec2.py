"""examples/ec2/throttle.sh, on the hosts of a lab."""

import json
import subprocess

import pytest
from processes import ROOT
from lab_traces import needs_lab

from p3.measure.lab import hosts

THROTTLE = str(ROOT / "examples" / "ec2" / "throttle.sh")
DEADLINE_S = 30

pytestmark = needs_lab


@pytest.fixture(scope="module")
def host():
    with hosts.lab(1) as (made,):
        yield made


def run(host, *argv):
    return subprocess.run(
        host.command(*argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=DEADLINE_S
    )


def buckets(host):
    """Rates in Mbit/s of the token buckets at its interface."""
    queues = json.loads(run(host, "tc", "-json", "qdisc", "show", "dev", "eth0").stdout)
    return [queue["options"]["rate"] * 8 / 1e6 for queue in queues if queue["kind"] == "tbf"]


def test_throttle_sets_changes_and_removes_the_limit(host):
    for mbit, expected in (("800", [800]), ("10000", [10000]), ("1", [1]), ("off", []), ("off", [])):
        done = run(host, THROTTLE, "eth0", mbit)
        assert (done.returncode, done.stderr) == (0, "")
        assert buckets(host) == expected


@pytest.mark.parametrize("arguments, text", [
    (["eth0"], "needs two arguments"),
    (["nowhere0", "800"], "no interface 'nowhere0'"),
    (["eth0", "800mbit"], "'800mbit' is no whole number of Mbit/s"),
    (["eth0", "0"], "'0' is no whole number"),
])  # fmt: skip
def test_throttle_refuses_what_it_cannot_do(host, arguments, text):
    done = run(host, THROTTLE, *arguments)
    assert done.returncode == 2 and text in done.stderr and buckets(host) == []
