"""The examples for JAX learn, and two workers end with the weights of one process; with local steps, with the same."""

import re
import sys

import numpy as np
import plugin_jobs as jobs
import pytest
from processes import ROOT

pytest.importorskip("p3._core", reason="the extension is not built")
pytest.importorskip("jax", reason="needs JAX, in an environment without MXNet: see docs/frontend.md")
pytest.importorskip("sklearn")

import jax
import jax.numpy as jnp
import p3
from p3.settings import Settings

EXAMPLES = ROOT / "examples" / "jax"
SCRIPT = str(EXAMPLES / "digits.py")


def trained(path, workers, epochs, **variables):
    """(weights, output, how many digits of 100 each worker has right)"""
    command = [sys.executable, SCRIPT, "--epochs", str(epochs), "--save", str(path)]
    run = jobs.run if workers == 1 else lambda *given, **how: jobs.run_p3(workers, 2, *given, **how)
    status, output = run(command, timeout_s=100, **variables)
    assert status == 0, output
    right = re.findall(r"worker \d of %d: accuracy ([\d.]+)%%" % workers, output)
    assert len(right) == workers, output
    with np.load(path) as saved:
        return dict(saved), output, [float(one) for one in right]


def test_two_workers_train_as_one_process(tmp_path):
    alone, _, (right,) = trained(tmp_path / "one.npz", 1, 2)
    together, _, all_right = trained(tmp_path / "two.npz", 2, 2)
    assert right > 85 and all_right == [right, right]
    assert alone.keys() == together.keys() and len(alone) == 6
    for name in alone:
        np.testing.assert_allclose(together[name], alone[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.timeout(300)  # three jobs, whose processes import JAX and compile
def test_a_job_goes_on_where_its_snapshot_was_taken(tmp_path):
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "30"}  # an epoch
    whole, *_ = trained(tmp_path / "whole.npz", 2, 2)
    trained(tmp_path / "begun.npz", 2, 1, **variables)
    resumed, output, _ = trained(tmp_path / "resumed.npz", 2, 2, **variables)
    assert "epoch 1" not in output and "epoch 2" in output
    for name in whole:
        np.testing.assert_array_equal(resumed[name], whole[name], err_msg=name)


@pytest.mark.parametrize("workers", [1, 2])
def test_local_steps_learn(workers):
    command = [sys.executable, str(EXAMPLES / "local_steps.py"), "--epochs", "4"]
    status, output = jobs.run_p3(workers, 2, command) if workers > 1 else jobs.run(command, 100)
    assert status == 0, output
    right = re.findall(r"worker \d of \d: accuracy ([\d.]+)%", output)
    assert len(right) == workers and len(set(right)) == 1 and float(right[0]) > 85, output


def test_local_steps_take_jaxs_arrays_of_any_type_which_may_be_donated():
    first = {"w": jnp.ones(3, jnp.bfloat16), "v": jnp.zeros((2, 2))}
    inner = jax.jit(lambda arrays: jax.tree.map(lambda one: one + 1, arrays), donate_argnums=0)
    with p3.Session.open(Settings()) as session:
        steps = p3.LocalSteps(session, first, every=3, outer={"lr": 1.0, "momentum": 0.0})
        arrays = steps.arrays
        for _ in range(7):
            arrays = steps.step(inner(arrays))
        assert {name: (one.dtype, one.shape) for name, one in arrays.items()} == {
            name: (one.dtype, one.shape) for name, one in first.items()}  # fmt: skip
        assert (arrays["w"] == 8).all() and (arrays["v"] == 7).all()
        assert steps.stats()["merges"] == 2
        steps.release()
