"""Gradient compression through the store: what NumPy says of both types, and what MXNet itself makes of two-bit."""

import plugin_jobs as jobs
import pytest

pytest.importorskip("mxnet")
import numpy as np


def test_sums_and_weights_of_compressed_gradients_are_those_of_numpy():
    status, output = jobs.run_p3(2, 2, jobs.python("compressed.py", "numpy"))
    assert status == 0, output
    for rank in range(2):
        for kind in ("1bit", "2bit", "fp16"):
            assert "rank %d: %s sums are those of NumPy" % (rank, kind) in output, output
            assert "rank %d: %s weights are those of NumPy" % (rank, kind) in output, output


def test_two_bits_give_the_bits_of_mxnets_dist_sync(tmp_path):
    ours, theirs = tmp_path / "p3.npz", tmp_path / "mxnet.npz"
    status, output = jobs.run(jobs.python("compressed.py", "save", "p3_sync", ours))  # embedded in one process
    assert status == 0, output
    ((status, output),) = jobs.run_dist_sync(1, 1, jobs.python("compressed.py", "save", "dist_sync", theirs))
    assert status == 0, output
    with np.load(ours) as ours, np.load(theirs) as theirs:
        assert set(ours.files) == set(theirs.files) and len(ours.files) == 15
        for name in ours.files:
            np.testing.assert_array_equal(ours[name].view("uint32"), theirs[name].view("uint32"), err_msg=name)
        assert all(ours["2 of round %d" % step].any() for step in range(5))  # or there was nothing to compare
