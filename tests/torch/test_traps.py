"""What scripts do around an optimizer: right, or an error that names the parameter and the remedy. In one process."""

import contextlib
import copy
import importlib
import itertools
import statistics
import weakref

import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.torch.rounds.updates import Updates  # noqa: E402
from processes import wait_until  # noqa: E402
from torch import nn  # noqa: E402
from torch_steps import backward, sgd, step  # noqa: E402


def test_priorities_follow_the_forward_pass():
    """Not the order in which modules and parameters were made."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(3, 2), nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.last(self.first(x * self.scale))

    model = Backwards()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    step(model, optimizer)
    by_priority = sorted(optimizer._p3._parameters.values(), key=lambda parameter: -parameter.priority)
    assert [one.name for one in by_priority] == ["scale", "first.weight", "first.bias", "last.weight", "last.bias"]


class Ways(nn.Module):
    """Layers that run as `way` says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})
        self.way = "abc"

    def forward(self, x):
        for name in self.way:
            # A capital uses the weight from outside its module.
            weight = self.layers[name.lower()].weight
            x = torch.tanh(nn.functional.linear(x, weight) if name.isupper() else self.layers[name](x))
        return x


@pytest.fixture
def ways():
    model = Ways()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def go(way):
        """One step. The layers in the order of their priorities."""
        model.way = way
        step(model, optimizer)
        by_priority = sorted(optimizer._p3._parameters.values(), key=lambda parameter: -parameter.priority)
        return "".join(one.name.split(".")[1] for one in by_priority)

    go.optimizer, go.model = optimizer, model
    return go


def test_priorities_follow_a_forward_pass_that_has_changed(ways):
    assert [ways(way) for way in ("abc", "abc", "cba", "cba", "cba")] == ["abc", "abc", "abc", "cba", "cba"]
    stats = ways.optimizer.order_stats()
    assert stats == {"orders": 2, "passes": 4, "first": 0.25, "followed": 0.5}


def test_a_layer_that_comes_later_gets_its_place_in_the_order(ways):
    assert [ways(way) for way in ("ac", "ac", "abc", "ac")][2:] == ["abc", "abc"]


def test_what_runs_behind_the_first_gradient_has_a_place_too(ways):
    """As where each of two losses has a backward pass of its own."""
    for _ in range(3):
        ways.optimizer.zero_grad()
        with ways.optimizer.no_sync():
            ways.model.way = "a"
            backward(ways.model)
        ways.model.way = "bc"
        backward(ways.model)
        ways.optimizer.step()
    assert ways("abc") == "abc" and ways.optimizer.order_stats()["orders"] == 1


def test_evaluation_is_no_pass_of_the_order(ways):
    ways("abc")
    for _ in range(5):
        ways.model.eval()
        ways.model.way = "cba"
        with torch.no_grad():
            ways.model(torch.ones(1, 4))
        ways.model.train()
        assert ways("abc") == "abc"
    assert ways.optimizer.order_stats()["followed"] == 1.0


def test_a_layer_is_waited_for_where_it_runs_once_it_has(ways):
    ways("ac")
    waits = ways.optimizer._p3._forward._waits
    assert [one.name for one in waits[ways.model]] == ["layers.b.weight"], "it may be used from anywhere"
    ways("abc")
    waits = ways.optimizer._p3._forward._waits
    assert waits[ways.model] == [] and len(waits[ways.model.layers["b"]]) == 1


def test_a_layer_whose_weight_is_used_from_outside_now_and_then(ways):
    for way in ("aBc", "abc", "aBc", "caB", "ac", "aBc"):
        ways(way)


def test_a_parameter_that_a_step_has_not_touched_sends_nothing(ways):
    from p3.torch.start import job

    def bytes_of(way):
        ways.optimizer.synchronize()
        before = job.current().counters()["bytes_sent"]
        ways(way)
        ways.optimizer.synchronize()
        return job.current().counters()["bytes_sent"] - before

    def usual_bytes_of(way):
        """What has left is counted a moment later, and there may be a heartbeat among it."""
        return statistics.mode(bytes_of(way) for _ in range(9))

    ways("abc")
    assert usual_bytes_of("abc") - usual_bytes_of("b") == 2 * 4 * 4 * 4


def test_it_stays_the_same_object_of_its_class(model):
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(plain, model)
    assert optimizer is plain and isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"


def test_a_parameter_has_one_optimizer_the_last_one_made(model, optimizer):
    other = p3.torch.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    with pytest.raises(RuntimeError, match="another DistributedOptimizer has taken over 0.weight and 1 more of its"):
        optimizer.step()
    step(model, other)


def test_what_cannot_be_trained_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"shape \(7, 7\), is in no module"):
        p3.torch.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(7, 7))], lr=0.1), model)
    model.odd = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="odd has type torch.complex64"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.odd = nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match="odd shares memory"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match="takes a torch.optim.Optimizer, not a Linear"):
        p3.torch.DistributedOptimizer(model[0], model)


@pytest.mark.parametrize("change", ["clip", "zero", "replace"])
def test_a_gradient_changed_under_way_is_an_error(model, optimizer, change):
    step(model, optimizer)
    backward(model)
    gradient = model[2].weight.grad
    if change == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    elif change == "zero":
        gradient.zero_()
    else:
        model[2].weight.grad = gradient.clone()
    with pytest.raises(ValueError, match="gradient of .* was changed when.*max_grad_norm"):
        optimizer.step()


@pytest.mark.parametrize("zero_grad", [lambda m, o: m.zero_grad(set_to_none=False), lambda m, o: o.zero_grad(False)])
def test_gradients_may_be_zeroed_after_a_step(model, optimizer, zero_grad):
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        step(reference, plain)
        backward(model)
        optimizer.step()
        zero_grad(model, optimizer)
    optimizer.synchronize()
    assert torch.equal(model[0].weight, reference[0].weight)


def test_a_copy_of_the_model_zeroes_its_own_gradients(model, optimizer):
    copied = copy.deepcopy(copy.deepcopy(model))
    for one in (model, copied):
        backward(one)
    copied.zero_grad()
    assert copied[0].weight.grad is None and model[0].weight.grad is not None


def test_a_learning_rate_changed_under_way_is_an_error(model, optimizer):
    step(model, optimizer)
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match="learning rate or weight decay of 0.weight was changed.*before backward"):
        optimizer.step()


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_momentum_may_change_from_step_to_step(model, synchronous):
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference)]
    p3.torch.DistributedOptimizer(optimizers[0], model, synchronous=synchronous)
    for one, optimizer in zip((model, reference), optimizers):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        for _ in range(5):
            step(one, optimizer)
            schedule.step()
    assert torch.equal(model[0].weight, reference[0].weight)


def test_a_second_backward_pass_before_the_step_is_an_error(model, optimizer):
    step(model, optimizer)
    backward(model)
    with pytest.raises(RuntimeError, match="computed again after it had been sent.*no_sync"):
        backward(model)


def linear(x, weight):
    return torch.mm(x, weight.t())


@pytest.mark.parametrize("is_last", [True, False])
def test_a_weight_used_in_cpp_before_its_value_has_come_is_an_error(model, optimizer, is_last):
    """There nobody can wait for it."""
    in_cpp = torch.jit.script(linear)
    step(model, optimizer)
    with contextlib.nullcontext() if is_last else optimizer.no_sync():
        with pytest.raises(RuntimeError, match="2.weight was used before.*C\\+\\+.*synchronize"):
            in_cpp(model[0](torch.ones(2, 4)), model[2].weight).sum().backward()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_weight_written_by_the_script_is_an_error(model, optimizer, when):
    step(model, optimizer)
    if when == "after":
        optimizer.synchronize()
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    with pytest.raises(ValueError, match="0.weight was written by the script.*broadcast"):
        step(model, optimizer)


def test_a_weight_may_be_written_and_broadcast(model, optimizer):
    step(model, optimizer)
    optimizer.synchronize()
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    optimizer.broadcast()
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer)
    optimizer.synchronize()
    assert (model[0].weight == 0.25).all()


def test_groups_come_before(model, optimizer):
    with pytest.raises(ValueError, match="add_param_group comes before DistributedOptimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_evaluation_and_state_dict_see_the_new_weights(model, optimizer):
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(2, 4)
    for _ in range(3):
        step(model, optimizer)
        step(reference, plain)
        with torch.no_grad():
            assert torch.equal(model(inputs), reference(inputs))
        step(model, optimizer)
        step(reference, plain)
        assert torch.equal(model[2].state_dict()["weight"], reference[2].weight)  # of a part, too
        assert torch.equal(model.state_dict()["0.weight"], reference[0].weight)
        with torch.inference_mode():
            assert torch.equal(model(inputs), reference(inputs))


def test_a_copy_of_the_model_is_no_part_of_the_job(model, optimizer):
    """A moving average, as torch's AveragedModel keeps it."""
    step(model, optimizer)
    optimizer.synchronize()
    average = torch.optim.swa_utils.AveragedModel(model)
    before = copy.deepcopy(average.module.state_dict())
    step(model, optimizer)
    average(torch.ones(2, 4))
    assert all(torch.equal(value, before[name]) for name, value in average.module.state_dict().items())
    optimizer.synchronize()
    average.update_parameters(model)
    assert not torch.equal(average.module[0].weight, before["0.weight"])


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_parameter_that_has_become_smaller_is_named(model, synchronous):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model, synchronous=synchronous)
    step(model, optimizer)
    optimizer.synchronize()
    optimizer.zero_grad()
    weight = model[0].weight
    weight.data = weight.data[:-1].clone()
    said = "parameter 0.weight was changed from|the gradient of 0.weight is of"
    with pytest.raises(ValueError, match="(%s).* before DistributedOptimizer" % said):
        weight.square().sum().backward()
        optimizer.step()


def test_an_older_graph_notices_that_a_weight_has_changed(model, optimizer):
    step(model, optimizer)
    loss = model(torch.ones(2, 4)).square().sum()
    step(model, optimizer)
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_are_parts_of_one_memory_stay_there():
    memory = torch.ones(20)
    model = nn.Module()
    model.first, model.second = nn.Parameter(memory[:10]), nn.Parameter(memory[10:])
    model.forward = lambda x: (x * model.first + model.second).sum()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((10,), 2.0)).backward()
        optimizer.step()
    optimizer.synchronize()
    assert (memory[:10] == -2).all() and (memory[10:] == -0.5).all()


def test_a_scheduler_that_was_made_before_counts_steps(model, recwarn):
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1)
    optimizer = p3.torch.DistributedOptimizer(plain, model)
    step(model, optimizer)
    schedule.step()
    assert not [one for one in recwarn if "lr_scheduler.step" in str(one.message)]


def test_hooks_of_steps_run_once(model, optimizer):
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    step(model, optimizer)
    assert calls == ["pre", "post"]


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
def test_a_scaler_without_synchronous_is_an_error(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step(model, optimizer)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(ValueError, match="GradScaler must see the mean.*synchronous=True"):
        scaler.step(optimizer)


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
def test_a_scaler_that_the_optimizer_has_not_been_told_of_is_an_error_beside_one_bit(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="grad_scaler and steps that do not wait .* pass synchronous=True"):
        p3.torch.DistributedOptimizer(plain, model, grad_scaler=scaler)
    compression = {"type": "1bit"}
    optimizer = p3.torch.DistributedOptimizer(plain, model, synchronous=True, compression=compression)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    optimizer.synchronize()
    with pytest.raises(ValueError, match="has the scale of the loss, .* Pass grad_scaler=scaler to"):
        scaler.step(optimizer)


def test_a_state_of_other_settings_brings_them(model, optimizer):
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for one, its in ((model, optimizer), (reference, plain)):
        step(one, its)
        content = its.state_dict()
        content["param_groups"][0]["momentum"] = 0.5
        its.load_state_dict(content)
        step(one, its)
        step(one, its)
    assert torch.equal(model[0].weight, reference[0].weight)


def test_a_snapshot_counts_no_update_of_a_parameter_without_gradient(model):
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    optimizer = p3.torch.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    for _ in range(2):
        step(model, optimizer)
    updates = optimizer._p3.own_state()["updates"]
    assert (updates["0.weight"], updates["unused.weight"]) == (2, 0)


def test_a_step_without_gradients_changes_nothing(model, optimizer):
    step(model, optimizer)
    optimizer.synchronize()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].any()


def test_a_gradient_is_given_back_when_its_round_has_landed(model, optimizer):
    """Its memory is the next step's."""
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        memories = [weakref.ref(tensor.grad.untyped_storage()) for tensor in model.parameters()]
        optimizer.step()
        model(torch.ones(1, 4))
        assert sum(memory() is not None for memory in memories) == 0


def test_a_compiled_model_whose_original_p3_has_is_told_of(model, optimizer, caplog):
    torch.compile(model, backend="eager")(torch.ones(1, 4))
    assert "Give DistributedOptimizer what torch.compile() returns" in caplog.text
    compiled = torch.compile(nn.Linear(4, 2), backend="eager")
    p3.torch.DistributedOptimizer(torch.optim.SGD(compiled.parameters(), lr=0.1), compiled)
    caplog.clear()
    compiled(torch.ones(1, 4))
    assert "Give DistributedOptimizer" not in caplog.text


def test_a_closure_that_returns_no_loss():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    p3.torch.DistributedOptimizer(optimizer, model, synchronous=True)
    assert optimizer.step(lambda: backward(model)) is None


class _Runs(torch.utils.data.Dataset):
    """Its workers run a model, as for a teacher's answers or a tokenizer that learns."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(torch.ones(1, 4)).sum()


def test_a_forked_worker_of_a_data_loader_that_runs_the_model():
    """While a round is pending, an error that says why; else the model runs."""
    model = nn.Sequential(nn.Linear(4, 3000), nn.Linear(3000, 3000))  # large enough to be pending for a while
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    step(model, optimizer)
    batches = torch.utils.data.DataLoader(_Runs(model), num_workers=1, timeout=60, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="this process was forked from a worker and is no part of the job"):
        list(batches)
    optimizer.synchronize()
    with torch.no_grad():
        expected = model(torch.ones(1, 4)).sum()
    assert [batch.item() for batch in batches] == [expected.item()] * 2
    step(model, optimizer)
    optimizer.synchronize()


class Counting(torch.optim.Optimizer):
    """Counts its steps in its group, or in itself."""

    def __init__(self, parameters, where):
        super().__init__(parameters, {"lr": 0.1, "steps": 0})
        self.where, self.steps = where, 0

    @torch.no_grad()
    def step(self, closure=None):
        counts = self.param_groups[0] if self.where == "group" else vars(self)
        counts["steps"] += 1
        for tensor in self.param_groups[0]["params"]:
            if tensor.grad is not None:
                tensor.sub_(tensor.grad, alpha=0.1 / counts["steps"])


@pytest.mark.parametrize("where", ["group", "itself"])
def test_an_optimizer_that_counts_its_steps_is_not_independent(model, where):
    optimizer = p3.torch.DistributedOptimizer(Counting(model.parameters(), where), model, independent=True)
    with pytest.raises(ValueError, match=r"step\(\) of Counting has changed 'steps'.*leave out independent=True"):
        for _ in range(2):
            step(model, optimizer)


def test_an_independent_optimizer_updates_each_parameter_when_its_module_needs_it(model):
    class Plain(torch.optim.SGD):
        updates = []

        def step(self, closure=None):
            self.updates.append(sum(len(group["params"]) for group in self.param_groups))
            super().step(closure)

    optimizer = p3.torch.DistributedOptimizer(Plain(model.parameters(), lr=0.1), model, independent=True)
    step(model, optimizer)
    assert Plain.updates == []
    model[0](torch.ones(1, 4))
    assert Plain.updates == [1, 1]
    optimizer.synchronize()
    assert Plain.updates == [1] * 4


@pytest.mark.parametrize("options, sizes", [({}, [4]), ({"foreach": True}, [1, 1])])
def test_updates_whose_gradients_have_come_are_made_in_one_step(model, monkeypatch, options, sizes):
    """And not where torch would compute them in another way then, which workers may do for different ones."""
    module, steps = importlib.import_module("torch.optim.adamax"), []
    adamax = module.adamax

    def counted(parameters, *arguments, **keywords):
        steps.append(len(parameters))
        return adamax(parameters, *arguments, **keywords)

    monkeypatch.setattr(module, "adamax", counted)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.Adamax(model.parameters(), lr=0.1, **options), model)
    step(model, optimizer)
    wait_until(lambda: all(one.has_come for one in optimizer._p3.parameters), "the mean gradients have not come")
    assert steps == []
    model[0](torch.ones(1, 4))
    assert steps == sizes
    optimizer.synchronize()
    assert sum(steps) == 4


@pytest.mark.parametrize("make", [torch.optim.Adamax, torch.optim.NAdam, torch.optim.Rprop, torch.optim.Adafactor])
def test_which_updates_are_made_together_changes_no_bit(make, monkeypatch):
    """All at once, as they come, or each in a step of its own."""

    def trained(may_join):
        monkeypatch.setattr(Updates, "may_join", may_join)
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
        optimizer = p3.torch.DistributedOptimizer(make(model.parameters(), lr=0.1), model, max_grad_norm=0.5)
        for number in range(4):
            optimizer.zero_grad()
            model(torch.full((3, 5), 0.1 + number)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        weights = [one.detach().clone() for one in model.parameters()]
        optimizer.release()
        return weights

    turns = itertools.cycle([True, False, False])
    ways = [lambda *_: True, lambda *_: False, lambda *_: next(turns)]
    one, *others = [trained(way) for way in ways]
    assert all(torch.equal(*pair) for other in others for pair in zip(one, other))


def test_mistakes_are_told_with_what_to_do_instead(model):
    def optimizer():
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"all_reduce\(\) takes a tensor, not a float: torch.tensor"):
        p3.torch.all_reduce(3.0)
    for given in (["int8"], 8):
        with pytest.raises(ValueError, match="must be a name, as 'int8', a dict, .* or None"):
            p3.torch.DistributedOptimizer(optimizer(), model, compression=given)
    made = p3.torch.DistributedOptimizer(optimizer(), model)
    with pytest.raises(ValueError, match="In the middle of a training make a new optimizer with all of them"):
        made.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_what_is_not_independent_is_not_said_to_be(model):
    for make, options, why in (
        (torch.optim.Adamax, {"synchronous": True}, "Adamax.*exclude each other.*Leave out one of the two"),
        (torch.optim.LBFGS, {}, "LBFGS.*exclude each other.*Leave out independent=True"),
    ):
        with pytest.raises(ValueError, match=why):
            p3.torch.DistributedOptimizer(make(model.parameters(), lr=0.1), model, independent=True, **options)


def test_gradients_that_no_backward_pass_has_made_are_averaged_once_in_each_step(model):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model, synchronous=True)
    parameters = list(model.parameters())
    rounds = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad = gradient
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        optimizer.step()
        rounds.append(next(iter(optimizer._p3.parameters))._rounds)
    assert rounds == [1, 2, 3]


def test_zero_grad_of_another_model_leaves_gradients_new():
    models = [torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    p3.torch.DistributedOptimizer(optimizer, models, synchronous=True)
    for number in range(1, 4):
        optimizer.zero_grad()
        models[0](torch.ones(1, 4)).sum().backward()
        models[1].zero_grad()
        optimizer.synchronize()
        optimizer.step()
        assert {one._rounds for one in optimizer._p3.parameters} == {number}


@pytest.mark.parametrize("looks", [lambda one: one.synchronize(), lambda one: one.clip_grad_norm_(1)])
def test_join_is_refused_where_the_script_may_have_changed_mean_gradients(model, looks):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model, synchronous=True)
    step(model, optimizer)
    optimizer.synchronize()  # of no new ones
    backward(model)
    looks(optimizer)
    optimizer.step()
    with pytest.raises(ValueError, match=r"join\(\) and mean gradients that the script sees .*max_grad_norm="):
        optimizer.join()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_write_to_their_weight_in_the_forward_pass_are_refused(kind):
    model = nn.Sequential(kind(10, 3, max_norm=1.0), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=f"module '0' is an {kind.__name__} with max_norm, which writes to its weight"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model[0].weight.requires_grad_(False)
    p3.torch.DistributedOptimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model)


class StepsByOtherMethods(torch.optim.Optimizer):
    """As SAM: an optimizer of its own takes the steps."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def first_step(self):
        self.base.step()

    step = None


@pytest.mark.parametrize("steps", [9, 10])
def test_steps_by_other_methods_are_told_of(steps, caplog):
    model = nn.Linear(4, 1)
    optimizer = p3.torch.DistributedOptimizer(StepsByOtherMethods(model.parameters()), model, synchronous=True)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.first_step()
    optimizer.zero_grad()
    told = [one.getMessage() for one in caplog.records if "step() was never called" in one.getMessage()]
    assert len(told) == (steps == 10)


def test_gradients_that_a_step_follows_are_dropped_without_a_word(caplog):
    model = nn.Linear(4, 1)
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    for _ in range(9):
        backward(model)
        optimizer.zero_grad()
    for _ in range(3):
        step(model, optimizer)
    assert "never called" not in caplog.text
