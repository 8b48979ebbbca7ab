"""A model's weights over p3.frontend alone: the same as in one process, with uneven steps, staleness and snapshots."""

import re

import numpy as np
import plugin_jobs as jobs
import pytest

pytest.importorskip("p3._core", reason="the extension is not built")
import p3
from p3.frontend.weights import Weights
from p3.settings import Settings

SGD = {"name": "torch_sgd", "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False,
       "multi_precision": False}  # fmt: skip


def trained(path, workers, *arguments, **variables):
    """(weights, output) of a job of tests/jobs/frontend_weights.py."""
    name, *rest = arguments
    command = jobs.python("frontend_weights.py", name, path, *rest)
    status, output = jobs.run_p3(workers, 2, command, **variables) if workers > 1 else jobs.run(command, **variables)
    assert status == 0, output
    with np.load(path) as saved:
        return dict(saved), output


def assert_same(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=name)


def test_two_workers_train_as_one_and_what_is_read_first_is_the_most_urgent(tmp_path):
    alone, _ = trained(tmp_path / "one.npz", 1, "steps", 20)
    together, output = trained(tmp_path / "two.npz", 2, "steps", 20)
    assert_same(alone, together, 1e-5)
    assert output.count("priorities ['first', 'last']") == 2, output


def test_a_worker_without_batches_follows_the_others(tmp_path):
    _, output = trained(tmp_path / "weights.npz", 2, "uneven", 10)
    told = dict(re.findall(r"worker (\d) followed (\d+) of 10 steps", output))
    assert told == {"0": "0", "1": "5"}, output
    assert len(set(re.findall(r"sum (\S+)", output))) == 1, output


def test_with_staleness_each_push_is_an_update(tmp_path):
    weights, output = trained(tmp_path / "weights.npz", 2, "apart", 40)
    assert re.findall(r"updates (\d+)", output) == ["80", "80"], output
    assert not (weights["first"] == 0.5).any()


def test_a_job_goes_on_where_its_snapshot_was_taken(tmp_path):
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "5"}
    whole, _ = trained(tmp_path / "whole.npz", 2, "steps", 13)
    trained(tmp_path / "begun.npz", 2, "resumed", 7, **variables)
    resumed, output = trained(tmp_path / "resumed.npz", 2, "resumed", 13, **variables)
    assert_same(whole, resumed)
    for rank in range(2):
        assert "worker %d resumed at 5 with {'rank': %d}" % (rank, rank) in output


@pytest.fixture
def weights():
    with p3.Session.open(Settings()) as session:
        yield Weights(session, {"w": np.ones((2, 3), np.float32)}, SGD)


@pytest.mark.parametrize("gradient, problem", [
    (np.ones((3, 2), np.float32), r"gradient of w has shape \(3, 2\)"), (np.ones((2, 3)), "type float64"),
])  # fmt: skip
def test_a_gradient_that_does_not_fit_is_refused(weights, gradient, problem):
    with pytest.raises(ValueError, match=problem):
        weights.push("w", gradient, 0.1)


def test_a_strategy_cuts_the_weights_and_has_entries_for_them_alone():
    first = {"v": np.ones(9, np.float32), "w": np.ones((2, 3), np.float32)}
    wrong, right = ({"version": 1, "default": {"slice": 4}, "keys": {name: {"slice": 2}}} for name in ("x", "w"))
    with p3.Session.open(Settings()) as session:
        with pytest.raises(ValueError, match="the strategy in the script has an entry for key 'x', but the keys are"):
            Weights(session, first, SGD, strategy=wrong)
        weights = Weights(session, first, SGD, strategy=right)
        cut = {name: agreed.plan.slice_elements for (_, name), agreed in session.keys.agreed.items()}
        assert cut == {"v": 4, "w": 2, "steps": 4}
        weights.join()


def test_a_function_chooses_the_compression_of_each_weight():
    first, gradient = np.ones((2, 3), np.float32), np.full((2, 3), 0.5, np.float32)
    with p3.Session.open(Settings()) as session:
        weights = Weights(session, {"v": first, "w": first}, SGD,
                          compression=lambda name, shape: {"v": {"up": "int8", "down": "bf16"}}.get(name))  # fmt: skip
        codecs = [(one.axes.codec, one.axes.value_codec) for one in weights.keys_to_capture()]
        assert codecs == [({"type": "int8"}, {"type": "bf16"}), ({}, {})]
        for name in ("v", "w"):
            weights.push(name, gradient, 0.5)
        weights.end_step(0.5)
        assert (weights["v"] == 0.75).all() and (weights["w"] == 0.75).all()


def test_a_second_gradient_in_a_step_is_refused(weights):
    gradient = np.ones((2, 3), np.float32)
    weights.push("w", gradient, 0.5)
    with pytest.raises(ValueError, match="w has a gradient in this step already"):
        weights.push("w", gradient, 0.5)
    weights.end_step(0.5)
    assert (weights["w"] == 0.5).all()


def test_an_optimizer_whose_numbers_the_front_end_must_compute_is_refused():
    with p3.Session.open(Settings()) as session, pytest.raises(ValueError, match="must be a torch_"):
        Weights(session, {}, {"name": "adam"})


def test_low_rank_is_refused_as_the_servers_update():
    with p3.Session.open(Settings()) as session:
        with pytest.raises(ValueError, match="lowrank and plain SGD on the servers exclude each other"):
            Weights(session, {"w": np.zeros((20, 30), "float32")}, SGD, compression="lowrank")
