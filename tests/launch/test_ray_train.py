"""p3.torch in Ray Train's TorchTrainer, on a Ray cluster of two nodes on this machine."""

import json
import re
import sys

import pytest
from plugin_jobs import SCRIPTS, python
from processes import ROOT, Process, clean_environment
from ray_clusters import RayNodes

pytest.importorskip("ray.train.torch", reason="no Ray Train here; make test-ray installs it")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(300)  # Ray Train imports much in each of its processes


@pytest.fixture(scope="module")
def ray_nodes():
    nodes = RayNodes(2, num_cpus=3)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def run(ray_nodes, processes, tmp_path):
    def run(command, **variables):
        quick = {"OMP_NUM_THREADS": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "HOME": str(tmp_path)}
        quick["RAY_DEDUP_LOGS"] = "0"
        env = clean_environment(RAY_ADDRESS=ray_nodes.address, **quick, **variables)
        processes.append(Process(command, env, tmp_path))
        return processes[-1].wait(240)

    return run


def test_a_killed_worker_is_started_anew_and_the_weights_are_those_of_one_process(run, tmp_path):
    workers = 2
    finished = run(python("ray_train.py", tmp_path, workers))
    assert finished.code == 0, finished
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(workers)]
    assert [(one["size"], one["servers"], one["first"]) for one in told] == [(workers, 2, 4)] * workers
    assert {one["node"] for one in told} == {"0", "1"}
    sys.path.insert(0, str(SCRIPTS))
    try:
        import ray_train
    finally:
        sys.path.remove(str(SCRIPTS))
    for name, value in ray_train.alone(workers).items():
        for one in told:
            assert torch.allclose(torch.tensor(one["weights"][name]), torch.tensor(value), atol=1e-6), name


def test_the_example_trains_on_nodes_with_unlike_numbers_of_workers_and_ends_in_peace(run):
    """Rank 0's function may return first: scheduler and servers serve the others on."""
    pytest.importorskip("sklearn", reason="no scikit-learn here; make test-ray installs it")
    finished = run([sys.executable, str(ROOT / "examples" / "ray" / "digits.py"), "--workers", "3", "--epochs", "2"])
    said = finished.out + finished.err
    accuracies = re.findall(r"worker (\d) of 3: accuracy ([\d.]+)% of 297", said)
    assert finished.code == 0 and {rank for rank, _ in accuracies} == {"0", "1", "2"}, finished
    assert len({accuracy for _, accuracy in accuracies}) == 1 and float(accuracies[0][1]) > 80
    assert "the job failed" not in said and "p3:" not in said, said
