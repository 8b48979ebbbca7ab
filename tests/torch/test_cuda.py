"""Parameters on a GPU, which two workers share. test_staging.py has what can be tested without one."""

import os
import sys

import plugin_jobs as jobs
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use: torch.cuda.is_available() is False", allow_module_level=True)
sys.path.insert(0, str(jobs.SCRIPTS))
import torch_training  # noqa: E402
from p3.trace import lives  # noqa: E402
from weights import distance, load, same_bits  # noqa: E402

CASES = [name for name in torch_training.CASES if not name.startswith("sparse")]
JOBS = "torch_cuda_jobs.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of all cases, in one job of two workers and in one process of torch's."""
    folder = tmp_path_factory.mktemp("trained")
    command = jobs.python("torch_training.py", folder)
    for result in (
        jobs.run([*command, "alone-cuda", *CASES], timeout_s=200),
        jobs.run_p3(2, 2, [*command, "p3-cuda", *CASES], timeout_s=200, P3_CHECK="1", P3_SLICE_ELEMENTS="64"),
    ):
        assert result[0] == 0, result[1:]
    return folder


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CASES)
def test_two_workers_train_as_one_process_on_the_joined_batch(trained, name):
    reference = load(trained, "alone-cuda", 0, name)
    first, second = load(trained, "p3-cuda", 0, name), load(trained, "p3-cuda", 1, name)
    # A GPU sums in an order of its own, which depends on the size of the batch.
    tolerance = 10 * torch_training.CASES[name].tolerance
    assert distance(first["model"], reference["model"]) < tolerance
    assert same_bits(first["model"], second["model"])
    assert all(value.is_cuda for value in first["model"].values())
    assert tolerance > 1e-2 or distance(first["optimizer"], reference["optimizer"]) < 10 * tolerance


def test_the_training_thread_never_synchronises_with_the_device():
    """torch.cuda.set_sync_debug_mode("error") around steps, of an optimizer of the servers' and one of the workers'."""
    status, output = jobs.run_p3(2, 1, jobs.python(JOBS, "unsynchronised"))
    assert status == 0, output
    assert output.count("no step waited for the device") == 2


def test_hooks_and_step_return_while_the_device_computes():
    """A kernel that spins for a second is in front of everything; the script is through long before it ends."""
    status, output = jobs.run_p3(2, 1, jobs.python(JOBS, "ahead"))
    assert status == 0, output
    assert output.count("ahead of the device") == 2


def test_the_first_slice_leaves_before_the_last_piece_is_copied(tmp_path):
    """Of a gradient of 512 MB, in the trace."""
    status, output = jobs.run_p3(1, 1, jobs.python(JOBS, "large"), P3_TRACE=str(tmp_path))
    assert status == 0, output
    trace = lives.load(str(tmp_path))
    key = next(key for key, known in trace.keys.items() if known.name == "weight")
    rounds = trace.lives[trace.lives["key"] == key]
    last = rounds[rounds["round"] == rounds["round"].max()]
    assert last["leaving"].min() < last["queued"].max()


def test_values_are_never_torn():
    """Steps one right after the other, on a device that lags behind: each forward pass sees whole values."""
    status, output = jobs.run_p3(2, 2, jobs.python(JOBS, "lagging"), P3_SLICE_ELEMENTS="1000")
    assert status == 0, output
    assert output.count("every value was whole") == 2


def test_an_lstm_may_flatten_its_weights_in_each_step():
    status, output = jobs.run_p3(2, 1, jobs.python(JOBS, "moved"))
    assert status == 0, output
    assert output.count("the weights follow") == 2


def test_workers_that_share_a_gpu_have_a_process_group():
    status, output = jobs.run_p3(2, 1, jobs.python(JOBS, "grouped"))
    assert status == 0, output
    assert output.count("one group") == 2


def test_a_worker_has_a_context_on_its_own_device_alone():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: torch.cuda.device_count() is %d" % torch.cuda.device_count())
    status, output = jobs.run_p3(2, 1, jobs.python(JOBS, "one_context"))
    assert status == 0, output
    assert output.count("one context") == 2


def test_a_model_may_use_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: torch.cuda.device_count() is %d" % torch.cuda.device_count())
    status, output = jobs.run_p3(2, 1, jobs.python(JOBS, "two_devices"), P3_CHECK="1")
    assert status == 0, output
    assert output.count("both devices follow") == 2
