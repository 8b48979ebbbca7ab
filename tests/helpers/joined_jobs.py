"""Jobs that go on without lost workers and are joined by others: of any script; and of tests/jobs/joining.py, with what
must come of their training."""

import re
import sys

import forked
import numpy as np
from launched_jobs import children_with
from plugin_jobs import SCRIPTS
from processes import Process, clean_environment

sys.path.insert(0, str(SCRIPTS))
import joining as job

P3 = [sys.executable, "-m", "p3"]
MANY = 1_000_000


def p3(folder, processes, *arguments, **env):
    processes.append(Process([*P3, *arguments], clean_environment(**env), folder))
    return processes[-1]


def p3_run(folder, processes, workers, command, *options, **env):
    """`command`: a script, which is forked, and its arguments; here and in p3_join()."""
    arguments = ["run", "-n", workers, "-s", 2, "--on-worker-loss", "continue", *options]
    return _p3_forked(folder, processes, arguments, command, env)


def p3_join(folder, processes, run, command, *options, **env):
    return _p3_forked(folder, processes, ["join", "--pid", run.popen.pid, *options], command, env)


def _p3_forked(folder, processes, arguments, command, env):
    argv = [*P3, *map(str, arguments), *forked.command(*command)]
    processes.append(Process(argv, {**forked.environment(), **env}, folder))
    return processes[-1]


def start(folder, processes, workers, deaths, gates, *options, steps=20, **env):
    told = ",".join("%d:%d.0" % death for death in deaths)
    options = ["-n", str(workers), "-s", "2", "--on-worker-loss", "continue", *options]
    env = {"P3S_DEATHS": told, "P3S_GATES": ",".join(map(str, gates)), **env}
    return p3(folder, processes, "run", *options, *command(folder, steps), **env)


def command(folder, steps=20):
    return [sys.executable, str(SCRIPTS / "joining.py"), str(steps), str(folder)]


def join(folder, processes, run, *options, steps=20, **env):
    options = ["--pid", str(run.popen.pid), *options]
    return p3(folder, processes, "join", *options, *command(folder, steps), **env)


def require_right(folder, said, members_at, workers, steps=20):
    """`members_at(step)`: who must be there."""
    for step in range(steps):
        lines = set(re.findall(r"worker \d step %d: (.*)" % step, said))
        assert lines == {str(sum(1 << rank for rank in members_at(step)))}, (step, lines)
    for step in range(0, steps, 5):
        told = re.findall(r"worker (\d) at %d knows (\[.*?\]), has (\[.*?\])" % step, said)
        members = sorted(members_at(step))
        assert sorted(int(rank) for rank, *_ in told) == members, (step, told)
        assert {known for _, known, _ in told} == {str(members)}, (step, told)
        samples = [int(sample) for *_, own in told for sample in own[1:-1].split(", ")]
        assert set(samples) == set(range(job.SAMPLES)) and len(samples) <= job.SAMPLES + len(members), (step, told)
    weight, rows = np.zeros(job.ELEMENTS, np.float32), np.zeros((job.ROWS, 3), np.float32)
    momenta = np.zeros_like(weight), np.zeros_like(rows)
    for step in range(steps):
        here = sorted(members_at(step))
        gradients = [job.gradient_of(rank, step) for rank in here]
        share = np.float32(1 / len(here))
        mean = share * sum(one[0] for one in gradients)
        momenta[0][:] = np.float32(0.9) * momenta[0] - np.float32(0.125) * mean
        weight += momenta[0]
        of_rows = np.zeros_like(rows)
        for _, ids, values in gradients:
            of_rows[ids] += values
        touched = sorted({row for _, ids, _ in gradients for row in ids})
        momenta[1][touched] = np.float32(0.9) * momenta[1][touched] - np.float32(0.125) * (
            share * of_rows[touched]
        )
        rows[touched] += momenta[1][touched]
    for rank in members_at(steps - 1):
        with np.load(folder / ("%d.npz" % rank)) as found:
            np.testing.assert_array_equal(found["weight"], weight)
            np.testing.assert_array_equal(found["rows"], rows)


def worker(run, rank):
    """Its process."""
    (process,) = children_with(run.popen.pid, DMLC_ROLE="worker", P3_RANK=rank)
    return process
