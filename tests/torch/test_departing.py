"""P3_ON_WORKER_LOSS=continue: who is left trains on as on the joined batch of those who are there."""

import sys

import pytest

torch = pytest.importorskip("torch")

from plugin_jobs import SCRIPTS  # noqa: E402
from processes import Process, clean_environment, write_script  # noqa: E402

sys.path.insert(0, str(SCRIPTS))
import torch_departing as job  # noqa: E402


@pytest.mark.parametrize("mode", job.MODES)
def test_the_weights_are_those_of_training_on_the_joined_batch_of_who_is_there(tmp_path, processes, mode):
    argv = [sys.executable, "-m", "p3", "run", "-n", str(job.WORKERS), "-s", "2", "--on-worker-loss", "continue"]
    argv += [sys.executable, str(SCRIPTS / "torch_departing.py"), mode, str(tmp_path)]
    processes.append(Process(argv, clean_environment(P3_CHECK="3", OMP_NUM_THREADS="1"), tmp_path))
    ended = processes[-1].wait(100)
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
    argv = [sys.executable, "-m", "p3", "run", "-n", "1", "-s", "1", "--on-worker-loss", "continue"]
    processes.append(Process([*argv, sys.executable, write_script(tmp_path, script)], clean_environment(), tmp_path))
    ended = processes[-1].wait(60)
    assert ended.code == 0, ended
    assert "going on without lost workers (P3_ON_WORKER_LOSS=continue is set) and weights where" in ended.out
    assert "going on without lost workers (P3_ON_WORKER_LOSS=continue is set) and a trainer's loop" in ended.out
