"""P3_ON_WORKER_LOSS=continue: who is left trains on as on the joined batch of those who are there."""

import sys

import pytest

torch = pytest.importorskip("torch")

from plugin_jobs import SCRIPTS  # noqa: E402
from processes import Process, clean_environment  # noqa: E402

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
