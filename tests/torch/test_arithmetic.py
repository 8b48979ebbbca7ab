"""The servers' optimizers against torch.optim, step by step, and bfloat16 against PyTorch's conversions."""

import itertools
import math

import numpy as np
import pytest
from p3.measure._kernels import NativeOptimizer, add_to_sum, finish_sum, start_sum, use_avx2
from p3.plan.optimizers import FIELDS, validate

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

STEPS = 30
WORLD_SIZE = 3
SIZES = [1, 7, 8, 1000, 50000]
FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
FUSED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
to_the_bit = pytest.mark.skipif(not FUSED, reason="PyTorch's kernels for this CPU have no fused multiply-add")


def _options(**alternatives):
    return [dict(zip(alternatives, chosen)) for chosen in itertools.product(*alternatives.values())]


_ALL = {"weight_decay": [0, 0.01], "maximize": [False, True]}
_DECAYED = {"weight_decay": 0.01}
_FULL = {"sgd": {"momentum": 0.9, "nesterov": True, **_DECAYED}, "adam": {"amsgrad": True, **_DECAYED},
         "adamw": {"amsgrad": True, **_DECAYED}, "adagrad": {"initial_accumulator_value": 0.1, **_DECAYED},
         "rmsprop": {"momentum": 0.9, "centered": True, **_DECAYED}}  # fmt: skip
OPTIONS = {
    "sgd": [
        *_options(momentum=[0], **_ALL),
        *_options(momentum=[0.9], dampening=[0, 0.1], **_ALL),
        *_options(momentum=[0.9], nesterov=[True], **_ALL),
    ],
    "adam": _options(amsgrad=[False, True], **_ALL) + [{"betas": (0.4, 0.7), "eps": 1e-3}, {"betas": (0.0, 0.0)}],
    "adamw": _options(amsgrad=[False, True], **_ALL),
    "adagrad": _options(initial_accumulator_value=[0, 0.1], lr_decay=[0, 0.1], **_ALL),
    "rmsprop": _options(momentum=[0, 0.9], centered=[False, True], **_ALL) + [{"alpha": 0.3, "centered": True}],
}
CASES = [(name, options) for name, alternatives in OPTIONS.items() for options in alternatives]
KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
         "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}  # fmt: skip


def _description(optimizer, multi_precision=False):
    group = dict(optimizer.param_groups[0], multi_precision=multi_precision)
    group["epsilon"] = group.get("eps")
    name = "torch_" + type(optimizer).__name__.lower()
    if name.startswith("torch_adam"):
        name, (group["beta1"], group["beta2"]) = "torch_adam", group["betas"]
        group["decoupled"] = isinstance(optimizer, torch.optim.AdamW)
    description = {"name": name, **{field: group[field] for field in FIELDS[name]}}
    validate(description)
    return description


class Pair:
    """One weight, trained by torch.optim and as a server does, by the same gradients at the same rates."""

    def __init__(self, name, options, weight, dtype=None):
        """`dtype`: what the server's weight is rounded to; multi_precision may be among the options."""
        options = dict(options)
        multi_precision = options.pop("multi_precision", False)
        self.parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
        self.optimizer = KINDS[name]([self.parameter], lr=0.1, foreach=False, **options)
        self.native = NativeOptimizer(_description(self.optimizer, multi_precision))
        self.weight = weight.copy() if dtype is None else _bits(self.parameter.detach().to(dtype))
        self.master = weight.copy() if multi_precision else None
        self.states = [np.full_like(weight, math.nan) for _ in range(self.native.state_count)]
        self.native.start_state(self.weight, self.states)
        self.updates = 0

    def step(self, summed):
        self.updates += 1
        group = self.optimizer.param_groups[0]
        group["lr"] = 0.1 * 0.9 ** (self.updates // 5)
        self.parameter.grad = torch.from_numpy(summed) * (1 / WORLD_SIZE)
        self.optimizer.step()
        lr = group["lr"] / (1 + (self.updates - 1) * group.get("lr_decay", 0))
        decay, updates = group["weight_decay"], self.updates
        self.native.update(self.weight, self.master, self.states, summed, lr, decay, 1 / WORLD_SIZE, updates)

    def torchs_states(self):
        """In the order in which PyTorch made them."""
        state = self.optimizer.state[self.parameter]
        return [value.numpy() for name, value in state.items() if name != "step" and value is not None]

    def assert_same(self, tolerance):
        assert len(self.states) == len(self.torchs_states())
        for ours, torchs in [(self.weight, self.parameter.detach().numpy()), *zip(self.states, self.torchs_states())]:
            if tolerance == 0:
                assert ours.tobytes() == torchs.tobytes()
            else:  # relative to the largest there was: weights start within 1, gradients are about as large
                np.testing.assert_allclose(ours, torchs, rtol=0, atol=tolerance * max(1, np.abs(torchs).max()))


def _bits(tensor):
    """NumPy's float16, or the bits of a bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype == BFLOAT16 else tensor).numpy().copy()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Several would spin while they wait for each other, and other tests run at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def exact_square_root(monkeypatch):
    """PyTorch takes MKL's square root, whose last bit may be wrong; for a test, that of IEEE 754."""
    root = lambda tensor: torch.from_numpy(np.sqrt(tensor.numpy()))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "sqrt", root)
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda tensor: tensor.copy_(root(tensor)))


def _follow(name, options, dtype, tolerance):
    for elements in SIZES:
        generator = np.random.RandomState(elements)
        pair = Pair(name, options, generator.uniform(-1, 1, elements).astype(dtype))
        start = pair.weight.copy()
        for _ in range(STEPS):
            pair.step(generator.normal(size=elements).astype(dtype))
            pair.assert_same(tolerance)
        assert not np.array_equal(pair.weight, start)


def _close(dtype):
    # Where it is in the core alone, the difference that centered RMSProp divides by cancels it.
    return (1e-6 if dtype == np.float32 else 1e-14) * (1 if FUSED else 100)


@to_the_bit
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name, options", CASES)
def test_equals_torch_to_the_bit_but_for_its_square_root(exact_square_root, name, options, dtype):
    _follow(name, options, dtype, tolerance=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name, options", CASES)
def test_follows_torch_as_it_is(name, options, dtype):
    _follow(name, options, dtype, tolerance=0 if name == "sgd" and FUSED else _close(dtype))


@to_the_bit
@pytest.mark.parametrize("name, options", CASES)
def test_nan_and_infinity_are_where_torch_has_them(exact_square_root, name, options):
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38, 1.0, -1.0]
    weight, gradient = (np.array(axis, np.float32).reshape(-1) for axis in np.meshgrid(special, special))
    pair = Pair(name, options, weight)
    with np.errstate(invalid="ignore"):
        for _ in range(3):
            pair.step(gradient)
            for ours, torchs in [(pair.weight, pair.parameter.detach()), *zip(pair.states, pair.torchs_states())]:
                np.testing.assert_array_equal(ours, torchs)


@to_the_bit
@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_is_updated_in_float32_and_rounded_once(exact_square_root, name, dtype, multi_precision):
    generator = np.random.RandomState(0)
    weight = torch.from_numpy(generator.uniform(-1, 1, 3001).astype(np.float32)).to(dtype).float().numpy()
    pair = Pair(name, dict(_FULL[name], multi_precision=multi_precision), weight, dtype)
    for _ in range(STEPS):
        pair.step(generator.normal(size=weight.size).astype(np.float32))
        rounded = pair.parameter.detach().to(dtype)
        assert pair.weight.tobytes() == _bits(rounded).tobytes()
        if multi_precision:
            assert pair.master.tobytes() == pair.parameter.detach().numpy().tobytes()
        else:
            pair.parameter.data.copy_(rounded)
        for ours, torchs in zip(pair.states, pair.torchs_states()):
            assert ours.tobytes() == torchs.tobytes()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_of_a_sparse_gradient_the_touched_rows_alone_change(name):
    generator = np.random.RandomState(0)
    pair = Pair(name, {}, generator.uniform(-1, 1, (40, 16)).astype(np.float32))
    for _ in range(STEPS):
        rows = np.sort(generator.choice(40, 10, replace=False))
        summed = generator.normal(size=(10, 16)).astype(np.float32)
        pair.updates += 1
        pair.parameter.grad = torch.sparse_coo_tensor(
            torch.from_numpy(rows)[None], torch.from_numpy(summed) * (1 / WORLD_SIZE), (40, 16), check_invariants=True
        )
        pair.optimizer.step()
        for row, gradient in zip(rows, summed):
            states = [state[row] for state in pair.states]
            pair.native.update(pair.weight[row], None, states, gradient, 0.1, 0, 1 / WORLD_SIZE, pair.updates)
        pair.assert_same(0 if name == "sgd" and FUSED else _close(np.float32))


SGD = {"name": "torch_sgd", "momentum": 0.9, "dampening": 0, "nesterov": False, "maximize": False,
       "multi_precision": False}  # fmt: skip
RMSPROP = {"name": "torch_rmsprop", "alpha": 0.99, "epsilon": 1e-8, "momentum": 0, "centered": False, "maximize": False,
           "multi_precision": False}  # fmt: skip


@pytest.mark.parametrize(
    "description, text",
    [
        ({**SGD, "nesterov": 1}, "nesterov is 1; it must be True or False"),
        ({**SGD, "dampening": math.nan}, "dampening is nan"),
        ({**SGD, "clip_gradient": 1.0}, "'clip_gradient' .*is no field of it"),
        ({name: value for name, value in SGD.items() if name != "maximize"}, "maximize is missing"),
        ({**RMSPROP, "alpha": -0.5}, "alpha is -0.5"),
        ({**RMSPROP, "centered": None}, "centered is None"),
    ],
)
def test_nonsense_is_refused_and_the_field_named(description, text):
    with pytest.raises(ValueError, match=text):
        NativeOptimizer(description)


# bfloat16, without NumPy, which does not know it.


def _memory(format, dtype, elements):
    """The same memory as a buffer and as a tensor."""
    memory = bytearray(elements * dtype.itemsize)
    return memoryview(memory).cast(format), torch.frombuffer(memory, dtype=dtype)


@pytest.fixture(params=["avx2", "baseline"])
def loops(request):
    """Runs a test with both builds of the loops."""
    before = use_avx2()
    if request.param == "avx2" and not before:
        pytest.skip("this CPU has no AVX2 and FMA")
    use_avx2(request.param == "avx2")
    yield
    use_avx2(before)


def _same_or_both_nan(ours, torchs, integers):
    """NaN stays NaN, but PyTorch's loses its sign and payload, differently in vectors and outside of them."""
    nan = torch.isnan(torchs.float())
    assert torch.equal(torch.isnan(ours.float()), nan)
    assert torch.equal(ours.view(integers)[~nan], torchs.view(integers)[~nan])


def test_every_bfloat16_is_widened_as_torch_does(loops):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    source, tensor = _memory("H", torch.int16, 65536)
    tensor.copy_(bits)
    accumulator, widened = _memory("f", torch.float32, 65536)
    start_sum(accumulator, source)
    _same_or_both_nan(widened, bits.view(BFLOAT16).float(), torch.int32)
    back, rounded = _memory("h", torch.int16, 65536)
    finish_sum(back, accumulator)
    _same_or_both_nan(rounded.view(BFLOAT16), bits.view(BFLOAT16), torch.int16)


def test_floats_are_rounded_to_bfloat16_as_torch_does(loops):
    """Every bfloat16, the middle to its neighbour (a tie), and the floats beside both; then random bits."""
    points = torch.arange(65536, dtype=torch.int32) << 16
    beside = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    random = torch.randint(-(2**31), 2**31, (200003,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits = torch.cat([(points[:, None] + beside).reshape(-1), random])
    accumulator, floats = _memory("f", torch.float32, len(bits))
    floats.copy_(bits.view(torch.float32))
    assert torch.equal(floats.view(torch.int32), bits)
    destination, rounded = _memory("H", torch.int16, len(bits))
    finish_sum(destination, accumulator)
    _same_or_both_nan(rounded.view(BFLOAT16), floats.to(BFLOAT16), torch.int16)


def test_a_sum_of_bfloat16_is_torchs_in_float32(loops):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(50001, generator=generator).to(BFLOAT16) for _ in range(5)]
    accumulator, total = _memory("f", torch.float32, 50001)
    for add, gradient in zip([start_sum, *[add_to_sum] * 4], gradients):
        source, tensor = _memory("h", torch.int16, 50001)
        tensor.copy_(gradient.view(torch.int16))
        add(accumulator, source)
    expected = gradients[0].float()
    for gradient in gradients[1:]:
        expected += gradient.float()
    assert torch.equal(total, expected)
