"""Runs a script of tests/jobs with P3, under `p3 run` and under torchrun, or with DDP, and reads what workers tell."""

import json
import os
import socket
import sys
import uuid
from pathlib import Path

from processes import HELPERS, PYTHONPATH, ROOT, Process, clean_environment

from p3.measure.chaos import strike

WORKERS = 2
P3, ALONE = (["-m", "p3", "run", "-n", str(workers), "-s", "1", sys.executable] for workers in (WORKERS, 1))


def torchrun():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", str(WORKERS)]


def run(launcher, script, how, folder, names, workers=WORKERS, timeout_s=250, **variables):
    """{name: what each worker tells, by rank} of the trainings of those names. The test fails, with the output, if the
    job does. `variables`: of its environment."""
    folder.mkdir()
    command = [sys.executable, *launcher, str(ROOT / "tests" / "jobs" / script), how, str(folder), *names]
    # Nothing is fetched, and no variable of another launcher is there.
    paths = os.pathsep.join([PYTHONPATH, str(HELPERS)])
    env = clean_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HOME=str(folder), PYTHONPATH=paths,
                            **variables)  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    process = Process(command, env, folder)
    try:
        finished = process.wait(timeout_s)
    finally:
        process.end()
    assert finished.code == 0, finished.out + finished.err
    paths = {name: [folder / ("%s.%d.json" % (name, rank)) for rank in range(workers)] for name in names}
    return {name: [json.loads(path.read_text()) for path in of_name] for name, of_name in paths.items()}


def main(trainings, ahead=lambda: None):
    """What the scripts do: `trainings` is {name: function of a folder}, and `ahead` is called before each of them."""
    import torch

    how, folder, *names = sys.argv[1:]
    for name in names:
        own = Path(folder) / name
        own.mkdir(exist_ok=True)
        ahead()
        told = json.dumps(trainings[name](own))
        own.with_name("%s.%s.json" % (name, os.environ.get("RANK", "0"))).write_text(told)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if how == "ddp":
        # Not by way of the interpreter's end: behind compiled models, torch 2.13 aborts there at times when the
        # machine is busy ("terminate called without an active exception"), which is not what these tests compare.
        sys.stdout.flush()
        os._exit(0)


def require_no_wait(script, folder):
    """The script's never_waits() ends its steps while the only server stands still, so that nothing has come of them;
    the test fails if one waits."""
    told = run(ALONE, script, "p3", folder / "alone", ["never_waits"], 1, 100, P3_WAIT_TIMEOUT_S="20")
    assert told["never_waits"] == [{"ended": 3}]


def require_servers_back(script, folder, name):
    """Two servers are killed, one after the other, and come back, during the training of that name, which tells of that
    as `changes`. The test fails if it tells anything else than undisturbed."""
    launcher = ["-m", "p3", "run", "-n", str(WORKERS), "-s", "2", "--on-server-loss", "continue", "--rejoin",
                sys.executable]  # fmt: skip

    def told(deaths):
        env = {strike.MARK: uuid.uuid4().hex, "P3S_DEATHS": deaths, "P3S_MARKS": "1"}
        own = folder / ("%s%d" % (name, len(deaths)))
        return run(launcher, script, "p3", own, [name], P3_LOCAL_AGGREGATION="0", **env)[name]

    undisturbed, struck = told(""), told("1:60,0:60")
    assert [one.pop("changes") for one in undisturbed + struck] == [0] * WORKERS + [4] * WORKERS
    assert struck == undisturbed


def require_same_as_in_a_loop(told):
    """What each worker tells of local steps that a trainer took, and of the same in a plain loop."""
    assert [differences(one["trained"], one["plain"], 1e-6) for one in told] == [[], []]
    first, second = (one["trained"] for one in told)
    assert first["losses"] != second["losses"]
    assert first["weights"] == second["weights"] and first["evaluated"] == second["evaluated"]


def require_weighed(told):
    """What each worker tells of trainings in which batches weigh, and what one process makes of them; without weights
    it would be something else."""
    for one in told:
        for name, (trained, weighed, alike) in one.items():
            assert differences(trained, weighed, 1e-6) == [], name
            assert differences(trained, alike, 1e-4) != [], name


def require_resumed(begun, resumed):
    """What each worker tells of a training, and of one that goes on from its checkpoint."""
    for one, other in zip(begun, resumed):
        count = len(other["losses"])
        assert 0 < count < len(one["losses"])
        assert (other["losses"], other["weights"]) == (one["losses"][-count:], one["weights"])


def error(function):
    """What the ValueError says that the function raises; for the scripts."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def differences(one, other, tolerance=1e-5):
    """Where two values differ: numbers by more than that, relative to the larger of 1 and the second."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [(key, *found) for key in one for found in differences(one[key], other[key], tolerance)]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [(at, *found) for at, pair in enumerate(zip(one, other)) for found in differences(*pair, tolerance)]
    if type(one) is float and type(other) is float:
        return [] if abs(one - other) <= tolerance * max(1, abs(other)) else [(one, other)]
    return [] if one == other else [(one, other)]
