"""Processes that join a running job: from then on all train as on the joined batch of everybody who is there."""

import os
import signal
import sys
import textwrap
import uuid

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
import torchruns  # noqa: E402
from joined_jobs import P3, p3_join, p3_run  # noqa: E402
from launched_jobs import ALL_IN_ONE  # noqa: E402
from plugin_jobs import SCRIPTS  # noqa: E402
from processes import SECRET, Process, wait_until  # noqa: E402

from p3.measure.chaos import strike  # noqa: E402

sys.path.insert(0, str(SCRIPTS))
import torch_joining as job  # noqa: E402


@pytest.mark.parametrize("mode", job.MODES)
def test_the_weights_are_those_of_training_on_the_joined_batch_of_who_is_there(tmp_path, processes, mode):
    command = [str(SCRIPTS / "torch_joining.py"), mode, str(tmp_path)]
    options = ["--rejoin"] if mode == "servers" else []
    run = p3_run(tmp_path, processes, job.WORKERS, command, *options, P3_CHECK="1")
    said = run.read_until("The others go on without it", "waits for go", times=2)
    joining = [] if options else [p3_join(tmp_path, processes, run, command, P3_CHECK="1") for _ in job.GONE]
    said += run.read_until("waits to join the job", times=2)
    (tmp_path / "go").touch()
    ended = run.wait(100)
    assert ended.code == 0, ended
    for one in joining:
        assert one.wait(20).code == 0
    assert (said + ended.out).count("has joined the job\n") >= 2, ended
    require_weights(tmp_path, mode, job.losing)


def require_weights(folder, mode, there, loads_at=None):
    states = [torch.load(folder / ("%d.pt" % rank)) for rank in there(job.STEPS)]
    tolerance = {"sgd int8": 3e-2, "both ways": 5e-2}.get(mode, 2e-5)
    for name, expected in job.alone(mode, there, loads_at).items():
        assert all(torch.equal(states[0][name], other[name]) for other in states[1:]), name
        difference = (states[0][name] - expected).abs().max().item()
        assert difference <= tolerance, (name, difference)


@pytest.mark.parametrize(
    "first, last, mode",
    [(1, 3, "servers"), (1, 3, "here"), (1, 3, "weighed"), (2, 4, "adam clipping"), (2, 4, "both ways")],
)
def test_a_job_that_grows_trains_as_on_the_joined_batch_of_who_is_there(tmp_path, processes, first, last, mode):
    command = [str(SCRIPTS / "torch_joining.py"), mode, str(tmp_path), str(first), str(last)]
    run = p3_run(tmp_path, processes, first, command, "--max-workers", str(last), P3_CHECK="1")
    said = run.read_until("waits for go", times=first)
    joining = []
    for _ in range(first, last):
        joining.append(p3_join(tmp_path, processes, run, command, P3_CHECK="1"))
        said += run.read_until("waits to join the job")
    (tmp_path / "go").touch()
    ended = run.wait(100)
    assert ended.code == 0 and all(one.wait(20).code == 0 for one in joining), ended
    require_weights(tmp_path, mode, job.growing(first, last))


def test_a_job_of_torchrun_loses_a_server_and_others_join(tmp_path, processes):
    """Its workers bring the servers along."""
    command = [str(SCRIPTS / "torch_joining.py"), "here", str(tmp_path), "2", "3"]
    goes_on = {"P3_ON_WORKER_LOSS": "continue", "P3_ON_SERVER_LOSS": "continue", "P3_MAX_WORKERS": "3"}
    mark = uuid.uuid4().hex
    env = {**forked.environment(), **goes_on, "P3_SECRET": SECRET, strike.MARK: mark}

    def start(*command):
        processes.append(Process([*ALL_IN_ONE, *command], env, tmp_path))
        return processes[-1]

    run = start(*torchruns.agents(2), *command)
    run.read_until("waits for go", times=2)
    servers = strike.alive("server", mark)
    os.kill(servers[1], signal.SIGKILL)
    run.read_until("server 1 is lost; server 0 takes over", times=2)
    joins = [*P3, "join", "--pid", str(servers[0])]
    came = [start(*joins, *forked.command(*command)), start(*joins, "--server")]
    run.read_until("waits to join the job", "waits to come back")
    (tmp_path / "go").touch()
    run.read_until("server 1 (127.0.0.1) is back")
    ended = [one.wait(100) for one in (run, *came)]
    assert [one.code for one in ended] == [0, 0, 0], ended
    require_weights(tmp_path, "here", job.growing(2, 3))
    wait_until(lambda: not strike.marked(mark), "processes are left")


@pytest.mark.parametrize("mode, step", [*((mode, 0) for mode in job.MODES), ("here", 4)])
def test_who_joins_behind_a_load_and_before_any_further_step_trains_as_all(tmp_path, processes, mode, step):
    command = [str(SCRIPTS / "torch_joining.py"), mode, str(tmp_path), "2", "3", str(step)]
    run = p3_run(tmp_path, processes, 2, command, "--max-workers", "3", P3_CHECK="1")
    run.read_until("waits for go", times=2)
    joining = p3_join(tmp_path, processes, run, command, P3_CHECK="1")
    run.read_until("waits to join the job")
    (tmp_path / "go").touch()
    ended, came = run.wait(100), joining.wait(20)
    assert ended.code == 0 and came.code == 0, (ended, came)
    require_weights(tmp_path, mode, job.growing(2, 3, step), loads_at=step)


SCRIPT = """
    import os, signal, sys, time
    import torch, p3.torch
    first, state = p3.torch.resume()
    joins = "P3_JOIN" in os.environ
    torch.manual_seed(1 + joins)
    model = torch.nn.Linear({shape})
    if "early" in sys.argv:
        p3.torch.rank()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.{optimizer}, model)
    {before}
    if not joins and p3.torch.rank() == 1:
        p3.torch.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if not joins:
        p3.torch.barrier()
    for step in range(first, 40):
        if step == 4 and not joins:
            print("waits for go")
            while not os.path.exists("go"):
                time.sleep(0.01)
        if step % 4 == 0:
            members = p3.torch.members({round}, {{"step": step}})
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("worker %d ends with %s" % (p3.torch.rank(), list(members)))
"""
SAME = {"shape": "4, 2", "optimizer": "SGD(model.parameters(), lr=0.5)", "before": "", "round": "step"}


def script_of(folder, name, **other):
    text = SCRIPT
    for field, value in {**SAME, **other}.items():
        text = text.replace("{%s}" % field, value)
    path = folder / name
    path.write_text(textwrap.dedent(text.replace("{{", "{").replace("}}", "}")))
    return str(path)


@pytest.mark.parametrize(
    "other, why",
    [
        ({"shape": "4, 3"}, "disagree about key 'weight': shape"),
        ({"optimizer": "Adam(model.parameters())"}, "training differs, in class"),
        ({"optimizer": "SGD(model.parameters(), lr=0.5, momentum=0.5, nesterov=True)"}, ""),  # the job's are taken
        ({"before": "p3.torch.all_reduce(torch.ones(1))"}, "have no other store of collectives"),
        ({"before": "model.load_state_dict(model.state_dict())"}, "a new value of key 'weight'"),
        ({"before": "optimizer.release()"}, "the release of store"),
        ({"before": "raise ValueError('no such file')"}, "no such file"),
        ({"before": "optimizer.step(); optimizer.join()"}, "comes before its first members(4)"),
        ({"before": "other = torch.nn.Linear(1, 1); "
                    "p3.torch.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=1), other)"},
         "have no other store of parameters"),
        ({"round": "step + 1"}, "comes to members(5)"),
        ({"check": "0"}, "training differs, in P3_CHECK"),
    ],
)  # fmt: skip
def test_one_with_another_script_is_refused_by_name_and_the_job_goes_on(tmp_path, processes, other, why):
    other = dict(other)
    run = p3_run(tmp_path, processes, 3, [script_of(tmp_path, "job.py")], P3_CHECK="1")
    said = run.read_until("The others go on without it", "waits for go")
    check = other.pop("check", "1")
    joining = p3_join(tmp_path, processes, run, [script_of(tmp_path, "other.py", **other)], P3_CHECK=check)
    said += run.read_until("waits to join the job")
    (tmp_path / "go").touch()
    came = joining.wait(60)
    ended = run.wait(60)
    assert ended.code == 0, ended
    members = "[0, 2]" if why else "[0, 1, 2]"
    assert ended.out.count("ends with " + members) == 2, ended
    assert (came.code == 0) == (not why) and why in came.err, came


def test_nobody_joins_where_workers_have_weights_of_their_own(tmp_path, processes):
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        import torch, p3.torch
        model = torch.nn.Linear(2, 1)
        optimizer = p3.torch.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), model, every=4)
        p3.torch.barrier()
        if p3.torch.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists("go"):
            time.sleep(0.01)
        print(p3.torch.members(0))
    """)
    )
    run = p3_run(tmp_path, processes, 3, [str(path)], "--max-workers", "4")
    said = run.read_until("The others go on without it")
    joining = p3_join(tmp_path, processes, run, [str(path)])
    said += run.read_until("waits to join the job")
    (tmp_path / "go").touch()
    ended, came = run.wait(60), joining.wait(60)
    assert ended.code == 0 and ended.out.count("(0, 2)") == 2, ended
    assert (said + ended.err).count("processes that join and local steps exclude each other") == 1, ended
    assert came.code == 1 and "nobody can join this job: its workers have LocalSteps" in came.err, came
