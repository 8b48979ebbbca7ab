"""No weight is silently stale, no gradient silently lost: what could make one so is right or an error. One process."""

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from torch import nn  # noqa: E402
from torch_steps import backward, sgd, small_model, step  # noqa: E402


def both(make_optimizer, **options):
    """(model, optimizer) of P3, and the same of plain torch."""
    ours, plain = small_model(), small_model()
    return (ours, p3.torch.DistributedOptimizer(make_optimizer(ours), ours, **options)), (plain, make_optimizer(plain))


def assert_same(ours, plain):
    ours[1].synchronize()
    for (name, weight), other in zip(ours[0].named_parameters(), plain[0].parameters()):
        assert torch.equal(weight, other), name


# Reading weights


def test_before_step_the_weights_are_the_old_ones(model, optimizer):
    """Also for a forward pass between backward() and step(), and for state_dict()."""
    step(model, optimizer)
    expected = model(torch.ones(2, 4)).detach()
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # the gradients under way are complete in the first round
        backward(model)
        assert torch.equal(model(torch.ones(2, 4)), expected)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        optimizer.step()
        expected = model(torch.ones(2, 4)).detach()
        before = copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("what", ["synchronize", "state_dict", "broadcast"])
def test_what_needs_all_new_weights_is_an_error_before_step(model, optimizer, what):
    step(model, optimizer)
    backward(model)
    with pytest.raises(ValueError, match="gradient of 0.weight is under way.*after step"):
        getattr(optimizer, what)()


def test_who_holds_the_memory_of_a_weight_sees_its_new_values(model, optimizer):
    alias, array = model[0].weight.detach(), model[2].weight.detach().numpy()
    addresses = set()
    for _ in range(4):
        step(model, optimizer)
        optimizer.synchronize()
        addresses.add(model[0].bias.data_ptr())
        assert torch.equal(alias, model[0].weight) and (array == model[2].weight.detach().numpy()).all()
    assert len(addresses) == 2  # what nobody holds changes places with where the values land, without a copy


def test_weights_in_shared_memory_stay_there():
    model = small_model().share_memory()
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    address = model[0].weight.data_ptr()
    for _ in range(3):
        step(model, optimizer)
    optimizer.synchronize()
    assert model[0].weight.data_ptr() == address


def test_values_that_land_in_inference_mode_can_be_trained():
    ours, plain = both(lambda model: torch.optim.Adamax(model.parameters(), lr=0.1))
    for number in range(3):
        step(*ours)
        step(*plain)
        if number == 0:
            with torch.inference_mode():
                ours[0](torch.ones(2, 4))
    assert_same(ours, plain)


class Multiplying(torch.optim.Optimizer):
    """As Adafactor, it multiplies matrices, which autocast would round."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for tensor in self.param_groups[0]["params"]:
            rows = tensor.grad.reshape(len(tensor), -1)
            tensor.sub_((rows @ rows.t() @ rows).view_as(tensor), alpha=self.param_groups[0]["lr"])


def test_values_that_land_under_autocast_are_as_exact(monkeypatch):
    monkeypatch.setattr("p3.torch.rules.updates_parameters_alone", lambda kind: True)
    ours, plain = both(lambda model: Multiplying(model.parameters()))
    for _ in range(3):
        step(*ours)
        step(*plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours[0](torch.ones(2, 4))
    assert_same(ours, plain)


def test_a_learning_rate_in_a_tensor_is_that_of_its_step():
    """Schedulers change it in place, before the workers make the update."""
    ours, plain = both(lambda model: torch.optim.Adamax(model.parameters(), lr=torch.tensor(0.1)))
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _, optimizer in (ours, plain)]
    for _ in range(3):
        for (model, optimizer), schedule in zip((ours, plain), schedules):
            step(model, optimizer)
            schedule.step()
    assert_same(ours, plain)


# What the script does to gradients


@pytest.mark.parametrize("change", ["unscale", "clip", "data"])
def test_a_gradient_changed_before_synchronize_is_an_error(model, change):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model, synchronous=True)
    step(model, optimizer)
    optimizer.zero_grad()
    backward(model)
    if change == "unscale":  # as GradScaler does; torch does not count it as a change
        if not hasattr(torch.amp, "GradScaler"):
            pytest.skip("torch has none for the CPU before 2.3")
        gradients = [parameter.grad for parameter in model.parameters()]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), torch.tensor(0.5))
    elif change == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    else:
        model[0].weight.grad.data.clamp_(-1e-6, 1e-6)
    with pytest.raises(ValueError, match=r"was changed when .* under way.* synchronize\(\): call that before"):
        optimizer.synchronize()


def test_check_finds_a_gradient_that_was_changed_past_torchs_notice(model, monkeypatch):
    monkeypatch.setenv("P3_CHECK", "1")
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    step(model, optimizer)
    backward(model)
    model[0].weight.grad.data.clamp_(-1e-6, 1e-6)
    with pytest.raises(ValueError, match="gradient of 0.weight was changed when"):
        optimizer.step()


def test_a_step_may_be_left_out_behind_synchronize():
    ours, plain = both(sgd, synchronous=True)
    for number in range(4):
        for model, optimizer in (ours, plain):
            optimizer.zero_grad()
            backward(model)
        ours[1].synchronize()
        if number != 2:
            ours[1].step()
            plain[1].step()
    assert_same(ours, plain)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_of_a_synchronous_optimizer(make_optimizer):
    weights = []
    for is_distributed in (True, False):
        torch.manual_seed(1)
        model = nn.Embedding(10, 4, sparse=True)
        optimizer = make_optimizer(list(model.parameters()), lr=0.1)
        if is_distributed:
            p3.torch.DistributedOptimizer(optimizer, model, synchronous=True)
        for rows in ([1, 2, 2], [5], [2, 5]):
            optimizer.zero_grad()
            model(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
        weights.append(model.weight)
    assert torch.allclose(*weights, rtol=1e-6)  # the parts of a row that occurs twice are added up first


# What the script does to parameters


@pytest.mark.parametrize("change", ["type", "format", "memory"])
def test_a_model_converted_afterwards_is_an_error(change):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    inputs = torch.randn(2, 3, 3, 3)
    if change == "type":
        model, inputs = model.double(), inputs.double()
    elif change == "format":
        model = model.to(memory_format=torch.channels_last)
    else:
        model[0].weight.data = torch.ones(8, 3, 3, 3)
    text = "parameter 0.weight was written" if change == "memory" else "format of parameter 0.weight was changed from"
    with pytest.raises(ValueError, match=text):
        model(inputs).sum().backward()
        optimizer.step()
    if change != "memory":
        with pytest.raises(ValueError, match="format of parameter 0.weight was changed from.*before Distributed"):
            optimizer.broadcast()


def test_two_parameters_of_one_memory_are_refused(model):
    model.append(nn.Linear(4, 3))
    model[3].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match="0.weight and 3.weight share memory.*same Parameter"):
        p3.torch.DistributedOptimizer(sgd(model), model)
    model[3].weight = model[0].weight
    p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)  # nothing is left of the refusal


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_parameter_added_to_a_group_is_an_error(model, synchronous):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model, synchronous=synchronous)
    step(model, optimizer)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="parameters in the optimizer's groups have changed"):
        step(model, optimizer)


def test_loading_by_assignment_is_an_error(model, optimizer):
    content = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="assign=True.* has replaced 0.weight, 0.bias.*without assign"):
        model.load_state_dict(content, assign=True)


def test_a_buffer_that_the_script_has_replaced_is_the_one_that_is_sent_and_saved(model):
    model.register_buffer("average", torch.zeros(2))
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    model.average = model.average + 5
    assert (optimizer._p3.own_state()["buffers"].view(torch.float32) == 5).all()
    optimizer.broadcast()
    assert (model.average == 5).all()
    model.average = torch.zeros(3)
    with pytest.raises(ValueError, match="buffer average has another size"):
        optimizer.broadcast()


# The optimizer's state, and files


def test_the_state_that_torchs_distributed_checkpoints_take_is_that_of_the_steps():
    """They call step() to have the states made, with gradients and a learning rate of zero: on one worker, perhaps."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    ours, plain = both(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        step(*ours)
        step(*plain)
        there = checkpoint.get_optimizer_state_dict(*plain)
        for _ in range(2):
            here = checkpoint.get_optimizer_state_dict(*ours)
        assert here["state"].keys() == there["state"].keys()
        for name, of_parameter in there["state"].items():
            for part, value in of_parameter.items():
                assert torch.allclose(here["state"][name][part], value, rtol=1e-6), (name, part)
    checkpoint.set_optimizer_state_dict(*ours, there)
    for _ in range(2):
        step(*ours)
        step(*plain)
    ours[1].synchronize()
    assert torch.allclose(ours[0][0].weight, plain[0][0].weight, rtol=1e-6)


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.Adamax])
def test_a_distributed_checkpoint_goes_into_a_new_job(make_optimizer):
    checkpoint = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    ours, plain = both(lambda model: make_optimizer(model.parameters(), lr=0.1))
    for _ in range(2):
        step(*plain)
    checkpoint.set_model_state_dict(ours[0], plain[0].state_dict())
    checkpoint.set_optimizer_state_dict(*ours, copy.deepcopy(checkpoint.get_optimizer_state_dict(*plain)))
    for _ in range(2):
        step(*ours)
        step(*plain)
    ours[1].synchronize()
    assert torch.allclose(ours[0][0].weight, plain[0][0].weight, rtol=1e-6)


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_a_model_in_training_is_saved_by_its_state_dict_alone(model, optimizer, save):
    step(model, optimizer)
    with pytest.raises(pickle.PicklingError, match=r"cannot be saved whole.*save model.state_dict\(\)"):
        save(model, io.BytesIO())
    with pytest.raises(pickle.PicklingError, match="optimizer cannot be .*saved whole.*its state_dict"):
        save(optimizer, io.BytesIO())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["2.bias"], model[2].bias)


# Wrong arguments


def test_deep_gradient_compression_is_refused_where_it_cannot_be_right(model):
    def refused(message, optimizer=None, **options):
        compression = {"type": "dgc", **options.pop("compression", {})}
        with pytest.raises(ValueError, match=message):
            p3.torch.DistributedOptimizer(optimizer or sgd(model), model, compression=compression, **options)

    parameters = list(model.parameters())
    refused("dgc needs the update on the servers", synchronous=True)
    refused("dgc needs the update on the servers", max_grad_norm=1.0)
    refused("dgc needs the update on the servers", torch.optim.Adamax(parameters))
    refused("SGD with momentum alone, not for torch_adam", torch.optim.AdamW(parameters))
    refused("leave out nesterov=True", torch.optim.SGD(parameters, 0.1, 0.9, nesterov=True))
    refused("leave out dampening=0.5", torch.optim.SGD(parameters, 0.1, 0.9, dampening=0.5))
    refused("leave out maximize=True", torch.optim.SGD(parameters, 0.1, 0.9, maximize=True))
    refused("ratio is 2", compression={"ratio": 2})
    refused("'threshold'", compression={"threshold": 0.5})
    taken = torch.optim.SGD(parameters, 0.1, 0.9)
    model(torch.ones(2, parameters[0].shape[1])).sum().backward()
    taken.step()
    taken.zero_grad()
    refused("which has taken steps", taken)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(parameters, 0.1, 0.9), model, compression={"type": "dgc"})
    model(torch.ones(2, parameters[0].shape[1])).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="which dgc keeps on each worker"):
        optimizer.load_state_dict(taken.state_dict())


def test_models_and_norms_that_make_no_sense_are_refused(model):
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="takes a torch.nn.Module or several, not a Parameter"):
        p3.torch.DistributedOptimizer(optimizer, model.parameters())
    for norm in (0, -1.0, "1", True, float("nan")):
        with pytest.raises(ValueError, match="max_grad_norm is .* positive number"):
            p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=norm)
    for compression in ("fp16", {"type": "fp8"}, {"type": "2bit"}, {"type": "2bit", "threshold": -1.0}):
        with pytest.raises(ValueError, match="compression"):
            p3.torch.DistributedOptimizer(optimizer, model, compression=compression)
    scripted = torch.jit.script(small_model())
    with pytest.raises(ValueError, match="modules of torch.jit.*torch.compile"):
        p3.torch.DistributedOptimizer(sgd(scripted), scripted)
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="weight has no shape yet: run a forward pass"):
        p3.torch.DistributedOptimizer(sgd(lazy), lazy)
    p3.torch.DistributedOptimizer(optimizer, model)


def test_a_parameter_of_no_dimensions_is_trained():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
    for _ in range(2):
        optimizer.zero_grad()
        model.scale.square().backward()
        optimizer.step()
        optimizer.synchronize()
    assert model.scale.item() == 0.5
