"""`p3 doctor --hostfile` on the hosts of a lab, by real connections: what is wrong is found, and nothing else is."""

import asyncio
import json
import os
import re
import subprocess
import sys

import pytest
from lab_traces import DEADLINE_S, needs_lab, output
from processes import ROOT, SECRET, Process, clean_environment

from p3 import cli
from p3.cluster.node import listen
from p3.doctor import door, examination, forecast, judgement
from p3.measure.lab import hosts as lab

SSH = "%s -m p3.measure.lab.ssh" % sys.executable


@pytest.fixture
def doctor(tmp_path, processes):
    """doctor(hosts of a lab, options, settings) -> Finished: from the first of them, which is `localhost` to it."""

    def run(of_lab, *options, more=(), **settings):
        names = ["localhost", *(host.name for host in of_lab[1:]), *more]
        (tmp_path / "hosts").write_text("\n".join(names) + "\n")
        command = [sys.executable, "-m", "p3", "doctor", "--hostfile", str(tmp_path / "hosts"), "--seconds", "0.3"]
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        env = clean_environment(**{"P3_SSH": SSH, "PATH": path, **settings})
        processes.append(Process(of_lab[0].command(*command, *options), env, tmp_path))
        return processes[-1].wait(2 * DEADLINE_S)

    return run


def problems(finished):
    """What was found, as JSON; and the rows that are wrong."""
    assert finished.err == ""
    found = json.loads(finished.out)
    return found, [(row["subject"], row["finding"]) for row in found["rows"] if row["state"] == "PROBLEM"]


@needs_lab
def test_a_good_pair_is_found_good_and_told_what_a_model_makes_of_it(doctor):
    with lab.lab(2, rate_mbit=50) as pair:
        finished = doctor(pair, "--model", "vgg19", "--compute", "40")
        assert (finished.code, finished.err) == (0, "")
        assert "The hosts are ready." in finished.out and "PROBLEM" not in finished.out
        assert "every host reaches every other (2 paths)" in finished.out
        assert "1500 bytes, and packets of that size pass" in finished.out
        assert "vgg19: 574.7 MB, 40 s of computation, one worker and one server on each of 2 hosts" in finished.out
        # 575 MB over 50 Mbit/s: 92 s and more, and half of that would still be more than the computation.
        assert "docs/strategies.md, the row %r" % forecast.COMPRESSED in finished.out

        finished = doctor(pair, "--json", "--parameters", "1000", "--compute", "20")
        found, wrong = problems(finished)
        assert (finished.code, wrong) == (0, [])
        assert [host["address"] for host in found["hosts"]] == [host.address for host in pair]
        assert [(host["command"], host["installation"]) for host in found["hosts"]] == [(sys.prefix, sys.prefix)] * 2
        for path in found["paths"]:
            assert path["passes"] == 1500 and 0 < path["mbit"] < 100  # nothing passes a token bucket faster
        assert found["forecast"]["strategy"] == forecast.EXACT and found["forecast"]["model_bytes"] < 4001
        assert lab_is_idle(pair)


def lab_is_idle(of_lab):
    (status,) = [one for one in lab.status() if one.name == of_lab[0].lab]
    return not any(status.processes)


@needs_lab
def test_another_mtu_is_found(doctor):
    with lab.lab(3, rate_mbit=50) as three:
        output(three[2], "ip", "link", "set", "dev", "eth0", "mtu", "1400")
        found, wrong = problems(doctor(three, "--json"))
    assert [subject for subject, _ in wrong] == ["MTU"]
    assert "1500 on localhost and %s; 1400 on %s" % (three[1].name, three[2].name) in wrong[0][1]
    (row,) = [row for row in found["rows"] if row["state"] == "PROBLEM"]
    assert row["remedy"] == "on %s: ip link set dev eth0 mtu 1500" % three[2].name
    passes = {(path["from"], path["to"]): path["passes"] for path in found["paths"]}
    assert passes[0, 1] == 1500 and passes[2, 0] == 1400 and 1400 <= passes[0, 2] < 1500


@needs_lab
def test_packets_that_get_lost_between_hosts_of_one_mtu_are_found(doctor):
    with lab.lab(2, rate_mbit=50) as pair:
        for host in pair:
            output(host, "ip", "link", "set", "dev", "eth0", "mtu", "1600")  # the switch between them has 1500
        found, wrong = problems(doctor(pair, "--json"))
    of_packets = [finding for subject, finding in wrong if subject == "MTU"]  # TCP loses packets, too: rates are any
    assert len(of_packets) == 2
    for path, finding in zip(found["paths"], of_packets):
        assert 1500 <= path["passes"] < 1600 and "packets of %d bytes pass" % path["passes"] in finding


@needs_lab
def test_a_slower_host_is_found(doctor):
    with lab.lab(3, rate_mbit=[200, 200, 20]) as three:
        finished = doctor(three)
    assert (finished.code, finished.err) == (1, "")
    wrong = [line.split(" at ")[0] for line in finished.out.splitlines() if line.startswith("PROBLEM")]
    assert wrong == ["%-8s %-22s %s %s" % ("PROBLEM", "rate", three[2].name, verb) for verb in ("sends", "receives")]
    assert "what to do: look at its link (ethtool eth0)" in finished.out
    assert "Something is wrong: see PROBLEM above." in finished.out


@needs_lab
def test_a_way_that_is_blocked_is_found(doctor):
    with lab.lab(3, rate_mbit=50) as three:
        # What host 1 sends to host 2 arrives, but no answer leaves: as behind a firewall that drops.
        output(three[2], "ip", "route", "add", "blackhole", three[1].address + "/32")
        found, wrong = problems(doctor(three, "--json"))
    assert [subject for subject, _ in wrong] == ["ports", "ports"]
    there, back = (finding for _, finding in wrong)
    assert there.startswith("%s does not reach %s at %s" % (three[1].name, three[2].name, three[2].address))
    assert "no answer within 5 s" in there
    assert back.startswith("%s does not reach %s at %s" % (three[2].name, three[1].name, three[1].address))
    assert {(path["from"], path["to"]) for path in found["paths"] if "mbit" in path} == {(0, 1), (1, 0), (0, 2), (2, 0)}


@needs_lab
def test_another_version_is_found(doctor, tmp_path):
    """On one host Python finds a copy of P3 that says that it is another one."""
    copy = tmp_path / "copy" / "p3"
    copy.mkdir(parents=True)
    for entry in (ROOT / "p3").iterdir():
        if entry.name != "__init__.py":
            (copy / entry.name).symlink_to(entry)
    text = (ROOT / "p3" / "__init__.py").read_text()
    (version,) = [line for line in text.splitlines() if line.startswith("__version__ = ")]
    (copy / "__init__.py").write_text(text.replace(version, '__version__ = "0.0.9"'))
    ssh = tmp_path / "ssh.py"
    ssh.write_text(
        "import os, re, sys\n"
        "*options, name, line = sys.argv[1:]\n"
        "line = re.sub(%r, %r, line) if name.endswith('-2') else line\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'p3.measure.lab.ssh', *options, name, line])\n"
        % (re.escape(str(ROOT)) + "(?!/)", str(copy.parent))  # what lies there, as Python itself may, stays
    )
    with lab.lab(3, rate_mbit=50) as three:
        found, wrong = problems(doctor(three, "--json", P3_SSH="%s %s" % (sys.executable, ssh)))
    assert [subject for subject, _ in wrong] == ["P3"] and "0.0.9 on %s" % three[2].name in wrong[0][1]
    assert found["hosts"][2]["folder"] == str(copy.parent)


@needs_lab
def test_hosts_that_do_not_answer_are_named_and_the_others_are_examined(doctor, tmp_path):
    ssh = tmp_path / "ssh.py"
    ssh.write_text(
        "import os, sys, time\n"
        "name = sys.argv[-2]\n"
        "if name == 'mute': sys.stdin.read()\n"  # as long as the doctor keeps it
        "os.execv(sys.executable, [sys.executable, '-m', 'p3.measure.lab.ssh', *sys.argv[1:]])\n"
    )
    with lab.lab(2, rate_mbit=50) as pair:
        settings = {"P3_SSH": "%s %s" % (sys.executable, ssh)}
        found, wrong = problems(doctor(pair, "--json", "--timeout", "15", more=["mute", "lab-77"], **settings))
        assert lab_is_idle(pair)
    (mute, silent), (unknown, why) = wrong
    assert (mute, silent) == ("mute", "did not answer within 15 s")
    assert unknown == "lab-77" and "there is no lab 'lab'" in why
    assert len([path for path in found["paths"] if "mbit" in path]) == 2


def test_hosts_over_ssh(processes, tmp_path, sshd):
    """Two names of this machine, one of them over ssh."""
    (tmp_path / "hosts").write_text("localhost\nfar\n")
    command = [sys.executable, "-m", "p3", "doctor", "--hostfile", "hosts", "--seconds", "0.2", "--json"]
    processes.append(Process(command, clean_environment(P3_SSH=sshd, DMLC_NODE_HOST="127.0.0.1"), tmp_path))
    finished = processes[-1].wait(2 * DEADLINE_S)
    found, wrong = problems(finished)
    assert (finished.code, wrong) == (0, [])
    notes = [row["finding"] for row in found["rows"] if row["state"] == "note"]
    assert notes == ["localhost and far are the same one: nothing between them crosses a network"]


def test_examiners_may_be_started_by_anybody_and_one_that_dies_is_named(processes, tmp_path):
    """By nothing but their environment, as a batch system would start them; the secret is in a file."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)

    async def examine():
        listener = listen("127.0.0.1")
        examined = examination.Examination(listener, SECRET.encode(), ["a", "b", "c"])
        try:
            for rank in range(3):
                env = clean_environment(
                    DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(listener.getsockname()[1]),
                    P3_RANK=str(rank), P3_SECRET_FILE=str(secret),
                )  # fmt: skip
                processes.append(Process([sys.executable, "-m", "p3.doctor.examiner"], env, tmp_path))
            for rank in range(3):
                await asyncio.wait_for(examined.joined(rank), DEADLINE_S)
            processes[1].end()
            return await examined.run(0.1)
        finally:
            await examined.close()
            listener.close()

    found = asyncio.run(examine())
    assert [host["problem"] for host in found["hosts"]] == [None, "ended when asked to tell the time", None]
    assert [(path["from"], path["to"]) for path in found["paths"] if "mbit" in path] == [(0, 2), (2, 0)]
    for rank in (0, 2):
        finished = processes[rank].wait(DEADLINE_S)  # the doctor has gone, and so do they
        assert (finished.code, finished.err) == (0, "")


def test_a_stranger_is_sent_away(processes, tmp_path):
    env = clean_environment(DMLC_PS_ROOT_URI="127.0.0.1", P3_RANK="0", P3_SECRET="another secret than that")

    async def examine():
        listener = listen("127.0.0.1")
        examined = examination.Examination(listener, SECRET.encode(), ["a"])
        try:
            env["DMLC_PS_ROOT_PORT"] = str(listener.getsockname()[1])
            processes.append(Process([sys.executable, "-m", "p3.doctor.examiner"], env, tmp_path))
            return await asyncio.get_running_loop().run_in_executor(None, processes[-1].wait, DEADLINE_S)
        finally:
            await examined.close()
            listener.close()
            assert ["127.0.0.1 came and was sent away" in text for text in examined.refused] == [True]

    finished = asyncio.run(examine())
    assert finished.code == 1 and "it refused our proof of the job's secret" in finished.err


def test_who_knows_the_secret_and_has_no_place_is_a_problem_and_keeps_nobody_out(processes, tmp_path):
    """As where a launcher was told too few machines. None says which one it is: each takes the next place."""
    env = clean_environment(DMLC_PS_ROOT_URI="127.0.0.1", P3_SECRET=SECRET)

    async def examine():
        listener = listen("127.0.0.1")
        env["DMLC_PS_ROOT_PORT"] = str(listener.getsockname()[1])
        examined = examination.Examination(listener, SECRET.encode(), ["a", "b"])

        async def start(**settings):
            processes.append(Process([sys.executable, "-m", "p3.doctor.examiner"], {**env, **settings}, tmp_path))
            return processes[-1]

        try:
            await start()
            await asyncio.wait_for(examined.joined(0), DEADLINE_S)
            taken = await start(P3_RANK="0")
            await asyncio.get_running_loop().run_in_executor(None, taken.wait, DEADLINE_S)
            await start()  # its connection may get the number that the one before had
            await asyncio.wait_for(examined.joined(1), DEADLINE_S)
            return await examined.run(0.1)
        finally:
            await examined.close()
            listener.close()

    found = asyncio.run(examine())
    assert found["uninvited"] == ["127.0.0.1"] and [host["problem"] for host in found["hosts"]] == [None, None]
    (row,) = [row for row in judgement.judge(found) if row.state == "PROBLEM"]
    assert row.finding == "127.0.0.1 came as well, and knew the secret, but there are 2 places"


@pytest.mark.parametrize("paused_at", range(100))
def test_a_host_that_pauses_is_not_taken_for_a_slow_link(monkeypatch, paused_at):
    class Link:
        """1000 bytes come every 10 ms, but for a second of pause; behind it, those that were on their way."""

        now, read = 5.0, 0

        def monotonic(self):
            return self.now

        def recv_into(self, buffer):
            self.now += 1.0 if self.read == paused_at else 0.01
            self.read += 1
            return 40_000 if self.read == paused_at + 2 else 1000

    link = Link()
    monkeypatch.setattr(door, "time", link)
    count, spent_s = door._count(link, 1.0)
    assert count / spent_s == pytest.approx(100_000)


@needs_lab
def test_no_secret_is_on_a_command_line(doctor, tmp_path):
    ssh = tmp_path / "ssh.py"
    ssh.write_text(
        "import os, sys\n"
        "open(%r, 'w').write(repr(sys.argv))\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'p3.measure.lab.ssh', *sys.argv[1:]])\n"
        % str(tmp_path / "line")
    )
    with lab.lab(2, rate_mbit=50) as pair:
        secret = "swordfish-swordfish"
        assert doctor(pair, P3_SSH="%s %s" % (sys.executable, ssh), P3_SECRET=secret).code == 0
    line = (tmp_path / "line").read_text()
    assert "p3.doctor.examiner" in line and "P3_SECRET" not in line and secret not in line


def test_rates_are_measured_between_all_pairs_of_few_hosts_and_round_the_ring_of_many():
    assert sorted(examination.measured_pairs([0, 2, 5])) == [(0, 2), (0, 5), (2, 0), (2, 5), (5, 0), (5, 2)]
    many = list(range(8))
    ring = list(examination.measured_pairs(many))
    assert len(ring) == 16 and {here for here, _ in ring} == {there for _, there in ring} == set(many)


def of_host(name, **changes):
    return {
        "name": name, "problem": None, "machine": name, "p3": "1", "protocol": 6, "core": "loads", "python": "3.11.7",
        "command": "/venv", "installation": "/venv",
        "numpy": "2.0", "mxnet": None, "torch": None, "address": "10.0.0.1", "interface": "eth0", "mtu": 1500,
        "congestion": "cubic", "ports": ["32768", "60999"], "port": 1, "clock_s": 0.0, "clock_within_s": 0.001,
        **changes,
    }  # fmt: skip


def of_path(here, there, **changes):
    good = {"round_trip_s": 1e-4, "congestion": "cubic", "passes": 1500, "mbit": 900.0}
    return {"from": here, "to": there, **good, **changes}


@pytest.mark.parametrize("of_b, of_there, state, subject, text", [
    ({}, {}, None, None, None),
    ({"clock_s": -3.0}, {}, "note", "clocks", "a is 3.0 s ahead of b"),
    ({"numpy": "1.23"}, {}, "note", "NumPy", "2.0 on a; 1.23 on b"),
    ({"torch": "2.13.0"}, {}, "PROBLEM", "PyTorch", "none on a; 2.13.0 on b"),
    ({"protocol": 5}, {}, "PROBLEM", "P3's protocol", "6 on a and this host; 5 on b"),
    ({"core": "not built"}, {}, "PROBLEM", "C++ core", "b: not built"),
    ({"command": "/usr"}, {}, "PROBLEM", "python", "is that of /usr on b, not the one that has P3"),
    ({"command": None}, {}, "PROBLEM", "python", "is none on b, not the one that has P3"),
    ({"machine": "a"}, {}, "note", "one machine", "a and b are the same one"),
    ({}, {"congestion": "bbr"}, "note", "TCP", "bbr and cubic on different paths"),
    ({}, {"round_trip_s": 0.1}, "note", "TCP", "a: round trips are long, and P3 may not take bbr"),
    ({}, {"passes": None}, "note", "packets", "1 path not probed: UDP blocked, or IPv6"),
    ({}, {"mbit": 300.0}, "PROBLEM", "rate", "a sends at 300 Mbit/s"),
])  # fmt: skip
def test_what_differs_is_judged(of_b, of_there, state, subject, text):
    found = {
        "doctor": {"name": "this host", "p3": "1", "protocol": 6},
        "hosts": [of_host("a"), of_host("b", **of_b)],
        "uninvited": [],
        "paths": [of_path(0, 1, **of_there), of_path(1, 0)],
    }
    odd = [row for row in judgement.judge(found) if row.state != "ok"]
    if state is None:
        assert odd == []
    else:
        assert (odd[0].state, odd[0].subject) == (state, subject) and text in odd[0].finding


@pytest.mark.parametrize("arguments, words", [
    ("--model vgg19 --compute 1", "are for several hosts"),
    ("--hostfile /dev/null --model vgg19", "need --compute SECONDS"),
    ("--hostfile /dev/null --compute 1", "needs --model, --parameters or --trace"),
    ("--hostfile /dev/null", "names no host"),
    ("--hostfile /nowhere", "cannot be read"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(arguments, words, capsys):
    assert cli.main(["doctor", *arguments.split()]) == 1
    assert words in capsys.readouterr().err


def test_this_machine_is_told_to_programs(tmp_path):
    command = [sys.executable, "-m", "p3", "doctor", "--json"]
    finished = subprocess.run(command, env=clean_environment(), cwd=tmp_path, capture_output=True, timeout=DEADLINE_S)
    subjects = [row["subject"] for row in json.loads(finished.stdout)["rows"]]
    assert "C++ core" in subjects and os.sep not in "".join(subjects)
