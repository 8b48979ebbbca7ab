"""Smooth links, of a relay of P3's own: their rate, delay and losses, what they count, and that nothing stays behind.

No test is about speed: a link is never faster than it should be, however slow the machine.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import time

import pytest
from lab_programs import connected, program_with_a_lab, start
from lab_traces import DEADLINE_S, needs_relay, output, relays, traces

from p3 import cli
from p3.measure.lab import hosts, network, relay
from p3.measure.lab.shaping import Shaping

pytestmark = needs_relay
SMOOTH = Shaping("smooth")

# One sends BYTES and prints when it began, and how long it took to connect; the other when the last came, and a digest.
SOURCE = """
import random, socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    connected = time.monotonic() - began
    size = int(sys.argv[3])
    connection.sendall(random.Random(size).getrandbits(8 * size).to_bytes(size, "big"))
print(began, connected)
"""
SINK = """
import hashlib, socket, sys, time
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
connection, digest = listener.accept()[0], hashlib.sha256()
while True:
    data = connection.recv(1 << 16)
    if not data:
        break
    digest.update(data)
print(time.monotonic(), digest.hexdigest())
"""


def transfer(source, sink, size):
    """(seconds, seconds to connect) for so many bytes, all of which have come as they were sent."""
    told, came = (text.split() for text in connected(source, SOURCE, sink, SINK, size))
    assert came[1] == hashlib.sha256(random.Random(size).getrandbits(8 * size).to_bytes(size, "big")).hexdigest()
    return float(came[0]) - float(told[0]), float(told[1])


def frames_bytes(size):
    """The least that a payload takes on the wire: in full packets without options."""
    return size * 1514 / 1460


@pytest.mark.parametrize("rates", [(40, None), (None, 40)], ids=["up", "down"])
def test_a_link_is_never_faster_than_its_rate(rates):
    size = 1_000_000
    with hosts.lab(2, rates, shaping=SMOOTH) as lab:
        seconds, _ = transfer(*lab, size)
        (host,) = [one for one in lab if one.rate_mbit]
        counts = hosts.carried(lab)[host.node]
    assert seconds >= frames_bytes(size) * 8 / 40e6
    assert counts["up" if host.node == 0 else "down"]["bytes"] >= frames_bytes(size)


def test_delay_is_paid_once_each_way_and_by_all_that_is_sent():
    with hosts.lab(2, delay_ms=40) as lab:
        seconds, connect_s = transfer(*lab, 1)
    assert connect_s >= 0.080 and seconds >= 0.120


def test_what_is_lost_is_sent_again_by_tcp_and_counted():
    size = 2_000_000
    with hosts.lab(2, shaping=SMOOTH, loss=0.02) as lab:
        transfer(*lab, size)
        sender, receiver = hosts.carried(lab)
        cards = [int(output(host, "cat", f"/sys/class/net/eth0/statistics/{way}_bytes"))
                 for host, way in zip(lab, ("tx", "rx"))]  # fmt: skip
    assert 0 < sender["up"]["lost"] < 0.1 * sender["up"]["packets"]
    assert sender["down"]["lost"] == receiver["down"]["lost"] == sender["up"]["dropped"] == 0
    assert receiver["down"]["packets"] <= sender["up"]["packets"] - sender["up"]["lost"]
    for carried in cards:
        assert size < carried < 1.25 * size


# Sends numbered datagrams.
DATAGRAMS = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[3])):
    sender.sendto(number.to_bytes(4, "big"), (sys.argv[1], int(sys.argv[2])))
"""
# Tells its port, is told how many there will be, and prints which ones.
RECEIVED = """
import json, socket
SO_RCVBUFFORCE = 33
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 22)
receiver.bind(("", 0))
receiver.settimeout(30)
print(receiver.getsockname()[1], flush=True)
print(json.dumps([int.from_bytes(receiver.recv(100), "big") for _ in range(int(input()))]))
"""


def received_datagrams(seed, count=500):
    """Numbers of those that came from one host to another, of which a fifth is lost, and how many the relay counts."""
    with hosts.lab(2, shaping=SMOOTH, loss=0.2, seed=seed) as lab:
        # Nothing but these datagrams is sent: no question for an address, no answer.
        address = output(lab[1], "cat", "/sys/class/net/eth0/address")
        output(lab[0], "ip", "neigh", "replace", lab[1].address, "lladdr", address, "dev", "eth0", "nud", "permanent")
        with subprocess.Popen(
            lab[1].command(sys.executable, "-c", RECEIVED), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            universal_newlines=True,
        ) as receiver:
            try:
                port = receiver.stdout.readline().strip()
                output(lab[0], sys.executable, "-c", DATAGRAMS, lab[1].address, port, str(count))
                deadline = time.monotonic() + DEADLINE_S
                while hosts.carried(lab)[0]["up"]["packets"] < count:
                    assert time.monotonic() < deadline, hosts.carried(lab)
                    time.sleep(0.01)
                lost = hosts.carried(lab)[0]["up"]["lost"]
                numbers = json.loads(receiver.communicate(f"{count - lost}\n", timeout=DEADLINE_S)[0])
            finally:
                receiver.kill()
    return numbers, lost


def test_the_same_packets_are_lost_again_and_others_with_another_seed():
    numbers, lost = received_datagrams(seed=1)
    assert numbers == sorted(numbers) and len(numbers) == 500 - lost
    assert 60 < lost < 140
    assert received_datagrams(seed=1) == (numbers, lost)
    assert received_datagrams(seed=2)[0] != numbers


# Tries to reach ADDRESS PORT for so many seconds; what is asked for an address in vain is forgotten after a while.
REACH = """
import socket, sys, time
deadline = time.monotonic() + float(sys.argv[3])
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), deadline - time.monotonic()).close()
        break
    except OSError:
        if time.monotonic() > deadline - 0.1:
            sys.exit(1)
        time.sleep(0.05)
"""
LISTEN = """
import signal, socket
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
signal.pause()
"""


def test_a_host_whose_cable_is_out_is_not_reached_until_it_is_in_again():
    with hosts.lab(3, shaping=SMOOTH) as lab, start(lab[1], LISTEN) as listener:
        try:
            port = listener.stdout.readline().strip()
            folder = hosts.RUN / lab[0].lab / "lab"
            network.cut(folder, 1)
            for end in (lab[0], lab[2]):
                argv = end.command(sys.executable, "-c", REACH, lab[1].address, port, "0.5")
                assert subprocess.call(argv, timeout=DEADLINE_S) == 1
            network.mend(folder, 1)
            output(lab[0], sys.executable, "-c", REACH, lab[1].address, port, str(DEADLINE_S - 5))
        finally:
            listener.kill()


def test_the_relay_ends_with_its_lab():
    with hosts.lab(2, delay_ms=1) as lab:
        (carrier,) = relays(lab[0].lab)
        assert network.processes(hosts.RUN / lab[0].lab / "lab") == {carrier: network.SWITCH}
        (state,) = [one for one in hosts.status() if one.name == lab[0].lab]
        assert state.processes == [[], []] and len(state.carried) == 2
    assert relays(lab[0].lab) == traces(lab[0].lab) == []


def test_the_relay_of_a_killed_program_is_ended_by_the_next_lab():
    with program_with_a_lab("loss=0.1") as (process, name):
        assert len(relays(name)) == 1
        process.kill()
        process.wait(DEADLINE_S)
        assert [one.state for one in hosts.status() if one.name == name] == ["left over"]
    with hosts.lab(1):
        assert relays(name) == traces(name) == []


def test_a_relay_carries_frames_while_what_runs_on_the_hosts_ends(monkeypatch):
    monkeypatch.setattr(network, "TERMINATE_TIMEOUT_S", DEADLINE_S)
    says_goodbye = (
        "import signal, socket, sys; peer = socket.create_connection((sys.argv[1], int(sys.argv[2])));\n"
        "signal.signal(signal.SIGTERM, lambda *_: (peer.sendall(b'goodbye'), peer.close(), sys.exit(0)))\n"
        "print('ready', flush=True); signal.pause()"
    )
    hears = (
        "import signal, socket; signal.signal(signal.SIGTERM, signal.SIG_IGN); s = socket.create_server(('', 0));\n"
        "print(s.getsockname()[1], flush=True); c = s.accept()[0]; print(c.recv(100).decode(), flush=True)"
    )
    with hosts.lab(2, delay_ms=20) as lab:
        listener = start(lab[1], hears)
        port = listener.stdout.readline().strip()
        caller = start(lab[0], says_goodbye, lab[1].address, port)
        assert caller.stdout.readline() == "ready\n"
    with listener, caller:
        assert listener.stdout.read() == "goodbye\n"
        assert (caller.wait(DEADLINE_S), listener.wait(DEADLINE_S)) == (0, 0)


def test_status_tells_how_links_are_and_what_they_carried(capsys):
    name = "test-%d-s" % os.getpid()
    try:
        assert cli.main(["lab", "up", "--name", name, "--rate", "50mbit", "--delay", "2ms", "--loss", "0.5%"]) == 0
        assert "%s-0 to %s-1: " % (name, name) in capsys.readouterr().out
        assert cli.main(["lab", "status"]) == 0
        told = capsys.readouterr().out
        assert "%s: up, hosts: 2, delay 2 ms, loss 0.5%%\n" % name in told
        counts = hosts.carried(hosts.attach(name))
        for one in counts:
            assert "up: %d packets, " % one["up"]["packets"] in told
    finally:
        hosts.down(name)
    assert relays(name) == []


def test_without_tap_devices_that_is_said(monkeypatch):
    monkeypatch.setattr(relay, "DEVICE", "/dev/net/no-such-device")
    with pytest.raises(hosts.LabError, match="need TAP devices, and /dev/net/no-such-device cannot be opened"):
        with hosts.lab(1, delay_ms=1):
            pass


def test_a_relay_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(relay, "prepare", lambda lab, hosts: None)
    monkeypatch.setattr(relay, "set_link", lambda *_: None)
    with pytest.raises(hosts.LabError, match=r"lab/links: No such file or directory"):
        with hosts.lab(1, delay_ms=1):
            pass
