"""The staging of parameters on a GPU, with the CPU in the GPU's place: all of it but what streams and events do."""

import gc
import os
import sys
import threading
import time
import weakref

import plugin_jobs as jobs
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")
sys.path.insert(0, str(jobs.SCRIPTS))
import p3.torch  # noqa: E402
from processes import QUICK_IMPORT, ROOT  # noqa: E402
import torch_training  # noqa: E402
from p3.torch import staging  # noqa: E402
from p3.trace import lives  # noqa: E402
from torch import nn  # noqa: E402
from weights import distance, load, same_bits  # noqa: E402

CASES = [name for name in torch_training.CASES if not name.startswith("sparse")]
DEADLINE_S = 30
LATE_PATH = os.pathsep.join([QUICK_IMPORT, str(ROOT), str(ROOT / "tests" / "helpers")])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of all cases, trained by two workers: staged, in many small slices, and as parameters of the CPU."""
    folder = tmp_path_factory.mktemp("trained")
    command = jobs.python("torch_training.py", folder)
    small = {"P3_CHECK": "1", "P3_SLICE_ELEMENTS": "64"}
    for mode, settings in (("p3", {}), ("p3-staged", small)):
        result = jobs.run_p3(2, 2, [*command, mode, *CASES], timeout_s=110, **settings)
        assert result[0] == 0, result[1:]
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_staged_parameters_get_the_bits_of_any_others(trained, name):
    for rank in (0, 1):
        staged, plain = load(trained, "p3-staged", rank, name), load(trained, "p3", rank, name)
        assert same_bits(staged["model"], plain["model"])
        assert distance(staged["optimizer"], plain["optimizer"]) == 0
        assert staged["losses"] == plain["losses"]


def test_copies_may_be_late(trained, tmp_path):
    """As on a device. Nothing relies on a copy's being done before its event says so."""
    names = ["adamw_amsgrad", "momentum", "not_always", "clipped", "adamax", "brain", "accumulated", "convolved"]
    command = jobs.python("torch_training.py", tmp_path, "p3-late", *names)
    status, *said = jobs.run_p3(2, 2, command, P3_CHECK="1", P3_SLICE_ELEMENTS="64", PYTHONPATH=LATE_PATH)
    assert status == 0, said
    for name in names:
        late, plain = load(tmp_path, "p3-late", 0, name), load(trained, "p3", 0, name)
        assert same_bits(late["model"], plain["model"]), name
        assert distance(late["optimizer"], plain["optimizer"]) == 0, name


def test_no_call_waits_for_the_network():
    status, output = jobs.run_p3(1, 1, jobs.python("torch_jobs.py", "--staged", "frozen_server", 0))
    assert status == 0, output
    assert "the step returned while the server was frozen" in output and "and took effect afterwards" in output


def test_workers_may_take_different_numbers_of_steps(tmp_path):
    script = jobs.python("torch_jobs.py", "--staged", "uneven", tmp_path, "adam", 2, 5, 3)
    status, output = jobs.run_p3(3, 2, script, P3_CHECK="1")
    assert status == 0, output
    assert output.count("follows") == 3


def test_a_staged_job_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path):
    script = jobs.python("torch_jobs.py", "--staged", "resumed", tmp_path, "adamw", 7)
    whole = jobs.run_p3(2, 2, [*script, "0"])
    assert whole[0] == 0, whole[1]
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--restarts", "1"]
    status, output = jobs.run([*launcher, *script, "5"], timeout_s=100,
                              P3_SNAPSHOT_DIR=str(tmp_path / "snapshots"), P3_SNAPSHOT_EVERY="2")  # fmt: skip
    assert status == 0, output
    digests = [line.split()[-1] for line in whole[1].splitlines() if "and has" in line]
    assert len(digests) == 2 and all(digest in output for digest in digests), (whole[1], output)


def test_the_first_slice_leaves_before_the_last_piece_is_copied(tmp_path):
    """In the trace; the script's events hold back each copy until the piece before it has left."""
    status, output = jobs.run_p3(1, 1, jobs.python("torch_jobs.py", "--staged", "overlapped"), P3_TRACE=str(tmp_path))
    assert status == 0, output
    trace = lives.load(str(tmp_path))
    key = next(key for key, known in trace.keys.items() if known.name == "weight")
    last_round = trace.lives[(trace.lives["key"] == key) & (trace.lives["round"] == 2)]
    assert len(last_round) == 8 and sorted(last_round["slice"]) == list(range(8))
    queued = {int(life["slice"]): life["queued"] for life in last_round}
    left = {int(life["slice"]): life["leaving"] for life in last_round}
    assert left[0] < queued[1] and left[1] < queued[2] and left[3] < queued[4]  # pieces of 1, 1, 2 and 4 slices


def test_a_copy_that_fails_fails_the_job_by_name():
    status, output = jobs.run_p3(2, 1, jobs.python("torch_jobs.py", "--staged", "copy_fails"))
    assert status != 0
    assert "the gradient of weight could not be copied from its device: illegal memory access" in output, output


# --- in one process --------------------------------------------------------------------------------------------------


@pytest.fixture
def staged(monkeypatch):
    monkeypatch.setattr(staging, "STAGED", {"cpu"})


class Held(torch.cpu.Event):
    """An event that is done when the test says so."""

    def __init__(self, waited_for, done):
        self.waited_for, self.done = waited_for, done

    def synchronize(self):
        self.waited_for.set()
        assert self.done.wait(DEADLINE_S)


def linear_of(optimizer_of=torch.optim.SGD, **options):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    return model, p3.torch.DistributedOptimizer(optimizer_of(model.parameters(), lr=0.5), model, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_gradient_is_kept_until_it_is_copied_and_no_longer(staged, monkeypatch):
    model, optimizer = linear_of()
    step(model, optimizer)
    model(torch.ones(1, 4))
    waited_for, done = threading.Event(), threading.Event()
    monkeypatch.setattr(staging.Staging, "new_event", lambda self: Held(waited_for, done))
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    kept = weakref.ref(model.weight.grad.untyped_storage())
    optimizer.step()
    assert waited_for.wait(DEADLINE_S)
    gc.collect()
    assert kept() is not None
    before = model.weight.detach().clone()
    done.set()
    model(torch.ones(1, 4))
    assert torch.allclose(before - model.weight, torch.ones(3, 4))
    deadline = time.monotonic() + DEADLINE_S
    while kept() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_round_begins_when_the_value_before_has_left_the_host_array(staged, monkeypatch):
    session = p3.torch.job.current()
    model, optimizer = linear_of()
    step(model, optimizer)
    session.wait([parameter._operation for parameter in optimizer._p3._parameters.values()])
    waited_for, done = threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(staging.Staging, "new_event", lambda self: Held(waited_for, done))
        model(torch.ones(1, 4))  # its copy to the device is not done
    sent = session.counters()["slices_sent"]
    step(model, optimizer)
    assert waited_for.wait(DEADLINE_S)
    assert session.counters()["slices_sent"] <= sent + 1  # that of the step's count
    done.set()
    model(torch.ones(1, 4))
    assert session.counters()["slices_sent"] == sent + 3


def test_sparse_gradients_are_refused_by_name(staged):
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="0.weight has sparse gradients, and is on cpu.* pass sparse=False"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_parameters_elsewhere_are_refused_by_name():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="weight is on meta; p3.torch trains parameters on the CPU and on CUDA"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
