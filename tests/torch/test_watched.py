"""Between backward() and step(), as trainers have it: parameters whose gradients are watched, and what scripts do with
them then (p3/torch/parameters/watched.py)."""

import copy
import io
import math
import pickle

import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from torch import nn  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def distributed(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=math.inf, **options)
    optimizer._p3.act_as_ddp()
    return optimizer


def backward(model, optimizer, x=1.0):
    model(torch.full((2, 3), x)).square().sum().backward()
    optimizer._p3.watch_gradients()


def is_watched(parameter):
    return type(parameter) is not nn.Parameter


# Compiled models


def whole(model, compiler):
    return torch.compile(model, fullgraph=True, **compiler)


def in_place(model, compiler):
    model.compile(fullgraph=True, **compiler)
    return model


def by_layers(model, compiler):
    model.first = torch.compile(model.first, fullgraph=True, **compiler)
    model.second = torch.compile(model.second, fullgraph=True, **compiler)
    return model


@pytest.mark.parametrize("compiled", [whole, in_place, by_layers, None])
def test_a_compiled_model_may_run_between_two_backward_passes(compiled):
    graphs, made = [], 0
    torch.compiler.reset()
    compiler = {"backend": lambda graph, _inputs: graphs.append(graph) or graph.forward}
    plain, model = Net(), Net()
    if compiled is not None:
        model = compiled(model, compiler)
    optimizer, reference = distributed(model), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    if compiled is None:  # of whose compiling P3 knows nothing
        run, at_most = torch.compile(model, **compiler), 9  # around each wait, and once more for watched parameters
    else:
        run, at_most = model, 4 if compiled is by_layers else 2  # to train, and to evaluate
    for step in range(5):
        for x in (0.1 * step, 0.3 * step + 1):
            plain(torch.full((2, 3), x)).square().sum().backward()
            backward(run, optimizer, x)
        if step % 2:
            with torch.no_grad():
                run(torch.ones(2, 3))
            for one, expected in zip(model.parameters(), plain.parameters()):
                assert torch.allclose(one.grad, expected.grad, atol=1e-6)
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
        if step == 1:
            made = len(graphs)
        assert 0 < len(graphs) <= at_most and (step < 2 or len(graphs) == made), step
    optimizer.synchronize()
    for one, expected in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(one, expected, atol=1e-6)
    optimizer.release()


@pytest.mark.parametrize("compiled", [whole, in_place])
def test_behind_compiled_code_gradients_are_watched_again_also_if_it_fails(compiled):
    model = compiled(Net(), {"backend": "eager"})
    optimizer = distributed(model)
    backward(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert all(map(is_watched, model.parameters()))
    with pytest.raises(Exception, match="same reduction dim"):
        model(torch.ones(2, 5))
    assert all(map(is_watched, model.parameters()))
    optimizer.step()
    optimizer.synchronize()
    assert not any(map(is_watched, model.parameters()))
    optimizer.release()


# Copies


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), saved,
                                    lambda value: {name: copy.copy(one) for name, one in value.items()}])  # fmt: skip
@pytest.mark.parametrize("when", ["watched", "before", "behind"])
def test_a_copy_of_a_parameter_is_a_plain_one(copied, when):
    """Of one that is watched, and of one that is watched while its last value is still under way."""
    model = Net()
    optimizer = distributed(model)
    if when != "before":
        backward(model, optimizer)
        optimizer.step()
        model.first(torch.ones(2, 3)).sum().backward()
    if when == "watched":
        optimizer._p3.watch_gradients()
    if when == "behind":
        optimizer.step()
    parameters = dict(model.named_parameters())
    assert when == "before" or any(map(is_watched, parameters.values()))
    copies = copied(parameters)
    optimizer.synchronize() if when != "watched" else None
    assert copies.keys() == parameters.keys()
    for name, one in copies.items():
        assert type(one) is nn.Parameter and one.requires_grad and one.grad is None and not vars(one)
        assert torch.equal(one, parameters[name])
    if when == "watched":
        assert all(map(is_watched, parameters.values())), "still"
        assert model.first.weight.grad is not None and model.second.weight.grad is None
    if when != "before":
        optimizer.step()
    optimizer.release()


# A step that is left out


@pytest.mark.parametrize("options", [{}, {"synchronous": True}])
def test_behind_zero_grad_nothing_is_watched_and_the_next_pass_begins_the_step(options):
    model = Net()
    optimizer = distributed(model, **options)
    for step in range(3):  # in the first one nothing has left before step()
        optimizer.synchronize() if not options else None
        before = model.first.weight.detach().clone()
        backward(model, optimizer)
        optimizer.zero_grad()
        assert not any(map(is_watched, model.parameters())) and model.first.weight.grad is None
        assert torch.equal(model.first.weight, before), step
        backward(model, optimizer)
        optimizer.step()
        assert not torch.equal(model.first.weight, before), step
        optimizer.zero_grad()
    optimizer.release()


# Errors, for who has no DistributedOptimizer


IN_TRAINER = r"Read it as parameter\.grad behind backward\(\).*max_grad_norm=.*clip_grad_norm_\(\).*gradient_clip_val="


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("options", [{}, {"synchronous": True}])
def test_a_gradient_changed_too_early_is_told_where_it_can_be_changed(options, steps):
    """In the first step it is this worker's alone, and in others under way."""
    model, kept = Net(), []
    optimizer = distributed(model, **options)
    model.first.weight.register_post_accumulate_grad_hook(lambda weight: kept.append(weight.grad))
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    backward(model, optimizer)
    kept[-1].mul_(2)
    with pytest.raises(ValueError, match=IN_TRAINER) as raised:
        optimizer.step()
    assert "synchroni" not in str(raised.value)
    optimizer.release()


@pytest.mark.parametrize("looks", [False, True])
def test_of_a_step_that_is_refused_no_weight_changes(looks):
    model, kept = Net(), []
    optimizer = distributed(model)
    backward(model, optimizer)
    optimizer.step()
    optimizer.synchronize()
    before = [one.detach().clone() for one in model.parameters()]
    model.second.bias.register_post_accumulate_grad_hook(lambda bias: kept.append(bias.grad))
    backward(model, optimizer)
    if looks:
        model.first.weight.grad.mul_(3)
    kept[-1].mul_(2)
    with pytest.raises(ValueError, match="gradient of second.bias was changed when it was under way"):
        optimizer.step()
    optimizer.release()
    assert all(map(torch.equal, before, model.parameters()))


def test_who_needs_the_weights_of_a_step_under_way_is_told_when_to_come():
    model = Net()
    optimizer = distributed(model)
    backward(model, optimizer)
    optimizer.step()
    backward(model, optimizer)
    with pytest.raises(ValueError, match="behind the optimizer's step.*on_step_end.*on_train_batch_end") as raised:
        optimizer.state_dict()
    assert "synchroni" not in str(raised.value)
    optimizer.step()
    optimizer.state_dict()
    optimizer.release()


def test_who_writes_to_the_memory_of_a_weight_under_way_is_told_to_write_to_the_weight():
    model = Net()
    optimizer = distributed(model)
    alias = model.first.weight.detach()
    backward(model, optimizer)
    optimizer.step()
    alias.mul_(2)
    with pytest.raises(ValueError, match="Write to the parameter itself, which waits for its value") as raised:
        model(torch.ones(2, 3))
    assert "synchroni" not in str(raised.value)
