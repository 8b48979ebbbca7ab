"""The staging of parameters on a GPU, with the CPU in the GPU's place: all of it but what streams and events do."""

import contextlib
import functools
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
import late_streams  # noqa: E402
import torch_training  # noqa: E402
from p3.torch.device import staging  # noqa: E402
from p3.torch.parameters import arrays  # noqa: E402
from p3.trace import lives  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
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
def staged():
    arrays.DEVICES.add("cpu")
    yield
    arrays.DEVICES.remove("cpu")


@pytest.fixture
def late(staged, monkeypatch):
    """The device's streams, late ones."""
    monkeypatch.setattr(staging, "staging_of", functools.lru_cache(maxsize=None)(late_streams.Staging))
    return lambda: staging.staging_of(torch.device("cpu"))


def test_the_threads_choose_the_device(late):
    model, optimizer = linear_of()
    step(model, optimizer)
    model(torch.ones(1, 4))
    assert set(late_streams.device_of) == {"p3-staging-%s" % name for name in ("copies", "waits", "back")}
    assert set(late_streams.device_of.values()) == {torch.device("cpu")}


def linear_of(optimizer_of=torch.optim.SGD, **options):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    return model, p3.torch.DistributedOptimizer(optimizer_of(model.parameters(), lr=0.5), model, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@contextlib.contextmanager
def held(stream):
    """What is queued on the stream within this happens behind it."""
    opened = threading.Event()
    stream.enqueue(lambda: opened.wait(DEADLINE_S))
    try:
        yield
    finally:
        opened.set()


def wait_until(is_so):
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_gradient_is_kept_until_it_is_copied_and_no_longer(late):
    model, optimizer = linear_of()
    step(model, optimizer)
    model(torch.ones(1, 4))
    with held(late()._out):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        kept = weakref.ref(model.weight.grad.untyped_storage())
        before = model.weight.detach().clone()
        optimizer.step()
        gc.collect()
        assert kept() is not None
    model(torch.ones(1, 4))
    assert torch.allclose(before - model.weight, torch.ones(3, 4))
    wait_until(lambda: kept() is None)


def test_the_copies_of_all_gradients_are_queued_before_the_first_is_done(late):
    """And no call waits for one."""
    model, optimizer = linear_of()
    step(model, optimizer)
    model(torch.ones(1, 4))
    out, session = late()._out, p3.torch.start.job.current()
    sent, queued = session.counters()["slices_sent"], out.queued
    with held(out):
        step(model, optimizer)
        wait_until(lambda: out.queued == queued + 1 + 2 * 5)  # of each gradient: three waits, a copy, and its event
        assert session.counters()["slices_sent"] <= sent + 1  # that of the step's count
    model(torch.ones(1, 4))
    assert session.counters()["slices_sent"] == sent + 3


def test_more_pieces_than_may_be_ahead_are_copied_all_the_same(late, monkeypatch):
    monkeypatch.setattr(staging, "_AHEAD", 2)
    monkeypatch.setattr(staging, "pieces", lambda elements, first: [(at, at + 1) for at in range(elements)])
    model, optimizer = linear_of()
    before = model.weight.detach().clone()
    for _ in range(3):
        step(model, optimizer)
    optimizer.synchronize()
    assert torch.allclose(before - model.weight, torch.full((3, 4), 3.0))


def test_events_are_used_again(late):
    made = []
    late().new_event = lambda: made.append(late_streams.Event()) or made[-1]
    model, optimizer = linear_of()
    for _ in range(6):
        step(model, optimizer)
        optimizer.synchronize()
    assert len(made) <= 2 * (2 + 2), "each parameter has two, and each gradient under way needs two"


def test_host_arrays_lie_in_slabs(staged):
    made = staging.Staging(torch.device("cpu"))
    kinds = [(3, torch.bfloat16), (0, torch.float32), (5, torch.float64), (1 << 17, torch.float32),
             (1 << 19, torch.float16), (5 << 20, torch.float32), (3 << 18, torch.float32)]  # fmt: skip
    arrays = [made.host_array(torch.empty(count, dtype=dtype, device="meta")) for count, dtype in kinds]
    assert [(len(one), one.dtype) for one in arrays] == kinds
    mebibytes = [one.untyped_storage().nbytes() / (1 << 20) for one in arrays]
    assert mebibytes == [1, 1, 1, 1, 1, 20, 4]
    for number, one in enumerate(arrays):
        one.fill_(number)
    assert all((one == number).all() for number, one in enumerate(arrays))


def test_a_round_begins_when_the_value_before_has_left_the_host_array(late, monkeypatch):
    session = p3.torch.start.job.current()
    model, optimizer = linear_of()
    step(model, optimizer)
    optimizer.synchronize()
    # So that what the device has to wait for does not hold up the script.
    monkeypatch.setattr(late_streams, "_current", late_streams.Stream())
    out, queued = late()._out, late()._out.queued
    with held(late()._back):
        step(model, optimizer)
        session.wait([parameter._under_way.operation for parameter in optimizer._p3._parameters.values()])
        sent = session.counters()["slices_sent"]
        step(model, optimizer)  # the copy of the value before to the device is not done
        wait_until(lambda: out.queued == queued + 2 * 2 * 5)
        assert session.counters()["slices_sent"] <= sent + 2  # those of the steps' count
    model(torch.ones(1, 4))
    assert session.counters()["slices_sent"] >= sent + 2


def test_a_value_is_copied_to_the_device_before_a_module_asks(late):
    model, optimizer = linear_of()
    step(model, optimizer)
    optimizer.synchronize()
    back, queued = late()._back, late()._back.queued
    step(model, optimizer)
    wait_until(lambda: back.queued == queued + 2 * 2)  # of each value the copy and its event
    optimizer.synchronize()
    assert back.queued == queued + 2 * 2


def test_a_copy_to_the_device_that_the_thread_could_not_make_is_made_for_the_module(late, monkeypatch):
    model, optimizer = linear_of()
    before, failed = model.weight.detach().clone(), threading.Semaphore(0)
    copy = late_streams.Staging._copy

    def fails_in_the_thread(self, stream, destination, source):
        if threading.current_thread().name == "p3-staging-back":
            failed.release()
            raise RuntimeError("out of resources")
        copy(self, stream, destination, source)

    monkeypatch.setattr(late_streams.Staging, "_copy", fails_in_the_thread)
    for _ in range(3):
        step(model, optimizer)
        assert failed.acquire(timeout=DEADLINE_S)
    optimizer.synchronize()
    assert torch.allclose(before - model.weight, torch.full((3, 4), 3.0))


def test_two_streams_may_share_a_weight(late, monkeypatch):
    """The value gets into it on the one that needs it first, and the other one waits for that."""
    model, optimizer = linear_of()
    step(model, optimizer)
    optimizer.synchronize()
    first, second, done = late_streams.Stream(), late_streams.Stream(), threading.Event()
    step(model, optimizer)
    with held(first):
        monkeypatch.setattr(late_streams, "_current", first)
        model(torch.ones(1, 4))
        queued = first.queued
        model(torch.ones(1, 4))
        assert first.queued == queued, "it waits for itself"
        monkeypatch.setattr(late_streams, "_current", second)
        model(torch.ones(1, 4))
        second.enqueue(done.set)
        assert second.queued == 2 + 1 and not done.is_set()
    assert done.wait(DEADLINE_S)


def test_a_gradient_that_a_cuda_graph_may_overwrite_is_copied_before(late, monkeypatch):
    """There is no such graph without a GPU; what it does to the gradient's memory is done by hand."""
    monkeypatch.setattr(staging, "_may_be_overwritten", lambda gradient: True)
    model, optimizer = linear_of()
    before = model.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        total = model(torch.ones(2, 4)).sum()
        with held(late()._out):
            total.backward()
            memory = model.weight.grad.detach()
            optimizer.step()
            memory.fill_(torch.nan)
    optimizer.synchronize()
    assert torch.allclose(before - model.weight, torch.full((3, 4), 3.0))


def test_without_cuda_graphs_of_torch_compile_nothing_overwrites_gradients():
    from torch._inductor import cudagraph_trees

    assert sys.modules[cudagraph_trees.__name__] is cudagraph_trees
    found = [staging._may_be_overwritten(torch.empty(1))]
    other = threading.Thread(target=lambda: found.append(staging._may_be_overwritten(torch.empty(1))))
    other.start()
    other.join()
    assert found == [False, False]


class NothingIsAsked(TorchDispatchMode):
    """Fails where Python asks for an element of a tensor, which on a device waits for all that is under way there."""

    def __init__(self, but=0):
        """`but` so many times."""
        super().__init__()
        self.but = but

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.but -= 1
            assert self.but >= 0, function
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("told_by", ["the next step", "state_dict"])
def test_a_synchronous_step_asks_the_device_nothing_and_tells_of_changed_gradients_a_step_later(late, told_by):
    model, optimizer = linear_of(synchronous=True)
    step(model, optimizer)
    with NothingIsAsked():
        for _ in range(3):
            step(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    model.bias.grad.data.clamp_(-1e-6, 1e-6)
    optimizer.step()
    with pytest.raises(ValueError, match=r"a step ago.*gradient of bias was changed .* synchronize\(\): call that"):
        if told_by == "the next step":
            step(model, optimizer)
        optimizer.state_dict()
    step(model, optimizer)  # it is told once
    optimizer.state_dict()


@pytest.mark.parametrize("steps", [1, 4])
def test_a_weight_written_through_memory_that_was_handed_out_is_told_of_a_step_later(late, steps):
    model, optimizer = linear_of()
    for _ in range(steps):
        step(model, optimizer)
    model.weight.data.mul_(0.5)  # lands the value, and P3 looks from then on
    model.weight.data.mul_(0.5)
    step(model, optimizer)
    with pytest.raises(ValueError, match="a step ago.*parameter weight was written by the script"):
        step(model, optimizer)
        optimizer.state_dict()


def test_weights_may_move_on_the_device_if_their_values_stay(late):
    """And nothing waits for the device to know; so a change is told of a step later."""
    model, optimizer = linear_of()
    before = model.weight.detach().clone()
    for _ in range(5):
        step(model, optimizer)
        with NothingIsAsked():
            model.weight.data = model.weight.data.clone()
            step(model, optimizer)
    assert torch.allclose(before - model.weight, torch.full((3, 4), 10.0))
    model.weight.data = model.weight.data * 2
    step(model, optimizer)
    with pytest.raises(ValueError, match="a step ago.*parameter weight was written by the script"):
        optimizer.state_dict()


def test_a_learning_rate_on_the_device_is_read_once_in_a_step(late):
    rate = torch.tensor(0.5)
    model, optimizer = linear_of()
    before = model.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = rate
    step(model, optimizer)
    with NothingIsAsked(but=1):
        step(model, optimizer)
    rate.data.fill_(0.25)
    step(model, optimizer)
    with torch.no_grad():
        rate.fill_(0.125)
    step(model, optimizer)
    optimizer.synchronize()
    assert torch.allclose(before - model.weight, torch.full((3, 4), 2 * (0.5 + 0.5 + 0.25 + 0.125)))


def test_a_learning_rate_on_the_device_that_changes_under_way_is_an_error(late):
    model, optimizer = linear_of()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    step(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    with pytest.raises(ValueError, match="learning rate or weight decay of .* was changed"):
        optimizer.step()


def test_sparse_gradients_are_refused_by_name(staged):
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"0.weight: rows and parameters on a GPU \(cpu\) .* Pass sparse=False"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_parameters_elsewhere_are_refused_by_name():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="weight is on meta; p3.torch trains parameters on the CPU and on CUDA"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
