"""Training on several workers follows training on one, on the joined batch, and gives the same bits every time."""

import sys

import numpy as np
import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")
sys.path.insert(0, str(jobs.SCRIPTS))
import trajectory  # noqa: E402

TOLERANCE = 1e-5  # of a tensor's largest value, after 100 steps


def job(directory, workers, servers, *cases):
    """{case: [weights of each worker]} of one p3_sync job."""
    command = jobs.python("trajectory.py", directory, "p3_sync", *cases)
    status, output = jobs.run_p3(workers, servers, command)
    assert status == 0, output
    return load(directory, workers, cases)


def load(directory, workers, cases):
    return {name: [dict(np.load(directory / f"{name}-{rank}.npz")) for rank in range(workers)] for name in cases}


def distance(weights, reference):
    assert weights.keys() == reference.keys()
    return max(np.abs(weights[name] - value).max() / np.abs(value).max() for name, value in reference.items())


def assert_same_bits(weights, others):
    for name, value in weights.items():
        assert np.array_equal(value, others[name]), name


@pytest.fixture(scope="module")
def references():
    """Weights of one process on the joined batch, made when first asked for."""
    made = {}

    def reference(name):
        if name not in made:
            made[name] = trajectory.train(mx, dict(trajectory.CASES[name], devices=1), None)
        return made[name]

    return reference


FOUR = ("hybrid-evaluated", "adam", "two-devices", "disordered")
TWO = tuple(name for name in trajectory.CASES if name != "normalised")
EXACT = tuple(name for name in TWO if not trajectory.CASES[name]["compression"])


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    return job(tmp_path_factory.mktemp("two"), 2, 2, *TWO)


@pytest.fixture(scope="module")
def four_workers(tmp_path_factory):
    return job(tmp_path_factory.mktemp("four"), 4, 2, *FOUR)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", EXACT)
def test_two_workers_follow_one_process(two_workers, references, name):
    for weights in two_workers[name]:
        assert distance(weights, references(name)) <= TOLERANCE


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", FOUR)
def test_four_workers_follow_one_process(four_workers, references, name):
    for weights in four_workers[name]:
        assert distance(weights, references(name)) <= TOLERANCE


@pytest.mark.parametrize("name", TWO)
def test_all_workers_hold_the_same_bits(two_workers, name):
    assert_same_bits(*two_workers[name])


def test_training_changes_the_weights(references):
    """Or following would be no feat."""
    start = trajectory.train(mx, trajectory.CASES["hybrid"], None, steps=1)
    assert distance(references("hybrid"), start) > 0.01


@pytest.mark.timeout(200)
def test_two_runs_with_three_workers_give_the_same_bits(tmp_path):
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        runs.append(job(tmp_path / name, 3, 2, "static-alloc-evaluated", "summed"))
    for case in runs[0]:
        assert_same_bits(runs[0][case][0], runs[1][case][0])


@pytest.mark.timeout(200)
def test_p3_sync_follows_dist_sync_with_batch_normalisation(tmp_path):
    case = "normalised"
    theirs, ours = tmp_path / "dist_sync", tmp_path / "p3_sync"
    theirs.mkdir()
    ours.mkdir()
    for status, output in jobs.run_dist_sync(2, 2, jobs.python("trajectory.py", theirs, "dist_sync", case)):
        assert status == 0, output
    expected = load(theirs, 2, [case])[case]
    got = job(ours, 2, 2, case)[case]
    for rank in range(2):  # the running statistics are each worker's own
        assert distance(got[rank], expected[rank]) <= TOLERANCE
