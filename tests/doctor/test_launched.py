"""`p3 doctor` that another launcher has started on every host: an indexed Job's variables, on the hosts of a lab."""

import json
import signal
import sys

import pytest
from lab_traces import DEADLINE_S, needs_lab, output
from processes import SECRET, Process, clean_environment

from p3 import cli
from p3.measure.lab import hosts as lab

DOCTOR = [sys.executable, "-m", "p3", "doctor", "--seconds", "0.3"]
PORT = "9091"  # a lab's hosts have all ports to themselves


def start(processes, folder, of_lab, *options, size=None, **settings):
    """The process on each host, as a Job's manifest has it."""
    for index, host in enumerate(of_lab):
        env = clean_environment(
            JOB_COMPLETION_INDEX=str(index), DMLC_NUM_WORKER=str(size or len(of_lab)), P3_SECRET=SECRET,
            DMLC_PS_ROOT_URI=of_lab[0].address, DMLC_PS_ROOT_PORT=PORT, **settings,
        )  # fmt: skip
        processes.append(Process(host.command(*DOCTOR, *options), env, folder))
    return processes[-len(of_lab):]


@needs_lab
def test_each_machine_is_asked_and_rank_0_tells(processes, tmp_path):
    with lab.lab(3, rate_mbit=[100, 100, 20]) as three:
        first, *others = [one.wait(2 * DEADLINE_S) for one in start(processes, tmp_path, three, "--json")]
        (status,) = [one for one in lab.status() if one.name == three[0].lab]
        assert not any(status.processes)
    assert (first.code, first.err) == (1, "")
    assert [(one.code, one.out, one.err) for one in others] == [(0, "", "")] * 2
    found = json.loads(first.out)
    names = [host["name"].split(" (")[0] for host in found["hosts"]]
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert [host["address"] for host in found["hosts"]] == [host.address for host in three]
    assert len([path for path in found["paths"] if "mbit" in path]) == 6
    slow = [row["finding"].split(" at ")[0] for row in found["rows"] if row["state"] == "PROBLEM"]
    assert slow == ["%s %s" % (found["hosts"][2]["name"], verb) for verb in ("sends", "receives")]


@needs_lab
def test_a_machine_that_does_not_come_is_told_and_the_others_are_examined(processes, tmp_path):
    with lab.lab(2, rate_mbit=100) as pair:
        first, other = start(processes, tmp_path, pair, "--timeout", "15", "--json", size=3)
        first, other = first.wait(2 * DEADLINE_S), other.wait(2 * DEADLINE_S)
    assert (first.code, first.err, other.code, other.err) == (1, "", 0, "")
    found = json.loads(first.out)
    (silent,) = [row for row in found["rows"] if row["state"] == "PROBLEM"]
    assert (silent["subject"], silent["finding"]) == ("machine 3 of 3", "did not come within 15 s")
    assert silent["remedy"] == (
        "an indexed Kubernetes Job must have started it, and it must reach %s, port %s" % (pair[0].address, PORT)
    )
    assert len([path for path in found["paths"] if "mbit" in path]) == 2


@needs_lab
def test_a_doctor_that_is_killed_takes_the_examiners_along(processes, tmp_path):
    with lab.lab(2, rate_mbit=100) as pair:
        first, other = start(processes, tmp_path, pair, "--seconds", "30")
        while int(output(pair[1], "cat", "/sys/class/net/eth0/statistics/rx_bytes")) < 200_000:  # a rate is measured
            assert first.popen.poll() is None, first.wait()
        first.signal(signal.SIGKILL)
        ended = other.wait(DEADLINE_S)
    assert (ended.code, ended.err) == (0, "")


def test_what_is_started_on_one_machine_looks_at_that_alone(monkeypatch, capsys):
    for name, value in dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
                            GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 0 and capsys.readouterr().out == ""  # rank 0 tells
    cli.main(["doctor", "--here"])
    assert "C++ core" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--on", "ray"], "belong together"),
        (["-n", "3"], "belong together"),
        (["--here", "--model", "vgg19"], "are for several hosts"),
        (["--launcher", "slurm"], "--launcher slurm: SLURM_STEP_ID, SLURM_PROCID is not set"),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, capsys, arguments, words):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert cli.main(["doctor", *arguments]) == 1
    assert words in capsys.readouterr().err
