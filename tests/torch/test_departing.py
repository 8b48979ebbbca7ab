"""P3_ON_WORKER_LOSS=continue: who is left trains on as on the joined batch of those who are there."""

import sys

import pytest

torch = pytest.importorskip("torch")

import joined_jobs  # noqa: E402
from plugin_jobs import SCRIPTS  # noqa: E402
from processes import write_script  # noqa: E402

sys.path.insert(0, str(SCRIPTS))
import torch_departing as job  # noqa: E402


def run_to_end(folder, processes, workers, command, **env):
    return joined_jobs.p3_run(folder, processes, workers, command, **env).wait(100)


@pytest.mark.parametrize("mode", job.MODES)
def test_the_weights_are_those_of_training_on_the_joined_batch_of_who_is_there(tmp_path, processes, mode):
    command = [str(SCRIPTS / "torch_departing.py"), mode, str(tmp_path)]
    ended = run_to_end(tmp_path, processes, job.WORKERS, command, P3_CHECK="3")
    assert ended.code == 0 and "(1, 2, 3)" in ended.out, ended
    first, other = (torch.load(tmp_path / ("%d.pt" % rank)) for rank in (1, 3))
    tolerance = {"sgd int8": 2e-2}.get(mode, 1e-5)
    for name, expected in job.alone(mode).items():
        assert torch.equal(first[name], other[name]), name
        difference = (first[name] - expected).abs().max().item()
        assert difference <= tolerance, (name, difference)


def test_what_does_not_go_with_it_is_refused_by_name(tmp_path, processes):
    script = """
        import torch, p3.torch
        model = torch.nn.Linear(2, 1)
        optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        optimizer.weigh(1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for refused in (lambda: optimizer.join(), optimizer._p3.act_as_ddp):
            try:
                refused()
            except ValueError as error:
                print(str(error).partition(": ")[2])
    """
    ended = run_to_end(tmp_path, processes, 1, [write_script(tmp_path, script)])
    assert ended.code == 0, ended
    assert "going on without lost workers (P3_ON_WORKER_LOSS=continue is set) and weights where" in ended.out
    assert "going on without lost workers (P3_ON_WORKER_LOSS=continue is set) and a trainer's loop" in ended.out


def test_a_mean_is_one_although_a_worker_dies_in_the_middle_of_its_push(tmp_path, processes):
    script = """
        import os, signal, threading
        import torch, p3.torch
        ones = torch.ones(500_000, dtype=torch.float64)
        p3.torch.all_reduce(ones, op="mean")
        for number in range(24):
            p3.torch.barrier()
            if number == 4 * p3.torch.rank() - 2:
                threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
            assert torch.equal(p3.torch.all_reduce(ones, op="mean"), ones), number
            said = p3.torch.all_gather_object("x" * 200_000)
            assert all(text in (None, "x" * 200_000) for text in said), number
    """
    ended = run_to_end(tmp_path, processes, 5, [write_script(tmp_path, script)])
    assert ended.code == 0 and ended.err.count("the job goes on without it") == 4, ended


@pytest.mark.parametrize("loads", ["a state", "none"])
def test_who_dies_while_it_gives_what_was_loaded_leaves_the_others_with_all_of_it(tmp_path, processes, loads):
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import copy
        import torch, p3.torch
        import this_job
        from p3.torch.start import job
        model = torch.nn.Linear(10, 3)
        optimizer = p3.torch.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        saved = [copy.deepcopy(optimizer.state_dict())]
        for step in range(6):
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved.append(copy.deepcopy(optimizer.state_dict()))
        this_job.die_giving(job.current(), ".")
        saved = saved[0 if sys.argv[2] == "none" else 3]
        optimizer.load_state_dict(saved)
        found = optimizer.state_dict()["state"]
        assert found.keys() == saved["state"].keys(), found
        for number, state in saved["state"].items():
            assert all(torch.equal(found[number][name], array) for name, array in state.items()), found
        model(torch.ones(1, 10)).sum().backward()
        optimizer.step()
        found = optimizer.state_dict()["state"][0]
        if not saved["state"]:  # of gradients of 1
            assert found["step"] == 1 and torch.allclose(found["exp_avg"], torch.full((3, 10), 0.1)), found
        print("has %d updates" % found["step"])
    """
    ended = run_to_end(tmp_path, processes, 3, [write_script(tmp_path, script), str(SCRIPTS), loads])
    assert ended.code == 0 and ended.out.count("has %d updates" % (1 if loads == "none" else 4)) == 2, ended


def test_who_dies_while_it_gives_what_was_loaded_in_a_resumed_job_leaves_the_others_with_it(tmp_path, processes):
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import torch, p3.torch
        import this_job
        from p3.torch.start import job
        begun, _ = p3.torch.resume()
        model = torch.nn.Linear(10, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        none = optimizer.state_dict()
        optimizer = p3.torch.DistributedOptimizer(optimizer, model)
        if begun:
            this_job.die_giving(job.current(), ".")
            optimizer.load_state_dict(none)
        for step in range(begun + 1, begun + 4):
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            p3.torch.snapshot(step)
        found = optimizer.state_dict()["state"][0]  # of gradients of 1
        assert found["step"] == 3 and torch.allclose(found["exp_avg"], torch.full((3, 10), 1 - 0.9**3)), found
        print("has 3 updates")
    """
    command = [write_script(tmp_path, script), str(SCRIPTS)]
    env = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "3"}
    for left in (3, 2):
        ended = run_to_end(tmp_path, processes, 3, command, **env)
        assert ended.code == 0 and ended.out.count("has 3 updates") == left, ended


@pytest.mark.parametrize("dies", [False, True])
def test_snapshots_rest_while_workers_are_in_join_also_if_one_dies_there(tmp_path, processes, dies):
    script = """
        import os, signal, sys
        import torch, p3.torch
        model = torch.nn.Linear(10, 3)
        optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        rank, followed = p3.torch.rank(), []

        def train(steps):
            for step in steps:
                optimizer.zero_grad()
                model(torch.ones(4, 10) * step).pow(2).mean().backward()
                optimizer.step()
                p3.torch.snapshot(step, {})

        def follow():
            followed.append(1)
            if rank == 2 and len(followed) == 3 and sys.argv[1] == "True":
                os.kill(os.getpid(), signal.SIGKILL)

        train(range(1, [30, 12, 4][rank] + 1))
        optimizer.join(after_step=follow)
        train(range(31, 34))
        optimizer.synchronize()
        print("the end", flush=True)
    """
    folder = tmp_path / "snapshots"
    env = {"P3_SNAPSHOT_DIR": str(folder), "P3_SNAPSHOT_EVERY": "1", "P3_WAIT_TIMEOUT_S": "20"}
    ended = run_to_end(tmp_path, processes, 3, [write_script(tmp_path, script), str(dies)], **env)
    assert ended.code == 0 and ended.out.count("the end") == 3 - dies, ended
    assert max(path.name for path in folder.glob("round-*[0-9]")) == "round-%012d" % 33


def test_frozen_weights_are_never_a_sum_of_two_givers(tmp_path, processes):
    """Rank 0 dies behind a piece that rank 1 begins when it knows of that."""
    script = """
        import os, signal, time
        import torch, p3.torch
        from p3.worker import streams

        begin, pieces = streams._begin, []

        def begin_or_die(session, *arguments):
            pieces.append(1)
            if len(pieces) == 4 and session.rank == 1:
                with session.changed:
                    assert session.changed.wait_for(lambda: 0 not in session.members, 30)
            operation = begin(session, *arguments)
            if len(pieces) == 5 and session.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation

        streams.PIECE_BYTES, streams._begin = 1 << 18, begin_or_die
        base, head = torch.nn.Linear(1000, 400).requires_grad_(False), torch.nn.Linear(400, 2)
        torch.nn.init.ones_(base.weight)
        p3.torch.DistributedOptimizer(torch.optim.SGD(head.parameters(), lr=0.1), torch.nn.Sequential(base, head))
    """
    ended = run_to_end(tmp_path, processes, 3, [write_script(tmp_path, script)])
    assert ended.code == 1 and "worker 0 was lost while it gave all workers the weights" in ended.err, ended
