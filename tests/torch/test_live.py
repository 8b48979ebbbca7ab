"""Numbers of a param group that change from step to step, with servers that update. One process, beside plain torch's;
two workers, and schedules: test_training.py."""

import copy

import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from p3.torch.rounds.overlapping import OnServers  # noqa: E402
from torch_steps import backward, sgd, small_model, step  # noqa: E402

_flag, _decay = st.booleans(), st.sampled_from([0.0, 0.01, 0.1])
_beta = st.sampled_from([0.0, 0.5, 0.9, 0.99])
_momentum = st.sampled_from([0.0, 0.3, 0.9])
_common = dict(lr=st.sampled_from([0.0, 0.01, 0.1]), weight_decay=_decay, maximize=_flag)
_adam = dict(_common, betas=st.tuples(_beta, _beta), eps=st.sampled_from([1e-4, 1e-2]), amsgrad=_flag)
KINDS = {
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
        dict(_common, momentum=_momentum, dampening=st.sampled_from([0.0, 0.3]), nesterov=_flag),
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-4, amsgrad=True), _adam),
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-4, amsgrad=True), dict(_adam, decoupled_weight_decay=_flag)
    ),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        dict(_common, eps=st.sampled_from([1e-10, 0.1]), lr_decay=st.sampled_from([0.0, 0.5])),
    ),
    "rmsprop": (
        lambda p: torch.optim.RMSprop(p, lr=0.1, eps=1e-2, momentum=0.5, centered=True),
        dict(_common, alpha=st.sampled_from([0.5, 0.9]), eps=st.sampled_from([1e-2, 0.1]), momentum=_momentum,
             centered=_flag),
    ),
}  # fmt: skip


@st.composite
def programs(draw):
    """(kind, changes): of each step, of each group, the fields that it sets."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    some = st.fixed_dictionaries({}, optional=KINDS[kind][1])
    return kind, draw(st.lists(st.tuples(some, some), min_size=2, max_size=5))


def in_two_groups(model, kind):
    first, rest = list(model[0].parameters()), list(model[2].parameters())
    return KINDS[kind][0]([{"params": first}, {"params": rest}])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", [0, 1])
@settings(max_examples=25, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(program=programs())
def test_each_step_goes_by_the_numbers_of_its_groups(staleness, program):
    kind, changes = program
    ours, plain = small_model().double(), small_model().double()
    optimizers = in_two_groups(ours, kind), in_two_groups(plain, kind)
    p3.torch.DistributedOptimizer(optimizers[0], ours, staleness=staleness)
    assert isinstance(optimizers[0]._p3, OnServers)
    for of_groups in [({}, {}), *changes]:  # the first step has what they were made with
        for model, optimizer in zip((ours, plain), optimizers):
            for group, fields in zip(optimizer.param_groups, of_groups):
                group.update(fields)
            optimizer.zero_grad()
            model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        optimizers[0].synchronize()  # with staleness a step may go on with the weights before
    for (name, weight), other in zip(ours.named_parameters(), plain.parameters()):
        torch.testing.assert_close(weight, other, rtol=1e-9, atol=1e-12, msg=name)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for number, state in states[1].items():
        for name, value in state.items():
            torch.testing.assert_close(states[0][number][name], value, rtol=1e-9, atol=1e-12, msg=name)
    optimizers[0].release()


def cycled(model):
    """An optimizer whose momentum is cycled, and its schedule."""
    optimizer = sgd(model)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


def test_a_loaded_state_goes_on_with_the_numbers_it_was_saved_with(model):
    optimizer, schedule = cycled(model)
    p3.torch.DistributedOptimizer(optimizer, model)
    for _ in range(4):
        step(model, optimizer)
        schedule.step()
    saved = copy.deepcopy([one.state_dict() for one in (model, optimizer, schedule)])
    results = []
    for is_distributed in (False, True):
        other = small_model()
        its, schedule = cycled(other)
        other.load_state_dict(saved[0])
        its.load_state_dict(copy.deepcopy(saved[1]))  # its arrays become the optimizer's own
        schedule.load_state_dict(saved[2])
        if is_distributed:
            optimizer.release()
            its = p3.torch.DistributedOptimizer(its, other)
        for _ in range(3):
            step(other, its)
            schedule.step()
        if is_distributed:
            its.synchronize()
        results.append(copy.deepcopy(other.state_dict()))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-7)


def test_a_momentum_changed_under_way_is_an_error_that_names_it(model, optimizer):
    step(model, optimizer)
    backward(model)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="0.weight were changed between .*momentum 0.9 became 0.5.*before backward"):
        optimizer.step()


@pytest.mark.parametrize(
    "make, field, value, missing",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "momentum", 0.9, "momentum_buffer"),
        (lambda p: torch.optim.Adam(p, lr=0.1), "amsgrad", True, "max_exp_avg_sq"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), "centered", True, "grad_avg"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), "momentum", 0.9, "momentum_buffer"),
    ],
)
def test_what_would_need_a_state_that_the_servers_do_not_keep_is_an_error(model, make, field, value, missing):
    optimizer = p3.torch.DistributedOptimizer(make(model.parameters()), model)
    step(model, optimizer)
    optimizer.param_groups[0][field] = value
    with pytest.raises(ValueError, match="%s has become %r .*keep no %s .*synchronous=True" % (field, value, missing)):
        step(model, optimizer)


@pytest.mark.parametrize(
    "make, field, off, on",
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), "amsgrad", False, True),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True), "centered", False, True),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5), "momentum", 0.0, 0.5),
    ],
)
def test_a_first_update_without_a_state_begins_none(make, field, off, on):
    """As in torch, whose next one with it fails then; P3's begins it."""
    models = [torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, plain = (make(model.parameters()) for model in models)
    p3.torch.DistributedOptimizer(ours, models[0])

    def step_of(optimizer, model, layers):
        optimizer.zero_grad()
        sum(model[layer](torch.ones(1, 3)).square().sum() for layer in layers).backward()
        optimizer.step()

    def names(optimizer):
        return [sorted(state) for state in optimizer.state_dict()["state"].values()]

    for layers in ([0], [1], [0, 1]):
        for model, optimizer in zip(models, (ours, plain)):
            step_of(optimizer, model, layers)
            optimizer.param_groups[0][field] = off
    assert names(ours) == names(plain)
    assert len(names(ours)[3]) < len(names(ours)[0])
    saved = copy.deepcopy(plain.state_dict())
    ours.load_state_dict(copy.deepcopy(saved))
    step_of(ours, models[0], [0, 1])
    step_of(plain, models[1], [0, 1])
    assert names(ours) == names(plain)
    for weight, other in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(weight, other)
    ours.param_groups[0][field] = on
    step_of(ours, models[0], [0, 1])
    assert names(ours)[3] == names(ours)[0]
    saved["param_groups"][0][field] = on
    with pytest.raises(ValueError, match="the state of 1.weight has no .*other settings"):
        ours.load_state_dict(saved)


@pytest.mark.parametrize(
    "field, value, said",
    [("betas", (1.5, 0.9), "beta1 is 1.5; it must be"), ("betas", (torch.tensor(0.5), 0.9), "beta1 is a tensor"),
     ("eps", float("nan"), "epsilon is nan"), ("differentiable", True, "keeps the graph")],
)  # fmt: skip
def test_a_number_that_makes_no_sense_is_an_error_before_anything_leaves(model, field, value, said):
    optimizer = p3.torch.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    step(model, optimizer)
    optimizer.param_groups[0][field] = value
    with pytest.raises(ValueError, match=said):
        step(model, optimizer)


def test_with_dgc_the_momentum_stays(model):
    plain = sgd(model)
    optimizer = p3.torch.DistributedOptimizer(plain, model, compression={"type": "dgc", "ratio": 0.5})
    step(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="with dgc the workers apply the momentum.*cycle_momentum=False"):
        step(model, optimizer)


def test_rows_that_a_momentum_would_all_update_are_an_error():
    model = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model)

    def one_step():
        optimizer.zero_grad()
        model(torch.tensor([1, 3])).sum().backward()
        optimizer.step()

    one_step()
    optimizer.param_groups[0].update(eps=0.1)
    one_step()
    optimizer.param_groups[0].update(weight_decay=0.1, eps=0.2)
    with pytest.raises(ValueError, match="more rows than its sparse gradient"):
        one_step()


def test_numbers_may_be_set_behind_a_loaded_state(model):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    step(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["momentum"] = 0.5
    step(model, optimizer)
