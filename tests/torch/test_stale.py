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


READS = {
    "attribute": lambda weight: weight.square().sum(),
    "list": lambda weight: torch.cat([torch.ones(1), weight.flatten()]).sum(),
    "nested": lambda weight: torch._foreach_norm([weight])[0],
    "keyword": lambda weight: nn.functional.linear(torch.ones(4), weight=weight).sum(),
    "data": lambda weight: weight.data.sum(),
    "array": lambda weight: weight.detach().numpy().sum(),
    "copy": lambda weight: copy.deepcopy(weight).sum(),
    "file": lambda weight: pickle.loads(pickle.dumps(weight)).sum(),
    "vector": lambda weight: nn.utils.parameters_to_vector([weight]).sum(),
    "text": lambda weight: hash(repr(weight)),
    "index": lambda weight: weight[1, 2],
    "address": lambda weight: weight.data_ptr() and weight.sum(),
    "version": lambda weight: weight._version and weight.sum(),
    "autograd": lambda weight: Doubled.apply(weight).sum(),
    "mode": lambda weight: in_a_mode(lambda: weight.sum()),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def in_a_mode(read):
    with torch.device("cpu"), torch.no_grad():
        return read()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_reads_a_weight_after_a_step_gets_its_new_value(read):
    """By a reference from before the step, too, and without synchronize()."""
    ours, plain = both(sgd)
    weights = [model[0].weight for model, _ in (ours, plain)]
    kind = type(weights[0])
    for _ in range(3):
        step(*ours)
        step(*plain)
        assert float(read(weights[0])) == float(read(weights[1]))
        assert type(weights[0]) is kind
    assert_same(ours, plain)


def test_what_needs_no_value_waits_for_none(model, optimizer):
    step(model, optimizer)
    weight = model[0].weight
    parameter = optimizer._p3._parameters[weight]
    assert isinstance(weight, nn.Parameter) and weight in set(model.parameters())
    assert weight.shape == (3, 4) and weight.size(0) == len(weight) == 3 and weight.dtype == torch.float32
    assert weight.grad is None and weight.requires_grad and weight.is_leaf and weight.numel() == 12
    model.zero_grad()
    optimizer.zero_grad()
    model.requires_grad_(True)
    assert parameter.is_pending
    weight.sum()
    assert not parameter.is_pending


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 10, bias=False)

    def forward(self, rows):
        return self.head(self.middle(nn.functional.embedding(rows, self.head.weight)))


@pytest.mark.parametrize("compiled", ["", "whole", "middle"])
def test_a_weight_used_before_its_own_module_is_the_new_one(compiled):
    weights = []
    for is_distributed in (True, False):
        torch.manual_seed(1)
        model = Tied()
        if compiled == "middle":
            model.middle = torch.compile(model.middle, backend="eager")
        optimizer = sgd(model)
        if is_distributed:
            p3.torch.DistributedOptimizer(optimizer, model)
        run = torch.compile(model, backend="eager") if compiled == "whole" else model
        for _ in range(4):
            optimizer.zero_grad()
            run(torch.tensor([[1, 2]])).square().sum().backward()
            optimizer.step()
        weights.append(model.state_dict())
    for name, weight in weights[1].items():
        assert torch.equal(weights[0][name], weight), name


def test_the_inner_module_of_a_compiled_one_has_the_new_weights():
    ours, plain = both(sgd)
    whole = torch.compile(small_model(), backend="eager")
    optimizer = p3.torch.DistributedOptimizer(sgd(whole), whole)
    for look in (lambda model: model.state_dict()["0.weight"], lambda model: model(torch.ones(2, 4)),
                 lambda model: model[2](torch.ones(2, 3)), lambda model: copy.deepcopy(model)[0].bias):  # fmt: skip
        step(whole, optimizer)
        step(*plain)
        with torch.no_grad():
            assert torch.equal(look(whole._orig_mod), look(plain[0]))


def test_a_compiled_function_reads_the_new_weights():
    ours, plain = both(sgd)
    norms = [torch.compile(lambda x, w=model[0].weight: (x * w).sum(), backend="eager") for model, _ in (ours, plain)]
    for _ in range(3):
        step(*ours)
        step(*plain)
        assert torch.equal(norms[0](torch.ones(4)), norms[1](torch.ones(4)))
    assert_same(ours, plain)


def test_a_broadcast_after_a_step_keeps_the_step():
    ours, plain = both(lambda model: torch.optim.Adam(model.parameters(), lr=0.1))
    for number in range(4):
        step(*ours)
        step(*plain)
        if number == 1:
            ours[1].broadcast()
        elif number == 2:
            content = {"0.bias": torch.ones(3)}
            for model, _ in (ours, plain):
                model.load_state_dict(content, strict=False)
    ours[1].synchronize()
    assert torch.allclose(ours[0][0].weight, plain[0][0].weight, rtol=1e-6)
    assert ours[1].state_dict()["state"][0]["step"] == 4


def test_weights_are_not_loaded_before_the_step_has_ended(model, optimizer):
    step(model, optimizer)
    optimizer.synchronize()
    content, before = small_model().state_dict(), copy.deepcopy(model.state_dict())
    backward(model)
    with pytest.raises(ValueError, match="gradient of 0.weight is under way.*after step"):
        model.load_state_dict(content)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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


def clamp_all(model):
    for weight in model.parameters():
        weight.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("warm_up", [1, 10])
@pytest.mark.parametrize("write", ["after step", "after synchronize", "through an array", "later"])
def test_a_weight_written_past_torchs_notice_is_an_error(model, optimizer, warm_up, write):
    """As WGAN's clamp is. In the first steps, and at any time where the memory was handed out."""
    if write == "later" and warm_up > 1:
        pytest.skip("found when the parameter has its turn: see below")
    array = model[2].weight.detach().numpy() if write == "through an array" else None
    for _ in range(warm_up):
        step(model, optimizer)
    if write == "after synchronize":
        optimizer.synchronize()
    elif write == "later":
        model(torch.ones(2, 4))
    if write == "through an array":
        model(torch.ones(2, 4))
        array *= 0.5
    else:
        clamp_all(model)
    with pytest.raises(ValueError, match=r"parameter .* was written by the script.*synchronize\(\).*broadcast\(\)"):
        for _ in range(2):
            step(model, optimizer)


def flattened(model):
    """As flatten_parameters() of an LSTM: all weights become parts of one memory."""
    weights = list(model.parameters())
    memory = torch.cat([weight.detach().reshape(-1) for weight in weights])
    for weight, part in zip(weights, memory.split([weight.numel() for weight in weights])):
        weight.data = part.view_as(weight)


def cloned(model):
    for weight in model.parameters():
        weight.data = weight.data.clone()


@pytest.mark.parametrize("move", [flattened, cloned])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adamax])
def test_weights_may_move_in_memory(move, make):
    ours, plain = both(lambda model: make(model.parameters(), lr=0.1))
    for number in range(8):
        for model, optimizer in (ours, plain):
            if number == 5:
                with torch.no_grad():
                    model[0].weight.fill_(torch.nan if make is torch.optim.SGD else 0.5)
                if optimizer is ours[1]:
                    optimizer.broadcast()
            if number % 3 == 0:
                move(model)
            optimizer.zero_grad()
            out = model(torch.ones(2, 4))
            if number % 3 == 1:
                move(model)
            out.square().sum().backward()
            if number % 3 == 2:
                move(model)
            optimizer.step()
    for weight, expected in zip(ours[0].parameters(), plain[0].parameters()):
        assert torch.allclose(weight, expected, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("write", [lambda weight: weight * 2, lambda weight: weight.flip(0)])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adamax])
def test_a_weight_whose_elements_change_as_it_moves_is_an_error(make, write):
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(make(model.parameters(), lr=0.1), model)
    for _ in range(5):  # then not every weight is looked at
        step(model, optimizer)
    model[2].weight.data = write(model[2].weight.data)
    with pytest.raises(ValueError, match="parameter 2.weight was written by the script"):
        step(model, optimizer)


def test_a_weight_that_is_written_again_and_again_is_found_in_its_turn(model, optimizer):
    for _ in range(10):
        step(model, optimizer)
    with pytest.raises(ValueError, match="parameter .* was written by the script"):
        for _ in range(70):
            step(model, optimizer)
            model(torch.ones(2, 4))
            clamp_all(model)


def test_a_gradient_that_is_changed_again_and_again_is_found_in_its_turn(model, optimizer):
    for _ in range(10):
        step(model, optimizer)
    with pytest.raises(ValueError, match="the gradient of .* was changed when it was under way"):
        for _ in range(70):
            optimizer.zero_grad()
            backward(model)
            for weight in model.parameters():
                weight.grad.data.mul_(0.5)
            optimizer.step()


def test_check_finds_a_weight_written_past_torchs_notice(monkeypatch):
    monkeypatch.setenv("P3_CHECK", "1000")
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    for _ in range(10):
        step(model, optimizer)
    model(torch.ones(2, 4))
    model[0].bias.data.add_(1)
    with pytest.raises(ValueError, match="parameter 0.bias was written by the script"):
        step(model, optimizer)


def test_a_moving_average_may_be_tried_out():
    """Its values are put into the weights for an evaluation, and the weights back, all through .data."""
    ours, plain = both(sgd)
    evaluations = ([], [])
    averages = [[torch.zeros_like(weight) for weight in model.parameters()] for model, _ in (ours, plain)]
    for number in range(8):
        for (model, optimizer), average, seen in zip((ours, plain), averages, evaluations):
            step(model, optimizer)
            for kept, weight in zip(average, model.parameters()):
                kept.lerp_(weight.data, 0.5)
            if number % 3 == 2:
                stored = [weight.data.clone() for weight in model.parameters()]
                for kept, weight in zip(average, model.parameters()):
                    weight.data.copy_(kept)
                with torch.no_grad():
                    seen.append(model(torch.ones(2, 4)))
                for kept, weight in zip(stored, model.parameters()):
                    weight.data.copy_(kept)
    assert len(evaluations[0]) == 2 and all(map(torch.equal, *evaluations))
    assert all(map(torch.equal, *averages))
    assert_same(ours, plain)


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


STATEFUL = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("lacking", ["all", "one"])
def test_what_a_loaded_state_lacks_begins_anew(name, lacking):
    """As where a search for a learning rate puts the optimizer back to its beginning."""
    ours, plain = both(STATEFUL[name])
    contents = [(copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())) for model, optimizer in
                (ours, plain)]  # fmt: skip
    assert contents[0][1]["state"].keys() == contents[1][1]["state"].keys()
    for _ in range(2):
        for (model, optimizer), content in zip((ours, plain), contents):
            for _ in range(3):
                step(model, optimizer)
            model.load_state_dict(content[0])
            state = content[1]
            if lacking == "one":
                state = copy.deepcopy(optimizer.state_dict())
                if name == "adagrad":
                    state["state"][1] = copy.deepcopy(content[1]["state"][1])
                else:
                    del state["state"][1]
            optimizer.load_state_dict(copy.deepcopy(state))
            for _ in range(2):
                step(model, optimizer)
    ours[1].synchronize()
    for weight, other in zip(ours[0].parameters(), plain[0].parameters()):
        assert torch.allclose(weight, other, rtol=1e-6)
    states = [optimizer.state_dict()["state"] for _, optimizer in (ours, plain)]
    for number, state in states[1].items():
        for part, value in state.items():
            assert torch.allclose(torch.as_tensor(states[0][number][part]), torch.as_tensor(value), rtol=1e-5), part


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
    refused(r"dgc and sums handed to the workers \(synchronous=True\)", synchronous=True)
    refused(r"dgc and sums handed to the workers \(max_grad_norm is set\)", max_grad_norm=1.0)
    refused(r"dgc and sums handed to the workers \(the servers have no Adamax", torch.optim.Adamax(parameters))
    refused(r"another optimizer on the servers \(torch_adam\)", torch.optim.AdamW(parameters))
    refused("SGD with nesterov=True", torch.optim.SGD(parameters, 0.1, 0.9, nesterov=True))
    refused("SGD with dampening=0.5", torch.optim.SGD(parameters, 0.1, 0.9, dampening=0.5))
    refused("SGD with maximize=True", torch.optim.SGD(parameters, 0.1, 0.9, maximize=True))
    refused("ratio is 2", compression={"ratio": 2})
    refused("'threshold'", compression={"threshold": 0.5})
    taken = torch.optim.SGD(parameters, 0.1, 0.9)
    model(torch.ones(2, parameters[0].shape[1])).sum().backward()
    taken.step()
    taken.zero_grad()
    refused("dgc and an optimizer that has taken steps", taken)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(parameters, 0.1, 0.9), model, compression={"type": "dgc"})
    model(torch.ones(2, parameters[0].shape[1])).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="dgc and files of an optimizer's states"):
        optimizer.load_state_dict(taken.state_dict())


def test_models_and_norms_that_make_no_sense_are_refused(model):
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="takes a torch.nn.Module or several, not a Parameter"):
        p3.torch.DistributedOptimizer(optimizer, model.parameters())
    for norm in (0, -1.0, "1", True, float("nan")):
        with pytest.raises(ValueError, match="max_grad_norm is .* positive number"):
            p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=norm)
    for compression in ("fp8", {"type": "fp8"}, {"type": "2bit"}, {"type": "2bit", "threshold": -1.0}):
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
