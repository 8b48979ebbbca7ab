"""Hosts whose names and addresses are not what one would wish for, each with a network and an /etc/hosts of its own."""

import json
import os
import sys

import pytest
from lab_traces import DEADLINE_S, needs_lab, output
from node_jobs import TRAIN
from processes import SECRET, Process, clean_environment, write_script

from p3.measure.lab import hosts as lab

PORT = "9091"  # a lab's hosts have all ports to themselves
ENTER = 'mount --bind "$0" /etc/hosts && exec "$@"'


class Known:
    """A host of a lab, and what its /etc/hosts says."""

    def __init__(self, host, folder, text):
        self.host, self.names = host, folder / ("hosts-of-%d" % host.node)
        self.names.write_text("127.0.0.1 localhost\n" + text)

    def learns(self, text):
        with open(self.names, "a") as file:  # in place: the file is mounted
            file.write(text)

    def start(self, processes, folder, role, *command, **settings):
        env = clean_environment(DMLC_ROLE=role, DMLC_PS_ROOT_PORT=PORT, DMLC_NUM_WORKER="2", DMLC_NUM_SERVER="2",
                                P3_SECRET=SECRET, **settings)  # fmt: skip
        entering = ["unshare", "--mount", "sh", "-c", ENTER, str(self.names)]
        argv = self.host.command(*entering, sys.executable, "-m", "p3", "exec", *command)
        processes.append(Process(argv, env, folder))
        return processes[-1]


@needs_lab
def test_a_schedulers_name_may_be_its_loopbacks_at_home_and_unknown_elsewhere_at_first(processes, tmp_path):
    """As Debian has it in /etc/hosts; and as a headless service, whose name is known once its pod runs."""
    script = write_script(tmp_path, TRAIN)
    with lab.lab(2) as pair:
        head = Known(pair[0], tmp_path, "127.0.1.1 head\n")
        other = Known(pair[1], tmp_path, "")
        nodes = []
        for number, machine in enumerate((other, head)):
            common = dict(P3_RANK=str(1 - number), DMLC_PS_ROOT_URI="head")
            nodes.append(machine.start(processes, tmp_path, "server", **common))
            nodes.append(machine.start(processes, tmp_path, "worker", sys.executable, script, **common))
        warned = [node.popen.stderr.readline().decode() for node in nodes[:2]]
        assert ["DMLC_PS_ROOT_URI=head does not resolve" in line for line in warned] == [True, True], warned
        nodes.append(head.start(processes, tmp_path, "scheduler", DMLC_PS_ROOT_URI="head"))
        other.learns("%s head\n" % pair[0].address)
        ended = [node.wait(DEADLINE_S) for node in nodes]
        assert [(node.code, node.err) for node in ended] == [(0, "")] * 5, ended
        assert sorted(node.out for node in ended if node.out) == ["rank %d has 9.0 9.0\n" % rank for rank in (0, 1)]


@needs_lab
def test_a_server_that_gives_a_loopback_address_to_other_machines_is_named(processes, tmp_path):
    script = write_script(tmp_path, TRAIN)
    with lab.lab(2) as pair:
        here, there = (Known(host, tmp_path, "") for host in pair)

        def start(machine, role, *command, **settings):
            return machine.start(processes, tmp_path, role, *command, DMLC_PS_ROOT_URI=pair[0].address, **settings)

        nodes = [start(here, "scheduler"), start(here, "server", P3_RANK="0"),
                 start(here, "server", P3_RANK="1", DMLC_NODE_HOST="127.0.0.1")]  # fmt: skip
        for rank, machine in enumerate((here, there)):
            nodes.append(start(machine, "worker", sys.executable, script, P3_RANK=str(rank)))
        for node in nodes:
            ended = node.wait(DEADLINE_S)
            assert ended.code != 0 and "server 1 (127.0.0.1)" in ended.err, ended
            assert "worker 1 (%s) on another machine" % pair[1].address in ended.err, ended


SSH = """
import os, sys
names = {%r: %r}
os.execv(sys.executable, [sys.executable, "-m", "p3.measure.lab.ssh", names[sys.argv[1]], sys.argv[2]])
"""
ONLY_IPV6 = """
for setting in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 0 > "$setting"; done
ip -4 address flush dev eth0
ip link set dev lo down; ip link set dev lo up
ip -4 address flush dev lo
ip -6 address add "$0/64" dev eth0 nodad
"""


@needs_lab
@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this kernel has no IPv6")
def test_hosts_that_have_ipv6_alone(processes, tmp_path):
    (tmp_path / "job").mkdir()
    script, ssh = write_script(tmp_path / "job", TRAIN), tmp_path / "ssh.py"
    with lab.lab(2) as pair:
        addresses = ["fd00:33::%d" % (host.node + 1) for host in pair]
        for host, address in zip(pair, addresses):
            output(host, "sh", "-ec", ONLY_IPV6, address)
            assert "inet " not in output(host, "ip", "address")
        ssh.write_text(SSH % (addresses[1], pair[1].name))
        (tmp_path / "hosts").write_text("localhost\n[%s] slots=1\n" % addresses[1])
        env = clean_environment(P3_SSH="%s %s" % (sys.executable, ssh), P3_LOCAL="tcp")
        p3 = [sys.executable, "-m", "p3"]
        run = [*p3, "run", "-n", "2", "-s", "2", "--hostfile", "hosts", sys.executable, script]
        run_here = [*p3, "run", "-n", "2", "-s", "2", sys.executable, script]
        doctor = [*p3, "doctor", "--hostfile", "hosts", "--json", "--seconds", "0.1"]
        for command in (run, run_here, doctor):
            processes.append(Process(pair[0].command(*command), env, tmp_path))
        *trained, examined = (process.wait(2 * DEADLINE_S) for process in processes)
    for job in trained:
        assert (job.code, job.err) == (0, ""), job
        assert sorted(job.out.splitlines()) == ["[worker %d] rank %d has 9.0 9.0" % (rank, rank) for rank in (0, 1)]
    assert examined.err == ""
    found = json.loads(examined.out)
    assert [(host["address"], host["interface"]) for host in found["hosts"]] == [
        (address, "eth0") for address in addresses
    ]
    assert [path.get("error") for path in found["paths"]] == [None, None]
