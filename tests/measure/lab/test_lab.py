"""`p3 lab`: hosts that outlive the command, are machines of their own for P3, and leave nothing behind."""

import itertools
import json
import os
import re
import shlex
import signal
import sys

import pytest
from lab_traces import DEADLINE_S, needs_lab, needs_relay, output, relays, traces
from processes import PYTHONPATH, ROOT, Process, clean_environment

from p3.measure.lab import hosts, network

LAB = [sys.executable, "-m", "p3", "lab"]
PYTHON = [sys.executable, "-c"]


@pytest.fixture
def name():
    """Of a lab that does not outlive the test."""
    yield from _names("a")


@pytest.fixture
def other_name():
    yield from _names("b")


def _names(letter):
    name = "test-%d-%s" % (os.getpid(), letter)
    yield name
    if traces(name):
        hosts.down(name)


@pytest.fixture
def start(processes, tmp_path):
    """start(argv, ...) -> Process."""

    def start(*argv, **env):
        processes.append(Process(list(argv), clean_environment(**env), tmp_path))
        return processes[-1]

    return start


@pytest.fixture
def p3_lab(start):
    """p3_lab(argument, ...) -> Finished."""
    return lambda *arguments: start(*LAB, *arguments).wait(DEADLINE_S)


def rates_of(host):
    """(up, down) in Mbit/s, as the kernel has them; None: no limit."""
    folder = hosts.RUN / host.lab / "lab"

    def rate(namespace, device):
        shown = network.call("nsenter", "--net=%s/net" % namespace, "tc", "-j", "qdisc", "show", "dev", device)
        return next((one["options"]["rate"] * 8 / 1e6 for one in json.loads(shown) if one["kind"] == "tbf"), None)

    return rate(folder / str(host.node), "eth0"), rate(folder / "switch", "port%d" % host.node)


def up(name, *arguments):
    """As hosts.up; the test is skipped if the kernel cannot limit a rate."""
    try:
        return hosts.up(name, *arguments)
    except hosts.MissingQdisc as missing:
        pytest.skip(str(missing))


@needs_lab
def test_hosts_stand_from_up_to_down(name, p3_lab, start):
    started = p3_lab("up", "--name", name)
    assert started.code == 0, started.err
    assert "%s-1  10.33.0.2  no limit" % name in started.out and "%s-1 to %s-0: " % (name, name) in started.out

    assert p3_lab("exec", "--name", name, "1", "--", "hostname").out == name + "-1\n"
    assert p3_lab("exec", "--name", name, "1", "--", "sh", "-c", "exit 7").code == 7
    sleeper = start(*LAB, "exec", "--name", name, "0", "--", "sh", "-c", "echo here; exec sleep 1000")
    assert sleeper.read_line() == "here"
    (state,) = [one for one in json.loads(p3_lab("status", "--json").out) if one["name"] == name]
    assert (state["state"], state["processes"]) == ("up", [[sleeper.popen.pid], []])
    assert "%s-0  10.33.0.1  no limit  processes %d" % (name, sleeper.popen.pid) in p3_lab("status").out

    assert p3_lab("down", "--name", name).code == 0
    assert sleeper.wait(DEADLINE_S).code == -signal.SIGTERM
    assert traces(name) == []


@needs_lab
def test_labs_side_by_side_do_not_meet(name, other_name, start):
    here, there = hosts.up(name, 2), hosts.up(other_name, 2)
    assert [host.address for host in here] == [host.address for host in there]
    listen = "import socket; s = socket.create_server(('', 9100)); print('ready', flush=True); s.accept()"
    connect = [*PYTHON, "import socket; socket.create_connection(('10.33.0.1', 9100), 10)"]
    listener = start(*here[0].command(*PYTHON, listen))
    assert listener.read_line() == "ready"
    assert start(*there[1].command(*connect)).wait().code != 0
    hosts.down(other_name)
    assert traces(other_name) == []
    assert start(*here[1].command(*connect)).wait().code == 0
    assert listener.wait().code == 0


# hosts.up(NAME, 2), with a shaper if one is named, ended by SIGNAL when it is about to run the command numbered POINT;
# with "during" that command is under way and lives on.
INTERRUPTED_UP = """
import os, sys
from p3.measure.lab import hosts, network
from p3.measure.lab.shaping import Shaping
name, number, point, during = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "during"
call, done = network.call, 0
def interrupted(*argv):
    global done
    if done == point:
        if during:
            call("sh", "-c", 'kill -%d $PPID; sleep 0.2; exec "$@"' % number, "sh", *argv)
        os.kill(os.getpid(), number)
    done += 1
    return call(*argv)
network.call = interrupted
hosts.up(name, 2, shaping=Shaping(*sys.argv[5:]))
sys.exit("was not interrupted")
"""


@needs_lab
@pytest.mark.parametrize("point, when", [(0, "before"), (0, "during"), (1, "before"), (4, "before"), (8, "during"),
                                         (12, "before"), (16, "during")])
@pytest.mark.parametrize("next_command", ["up", "down"])
def test_killed_up_leaves_what_the_next_command_removes(name, start, point, when, next_command, shaper=()):
    killed = start(*PYTHON, INTERRUPTED_UP, name, str(signal.SIGKILL.value), str(point), when, *shaper)
    assert killed.wait(DEADLINE_S).code == -signal.SIGKILL
    if next_command == "up":
        assert output(hosts.up(name, 2)[1], "hostname") == name + "-1"
    hosts.down(name)
    assert traces(name) == []


@needs_relay
@pytest.mark.parametrize("point, when", [(7, "before"), (7, "during"), (8, "before"), (11, "during")])
@pytest.mark.parametrize("next_command", ["up", "down"])
def test_killed_up_leaves_no_relay_that_the_next_command_does_not_end(name, start, point, when, next_command):
    test_killed_up_leaves_what_the_next_command_removes(name, start, point, when, next_command, ["smooth"])
    assert relays(name) == []


@needs_lab
@pytest.mark.parametrize("point", [0, 9, 16])
def test_ctrl_c_while_hosts_are_made_removes_them(name, start, point):
    interrupted = start(*PYTHON, INTERRUPTED_UP, name, str(signal.SIGINT.value), str(point), "before")
    assert "KeyboardInterrupt" in interrupted.wait(DEADLINE_S).err
    assert traces(name) == []


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_rates_are_checked_removes_the_hosts(name, start, number):
    starting = start(*LAB, "up", "--name", name)
    assert starting.read_line() == "lab %s is up:" % name
    starting.signal(number)
    finished = starting.wait(DEADLINE_S)
    assert (finished.code, finished.err) == (128 + number, "")
    assert traces(name) == []


# `p3 lab up --name NAME`, to which SIGNAL comes while it starts the process numbered POINT that a transfer consists of.
SIGNAL_AT_A_TRANSFER = """
import os, subprocess, sys, time
from p3.cli import main
name, number, point = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
class Popen(subprocess.Popen):
    started = 0
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "receive" in command or "send" in command:
            Popen.started += 1
            if Popen.started == point + 1:
                deadline = time.monotonic() + 30
                while "send" in command and not self.is_connected() and time.monotonic() < deadline:
                    time.sleep(0.001)
                os.kill(os.getpid(), number)  # before the caller has the process
    def is_connected(self):
        with open("/proc/%d/net/tcp" % self.pid) as connections:
            return any(line.split()[3] == "01" for line in connections)
subprocess.Popen = Popen
sys.exit(main(["lab", "up", "--name", name]))
"""


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("point", [0, 1, 2, 3])
def test_signal_while_a_transfer_is_started_ends_both_ends_of_it(name, start, number, point):
    starting = start(*PYTHON, SIGNAL_AT_A_TRANSFER, name, str(number.value), str(point))
    finished = starting.wait(DEADLINE_S)
    assert (finished.code, finished.err) == (128 + number, "")
    assert traces(name) == []


@needs_lab
def test_hosts_share_neither_name_nor_memory_nor_loopback(name):
    first, second = hosts.up(name, 2)
    for host in (first, second):
        assert output(host, "hostname") == host.name
        output(host, "sh", "-c", "echo $0 > /dev/shm/%s" % name, host.name)
        output(host, *PYTHON, SEGMENT, "make")
        assert output(host, "ls", "/sys/class/net").split() == ["eth0", "lo"]
    for host in (first, second):
        assert output(host, "cat", "/dev/shm/" + name) == host.name
        assert output(host, *PYTHON, SEGMENT, "count") == "1"
    assert not os.path.exists("/dev/shm/" + name)
    identity = [*PYTHON, "from p3.cluster.node import machine_id; print(machine_id())"]
    env = ["env", "PYTHONPATH=" + PYTHONPATH]
    identities = [output(host, *env, *identity) for host in (first, second, first)]
    assert identities[0] == identities[2] != identities[1]


# System V shared memory: make a segment that stays, or count those there are.
SEGMENT = """
import ctypes, sys
if sys.argv[1] == "make":
    assert ctypes.CDLL(None).shmget(0x7033, 4096, 0o1600) >= 0
else:
    print(len(open("/proc/sysvipc/shm").readlines()) - 1)
"""

# A worker of two, with two servers; rank 0 is on the host of server 0. Sends its key both ways, in as many rounds.
SIZE, ROUNDS = 100_000, 10
TRAFFIC = """
import p3
import mxnet as mx
kv = mx.kv.create("p3_sync")
value = mx.nd.ones((%d,))
kv.init(0, value)
for _ in range(%d):
    kv.pushpull(0, value, out=value)
mx.nd.waitall()
print("rings", sum("memfd:p3-ring" in line for line in open("/proc/self/maps")))
""" % (SIZE, ROUNDS)


@needs_lab
def test_job_shares_memory_within_a_host_and_every_byte_between_hosts_passes_the_nic(name, start):
    lab = hosts.up(name, 2)
    job = {"DMLC_PS_ROOT_URI": lab[0].address, "DMLC_PS_ROOT_PORT": "9091", "DMLC_NUM_WORKER": "2",
           "DMLC_NUM_SERVER": "1", "P3_SECRET": "a secret of this test alone", "OMP_NUM_THREADS": "1"}

    def start_role(host, role, *command, **env):
        argv = host.command(sys.executable, "-m", "p3", "exec", *command)
        return start(*argv, DMLC_ROLE=role, **job, **env)

    roles = [start_role(lab[0], "scheduler"), start_role(lab[0], "server")]
    workers = [start_role(lab[rank], "worker", *PYTHON, TRAFFIC, P3_RANK=str(rank)) for rank in range(2)]
    (near, far), _ = [[one.wait(2 * DEADLINE_S) for one in some] for some in (workers, roles)]
    assert (near.code, far.code) == (0, 0), (near.err, far.err)
    assert near.out != "rings 0\n" and far.out == "rings 0\n"

    def counted(host, device, direction):
        return int(output(host, "cat", "/sys/class/net/%s/statistics/%s_bytes" % (device, direction)))

    payload = SIZE * 4 * ROUNDS
    for host, direction in itertools.product(lab, ("rx", "tx")):
        assert payload < counted(host, "eth0", direction) < 1.25 * payload + 200_000
    assert counted(lab[0], "lo", "rx") < payload / 4
    assert counted(lab[1], "lo", "rx") == 0


@needs_lab
def test_each_host_has_the_rate_that_it_was_given(name, p3_lab):
    lab = up(name, 3, [1000, 500, None])
    assert [rates_of(host) for host in lab] == [(1000, 1000), (500, 500), (None, None)]
    assert [host.rate_mbit for host in hosts.attach(name)] == [1000, 500, None]
    assert "%s-1  10.33.0.2  500 Mbit/s  idle" % name in p3_lab("status").out


@needs_lab
def test_rates_of_the_command_are_checked_by_a_transfer(name, p3_lab):
    try:
        with hosts.lab(1, rate_mbit=1):
            pass
    except hosts.MissingQdisc as missing:
        pytest.skip(str(missing))
    started = p3_lab("up", "--name", name, "--rate", "0.1gbit,50mbit")
    assert started.code == 0, started.err
    assert re.search(r"%s-0 to %s-1: [\d.]+ Mbit/s of 50 Mbit/s\n" % (name, name), started.out)
    assert [rates_of(host) for host in hosts.attach(name)] == [(100, 100), (50, 50)]


@needs_lab
def test_name_that_is_taken_is_refused_and_its_lab_stays(name, p3_lab):
    hosts.up(name, 1)
    refused = p3_lab("up", "--name", name)
    assert (refused.code, refused.out) == (1, "")
    assert "lab '%s' is up already: take it down first, or choose another name" % name in refused.err
    assert [host.name for host in hosts.attach(name)] == [name + "-0"]


@needs_lab
def test_lab_is_not_taken_down_from_one_of_its_hosts(name, start):
    (host,) = hosts.up(name, 1)
    refused = start(*host.command(*LAB, "down", "--name", name)).wait(DEADLINE_S)
    assert refused.code == 1 and "this process runs on a host of the lab itself" in refused.err
    assert "hosts: 1" in start(*host.command(*LAB, "status")).wait(DEADLINE_S).out


@pytest.mark.parametrize("arguments, words", [
    ("up --nodes 0", "'0' is not a number from 1 to 200"),
    ("up --rate fast", "'fast' is not a rate such as 800mbit"),
    ("up --rate 800mbit,", "'' is not a rate"),
    ("up --rate 1mbps", "tc reads `bps` as bytes"),
    ("up --delay 1", "'1' is not a delay such as 0.1ms"),
    ("up --queue 5", "'5' is not a delay such as 0.1ms"),
    ("up --shaper sfq", "invalid choice: 'sfq'"),
    ("up --loss 0.5", "'0.5' is not a share in percent such as 0.5%"),
    ("up --congestion vegas", "invalid choice: 'vegas'"),
    ("exec first -- true", "'first' is not a number from 0 to 200"),
])  # fmt: skip
def test_senseless_argument_is_refused_with_an_example(p3_lab, arguments, words):
    refused = p3_lab(*arguments.split())
    assert refused.code == 2 and words in refused.err


@needs_lab
@pytest.mark.parametrize("arguments, words", [
    ("up --name a/b", "'a/b' cannot name a lab"),
    ("up --name tmp-1", "'tmp-1' cannot name a lab"),
    ("up --nodes 3 --rate 1gbit,2gbit", "3 hosts need 3 rates or one for all, not 2"),
    ("up --loss 100%", "must be from 0 to below 1, not 1.0"),
    ("up --delay 1ms --shaper htb", "links that delay or lose are smooth ones: leave out the shaper htb"),
    ("up --rate 0mbit", "a rate must be from 0.1 to 1000000 Mbit/s, not 0.0"),
    ("exec 0", "needs the command to run"),
    ("exec 0 --name lab2 -- true", "takes its options before NODE; '--name' stands where the command begins"),
    ("exec --name no-such-lab 0 -- true", "there is no lab 'no-such-lab'"),
    ("exec --name ../../proc 0 -- true", "there is no lab '../../proc'"),
    ("down --name no-such-lab", "there is no lab 'no-such-lab'"),
    ("down --name ..", "there is no lab '..'"),
])  # fmt: skip
def test_what_cannot_be_done_is_told(p3_lab, arguments, words):
    refused = p3_lab(*arguments.split())
    assert (refused.code, refused.out) == (1, "")
    assert words in refused.err and "Traceback" not in refused.err


@needs_lab
def test_host_that_is_not_there_is_told(name, p3_lab):
    hosts.up(name, 2)
    refused = p3_lab("exec", "--name", name, "2", "--", "true")
    assert refused.code == 1 and "lab %s has no host 2, only 0 to 1" % name in refused.err


@pytest.mark.parametrize("action", ["up", "exec 0 -- true", "status", "down"])
def test_without_root_every_action_says_so(start, action):
    without = ["setpriv", "--bounding-set=-sys_admin,-net_admin"] if os.geteuid() == 0 else []
    refused = start(*without, *LAB, *action.split()).wait(DEADLINE_S)
    assert refused.code == 1
    assert re.search("a lab needs (root|the command)", refused.err), refused.err


@needs_lab
def test_commands_of_the_documentation_make_a_job(name, start, tmp_path):
    page = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S))
    assert "p3 lab up" in commands and "p3 lab down" in commands
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, options in (("python", ""), ("p3", "-m p3")):
        (programs / program).write_text('#!/bin/sh\nexec %s %s "$@"\n' % (shlex.quote(sys.executable), options))
        (programs / program).chmod(0o755)
    commands = re.sub(r"\bp3 lab (\w+)", r"p3 lab \1 --name " + name, commands)
    env = {"PATH": "%s:%s" % (programs, os.environ["PATH"]), "OMP_NUM_THREADS": "1"}
    finished = start("sh", "-ec", commands, **env).wait(2 * DEADLINE_S)
    if "this kernel has no tbf" in finished.err:
        pytest.skip(finished.err)
    assert finished.code == 0, finished.err
    for rank in range(2):
        assert '"result": "right"' in (tmp_path / ("worker%d.jsonl" % rank)).read_text()
    assert int(finished.out.splitlines()[-1]) > 5 * 11_000_000  # one of two hosts, in each of 6 rounds of 11.5 MB
    assert traces(name) == []
