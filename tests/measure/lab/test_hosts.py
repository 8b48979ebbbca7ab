"""The namespaces of a lab: who can reach whom, that rates hold, and that nothing stays behind."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from lab_programs import connected, program_with_a_lab, start
from lab_traces import DEADLINE_S, needs_lab, needs_relay, traces

from p3.measure.lab import hosts, network
from p3.measure.lab.shaping import BURST_BYTES, CONGESTION, Shaping

# Listens on a free port, says which, reads one connection to its end, and tells how many bytes came in how many s.
SINK = """
import json, socket, sys, time
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
connection = listener.accept()[0]
start, total = time.monotonic(), 0
while True:
    data = connection.recv(1 << 16)
    if not data:
        break
    total += len(data)
print(json.dumps({"bytes": total, "seconds": time.monotonic() - start}), flush=True)
"""

# Connects to ADDRESS PORT, sends BYTES, and prints how long the connection took to be made.
SOURCE = """
import socket, sys, time
start = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    print(time.monotonic() - start)
    connection.sendall(bytes(int(sys.argv[3])))
"""


def transfer(source, sink, size):
    """Sends `size` bytes from one host to another: (bytes received, seconds for them, seconds to connect)."""
    connect_s, received = connected(source, SOURCE, sink, SINK, size)
    received = json.loads(received)
    return received["bytes"], received["seconds"], float(connect_s)


@needs_lab
def test_every_host_reaches_every_other():
    with hosts.lab(3) as lab:
        for source in lab:
            for sink in lab:
                if source is not sink:
                    assert transfer(source, sink, 100_000)[0] == 100_000


@needs_lab
def test_hosts_are_not_on_the_real_network():
    with hosts.lab(1) as lab:
        routes = subprocess.check_output(lab[0].command("ip", "-j", "route"), timeout=DEADLINE_S)
        assert [route["dst"] for route in json.loads(routes)] == ["10.33.0.0/24"]


@needs_lab
@pytest.mark.parametrize("limited", ["up", "down"])
@pytest.mark.parametrize("shaping", [Shaping(), Shaping("htb"), Shaping(beyond=True), Shaping("htb", beyond=True)])
def test_rate_bounds_each_direction(limited, shaping):
    # Not a test of speed: however slow the machine, it cannot be faster than the link.
    rate_mbit, size = 40, 1_000_000
    try:
        with hosts.lab(2, rate_mbit, shaping=shaping) as lab:
            # Lift the other end's limit, so that the one under test has to hold on its own.
            folder = hosts.RUN / lab[0].lab / "lab"
            uplink = (folder / "switch", "up0") if shaping.beyond else (folder / "0", "eth0")
            namespace, device = (folder / "switch", "port1") if limited == "up" else uplink
            network.call("nsenter", f"--net={namespace}/net", "tc", "qdisc", "del", "dev", device, "root")
            received, seconds, _ = transfer(lab[0], lab[1], size)
    except hosts.MissingQdisc as missing:
        pytest.skip(str(missing))
    assert received == size
    assert seconds >= (size - 2 * BURST_BYTES) * 8 / (rate_mbit * 1e6)


@needs_lab
@pytest.mark.parametrize("shaping", [
    Shaping(), Shaping("htb"), Shaping(beyond=True), pytest.param(Shaping("smooth"), marks=needs_relay)
])  # fmt: skip
def test_links_of_a_lab_may_be_given_other_rates(shaping):
    size = 1_000_000
    try:
        with hosts.lab(2, (400, 1000), shaping=shaping) as lab:
            changed = hosts.change(lab, (40, 80))
            assert [host.rate_mbit for host in changed] == [40, 80] and hosts.attach(lab[0].lab) == changed
            received, seconds, _ = transfer(*changed, size)
            assert received == size
            assert seconds >= (size - 2 * BURST_BYTES) * 8 / 40e6  # as above
            for wrong, rates in ((lab, (40, None)), (lab, 0)):
                with pytest.raises(ValueError, match="rate"):
                    hosts.change(wrong, rates)
            with pytest.raises(hosts.LabError, match="not all hosts of a lab that is up"):
                hosts.change(lab[:1], 40)
        with pytest.raises(hosts.LabError, match="not all hosts of a lab that is up"):
            hosts.change(lab, 40)
    except hosts.MissingQdisc as missing:
        pytest.skip(str(missing))


@needs_lab
@pytest.mark.parametrize("shaper", ["tbf", "htb"])
def test_queue_is_as_long_as_asked_for(shaper):
    try:
        with hosts.lab(1, 40, shaping=Shaping(shaper, queue_ms=100)) as (host,):
            shown = subprocess.check_output(host.command("tc", "qdisc", "show", "dev", "eth0"), timeout=DEADLINE_S)
    except hosts.MissingQdisc as missing:
        pytest.skip(str(missing))
    if shaper == "tbf":
        assert b" lat 100ms" in shown  # what remains of its limit when the burst has passed
    else:
        assert b" limit %db" % (BURST_BYTES + 500_000) in shown


# Print which congestion control their end of a connection has.
CONTROL_OF_LISTENER = """
import socket
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
accepted = listener.accept()[0]
print(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""
CONTROL_OF_CONNECTION = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""


@needs_lab
@pytest.mark.parametrize("congestion", CONGESTION)
def test_congestion_control_is_that_asked_for_at_both_ends(congestion):
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if congestion not in ("machine", *available):
        pytest.skip(f"this kernel has no {congestion}")
    with hosts.lab(2, shaping=Shaping(congestion=congestion)) as lab:
        found = connected(lab[0], CONTROL_OF_CONNECTION, lab[1], CONTROL_OF_LISTENER)
    assert found == [default if congestion == "machine" else congestion] * 2


@needs_lab
@pytest.mark.parametrize("heeds", [True, False])
def test_error_inside_removes_hosts_and_processes(monkeypatch, heeds):
    monkeypatch.setattr(network, "TERMINATE_TIMEOUT_S", DEADLINE_S if heeds else 0.0)
    with pytest.raises(ZeroDivisionError):
        with hosts.lab(2) as lab:
            deafness = "" if heeds else "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            forgotten = start(lab[1], deafness + SINK)
            forgotten.stdout.readline()
            assert traces(lab[0].lab)
            1 / 0
    assert forgotten.wait(DEADLINE_S) == -(signal.SIGTERM if heeds else signal.SIGKILL)
    forgotten.stdout.close()
    assert traces(lab[0].lab) == []


@needs_lab
def test_ctrl_c_removes_hosts():
    with program_with_a_lab() as (process, name):
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)
    assert traces(name) == []


@needs_lab
def test_second_ctrl_c_does_not_cut_the_removal_in_two(monkeypatch):
    call = network.call

    def interrupted(*argv):
        if "umount" in argv:
            os.kill(os.getpid(), signal.SIGINT)
        return call(*argv)

    with pytest.raises(KeyboardInterrupt):
        with hosts.lab(2) as lab:
            monkeypatch.setattr(network, "call", interrupted)
    assert traces(lab[0].lab) == []


@needs_lab
def test_next_lab_removes_what_a_killed_program_left():
    with program_with_a_lab() as (process, name):
        process.kill()
        process.wait(DEADLINE_S)
        (left,) = [one for one in hosts.status() if one.name == name]
        assert left.state == "left over"
    with hosts.lab(1) as lab:
        assert traces(name) == []
        assert traces(lab[0].lab)


@needs_lab
def test_lab_in_use_cannot_be_taken_down_by_another():
    with program_with_a_lab() as (process, name):
        with pytest.raises(hosts.LabError, match="in use by the program that made it"):
            hosts.down(name)
        assert traces(name)
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)


@needs_lab
def test_failed_command_is_told_with_what_it_printed(monkeypatch):
    monkeypatch.setattr(Shaping, "limit_bytes", lambda *_: -1 << 40)  # which tc refuses
    with pytest.raises(hosts.LabError, match=r"'nsenter .* tbf .*' failed with status \d+: .+"):
        with hosts.lab(1, rate_mbit=10):
            pass
    assert [one.name for one in hosts.status() if str(os.getpid()) in one.name] == []


@pytest.mark.parametrize("arguments", [
    {"count": 0}, {"count": 2, "rate_mbit": 0}, {"count": 2, "delay_ms": -1},
    *({"count": 2, "shaping": shaping} for shaping in (Shaping("sfq"), Shaping(queue_ms=0), Shaping(congestion="x"))),
    {"count": 2, "loss": 1.0}, {"count": 2, "loss": -0.1}, {"count": 2, "delay_ms": 1, "shaping": Shaping("tbf")},
])  # fmt: skip
def test_senseless_numbers_are_refused(arguments):
    with pytest.raises(ValueError):
        with hosts.lab(**arguments):
            pass


def test_missing_command_is_named(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert "'tc'" in hosts.why_unavailable()


def test_missing_capabilities_are_named(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(hosts, "_effective_capabilities", lambda: 0)
    assert "root" in hosts.why_unavailable()
