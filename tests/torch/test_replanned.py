"""strategy="auto": weights have the same bits whatever strategies a training goes through, whoever leaves or comes."""

import json
import sys

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
import p3.torch  # noqa: E402
from p3.errors import ConfigError  # noqa: E402
from plugin_jobs import SCRIPTS  # noqa: E402
from processes import Process  # noqa: E402
from torch_steps import sgd, step  # noqa: E402

sys.path.insert(0, str(SCRIPTS))
import torch_replanned as job  # noqa: E402

SERVERS = 3
TO_ONE, TO_TWO = ({"version": 1, "default": {"servers": servers}} for servers in ([1], [0, 2, 0]))
CHANGES = [[1, "change", TO_ONE], [3, "propose", TO_TWO], [7, "change", None], [8, "propose", TO_ONE]]
PROPOSED_AT, GOES_OVER_BEHIND = 3, 5


def start(folder, processes, mode, events, workers, *options, **env):
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(SERVERS), *options]
    command = forked.command(str(SCRIPTS / "torch_replanned.py"), mode, str(folder), json.dumps(events))
    processes.append(Process([*argv, *command], {**forked.environment(), **env}, folder))
    return processes[-1], command


def trained(ended, folder, workers):
    """The weights, the same bits on all of these, and on which servers each key was at last."""
    assert ended.code == 0, ended
    states = [torch.load(folder / ("%d.pt" % rank)) for rank in workers]
    for name, value in states[0].items():
        if "running" not in name and "tracked" not in name:  # statistics are each worker's own
            assert all(torch.equal(value, other[name]) for other in states[1:]), name
    text = next(line for line in ended.out.splitlines() if '"servers"' in line)
    return states[0], json.loads(text[text.index("{"):])["servers"]


def run(folder, processes, mode, events, workers=2, survivors=None, *options, **env):
    process, _ = start(folder, processes, mode, events, workers, *options, **env)
    return trained(process.wait(100), folder, survivors or range(workers))


def require_same(weights, others):
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("mode", job.MODES)
def test_weights_have_the_same_bits_through_changes(tmp_path, processes, mode):
    usual, servers = run(tmp_path / "usual", processes, mode, [])
    assert servers["0.weight"] == []
    changed, servers = run(tmp_path / "changed", processes, mode, CHANGES)
    assert servers["0.weight"] == TO_ONE["default"]["servers"] == servers["3.bias"]
    require_same(usual, changed)


@pytest.mark.parametrize("env", [{"P3_TLS": "1"}, {"P3_LOCAL_AGGREGATION": "0", "P3_CHECK": "1"}], ids=str)
def test_so_they_have_where_connections_are_others(tmp_path, processes, env):
    usual, _ = run(tmp_path / "usual", processes, "clipping", [], 3, **env)
    changed, _ = run(tmp_path / "changed", processes, "clipping", CHANGES, 3, **env)
    require_same(usual, changed)


@pytest.mark.parametrize("rank, at", [(0, PROPOSED_AT + 1), (0, GOES_OVER_BEHIND), (0, GOES_OVER_BEHIND + 1),
                                      (1, GOES_OVER_BEHIND)])  # fmt: skip
def test_a_worker_that_dies_meanwhile_leaves_the_others_alike(tmp_path, processes, rank, at):
    """Behind any step from the one with which a plan is proposed to the one behind which all go over."""
    death, env = [at, "die", rank], {"P3_ON_WORKER_LOSS": "continue"}
    survivors = [other for other in range(3) if other != rank]
    usual, _ = run(tmp_path / "usual", processes, "clipping", [death], 3, survivors, **env)
    changed, servers = run(tmp_path / "changed", processes, "clipping", [*CHANGES[:2], death], 3, survivors, **env)
    require_same(usual, changed)
    told_all = rank != 0 or not PROPOSED_AT <= at <= GOES_OVER_BEHIND
    assert servers["0.weight"] == (TO_TWO if told_all else TO_ONE)["default"]["servers"]


@pytest.mark.parametrize("rank, at", [(0, PROPOSED_AT + 1), (0, GOES_OVER_BEHIND), (2, GOES_OVER_BEHIND)])
def test_one_that_dies_within_a_step_does_so_too(tmp_path, processes, rank, at):
    events = [*CHANGES, [at, "die before", rank]]
    survivors = [other for other in range(3) if other != rank]
    run(tmp_path, processes, "synchronous", events, 3, survivors, P3_ON_WORKER_LOSS="continue", P3_CHECK="1")


@pytest.mark.parametrize("enters_at", [PROPOSED_AT + 1, GOES_OVER_BEHIND, GOES_OVER_BEHIND + 1])
def test_another_worker_may_come_while_a_plan_is_on_its_way_and_behind_that(tmp_path, processes, enters_at):
    def grown(folder, changes):
        events = [*changes, [enters_at, "enter"]]
        env, options = {"P3_CHECK": "1"}, ["--on-worker-loss", "continue", "--max-workers", "3"]
        process, command = start(folder, processes, "clipping", events, 2, *options, **env)
        process.read_until("waits for go", times=2)
        argv = [sys.executable, "-m", "p3", "join", "--pid", str(process.popen.pid)]
        processes.append(Process([*argv, *command], {**forked.environment(), **env}, folder))
        process.read_until("waits to join the job")
        (folder / "go").touch()
        return trained(process.wait(100), folder, range(3))

    usual, _ = grown(tmp_path / "usual", [])
    changed, servers = grown(tmp_path / "changed", CHANGES[:2])
    require_same(usual, changed)
    assert servers["0.weight"] == TO_TWO["default"]["servers"]


def test_workers_in_join_go_over_with_the_others(tmp_path, processes):
    ends = [job.STEPS, 2, 5]
    usual, _ = run(tmp_path / "usual", processes, "clipping", [[0, "join", ends]], 3)
    changed, servers = run(tmp_path / "changed", processes, "clipping", [*CHANGES[1:2], [0, "join", ends]], 3)
    require_same(usual, changed)
    assert servers["0.weight"] == TO_TWO["default"]["servers"]


def test_a_job_goes_on_from_a_snapshot_taken_right_behind_a_change(tmp_path, processes):
    env = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": str(GOES_OVER_BEHIND + 1)}
    whole, _ = run(tmp_path / "whole", processes, "clipping", CHANGES[:2], **env)
    taken = sorted((tmp_path / "snapshots").glob("round-*[0-9]"))
    assert [path.name for path in taken] == ["round-%012d" % round for round in (GOES_OVER_BEHIND + 1, job.STEPS)]
    for path in sorted(taken[-1].glob("*")):
        path.unlink()
    taken[-1].rmdir()
    resumed, servers = run(tmp_path / "resumed", processes, "clipping", CHANGES[2:], **env)
    assert servers["0.weight"] == TO_ONE["default"]["servers"]
    require_same(whole, resumed)


# What it does not go with


@pytest.mark.parametrize("options, env, problem", [
    ({"staleness": 2}, {}, "another strategy while a job trains .* and staleness exclude"),
    ({"compression": {"type": "dgc"}}, {}, "dgc and sums handed to the workers .another strategy while a job trains"),
    ({"compression": "int4"}, {}, "another strategy while a job trains .* and compression of what comes back"),
    ({"compression": {"type": "lowrank"}}, {}, "another strategy while a job trains .* and lowrank"),
    ({}, {"P3_ON_SERVER_LOSS": "continue"}, "another strategy while a job trains .* and going on without lost servers"),
])  # fmt: skip
def test_what_excludes_it_is_refused_by_name(model, monkeypatch, options, env, problem):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, ConfigError), match=problem):
        p3.torch.DistributedOptimizer(sgd(model), model, strategy="auto", **options)


def test_a_strategy_cannot_change_where_servers_update(model):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    with pytest.raises(ValueError, match="another strategy while a job trains .* the servers keep values and states"):
        optimizer.change_strategy(None)


def test_alone_there_is_nothing_to_plan(model, monkeypatch):
    monkeypatch.setenv("P3_STRATEGY", "auto")
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    step(model, optimizer)
    optimizer.change_strategy({"version": 1, "default": {"slice": 3}})
    step(model, optimizer)
    with pytest.raises(ConfigError, match="an entry for key 'absent'"):
        optimizer.change_strategy({"version": 1, "keys": {"absent": {"slice": 7}}})
    with pytest.raises(ConfigError, match='"auto" is of p3.torch.DistributedOptimizer alone'):
        optimizer.change_strategy("auto")


ROWS = """
import torch, p3.torch
from torch import nn
rows, dense = nn.ModuleList(nn.Embedding(50, 4, sparse=True) for _ in range(2)), nn.Linear(4, 1)
first = p3.torch.DistributedOptimizer(torch.optim.SparseAdam(list(rows.parameters())), rows)
second = p3.torch.DistributedOptimizer(torch.optim.SGD(dense.parameters(), lr=0.1), dense)
assert first._p3._plans is None and second._p3._plans is not None
for _ in range(4):
    dense(sum(one(torch.arange(3)) for one in rows)).sum().backward()
    for one in (first, second):
        one.step()
        one.zero_grad()
p3.torch.barrier()
"""


def test_nothing_is_planned_for_an_optimizer_of_rows_alone(start_job):
    ended = start_job(ROWS, 2, 2, {"P3_STRATEGY": "auto"}).wait(60)
    assert ended.code == 0, ended


QUESTIONS = """
import torch, p3.torch
from torch import nn
from p3.measure.planning.answer import answer
for options, behind in (({}, "none"), ({"max_grad_norm": 1.0}, "norm"), ({"synchronous": True}, "wait")):
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    for _ in range(6):
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    plans = optimizer._p3._plans
    if p3.torch.rank() == 0:
        hosts = p3.torch.start.job.current().placement.workers
        question = {**plans._question(dict.fromkeys(hosts, 5e6)), "budget_s": 0.1}
        assert question["clip"] == behind, question
        assert answer(question)["seconds"] > 0
p3.torch.barrier()
"""


def test_the_planner_is_told_what_updates_wait_for(start_job):
    ended = start_job(QUESTIONS, 2, 2, {"P3_STRATEGY": "auto"}).wait(60)
    assert ended.code == 0, ended
