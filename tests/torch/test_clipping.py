"""Clipping by the global norm of the mean gradients, and GradScaler, with steps that wait for nothing."""

import copy
import math
import re

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.torch.rounds.clipping import Clipping  # noqa: E402
from p3.torch.rounds.synchronous import Synchronous  # noqa: E402

SLICES = {"P3_SLICE_ELEMENTS": "20"}  # so that each server has several of most keys


def script(*arguments):
    return jobs.python("torch_clipping.py", *arguments)


def endings(output):
    """What each worker ends with, by what it has trained with."""
    found = {}
    for kind, digest in re.findall(r"worker \d: (\w+) ends with (\w+)", output):
        found.setdefault(kind, []).append(digest)
    return found


@pytest.mark.parametrize("workers, servers, more", [
    (2, 3, {}), (3, 2, {"P3_LOCAL_AGGREGATION": "0", "P3_SERVER_THREADS": "2", "P3_CHECK": "2"}),
    (3, 2, {"P3_LOCAL_AGGREGATION": "0", "P3_GROUPS": "2"}),
])  # fmt: skip
def test_every_optimizer_is_as_in_plain_torch_and_two_runs_have_the_same_bits(workers, servers, more):
    runs = []
    for staged in ([], ["--staged"]):
        status, output = jobs.run_p3(workers, servers, script(*staged, "every_optimizer"), **SLICES, **more)
        assert status == 0, output
        runs.append(endings(output))
    assert runs[0] == runs[1] and len(runs[0]) == 12
    assert all(len(set(digests)) == 1 and len(digests) == workers for digests in runs[0].values()), runs[0]


@pytest.mark.parametrize("name, said, workers", [
    ("told", "was told of every norm", 2),
    ("not_finite", "left out what was not finite", 2),
    ("accumulated", "clipped what was added up", 2),
    ("uneven", "follows", 3),
    ("options", "clipped all of them", 2),
    ("scaled", "scales as torch does", 2),
    ("one_looks", "looked alone", 2),
    ("others_use", "saw what others use", 2),
    ("others_use_and_wait", "saw what others use", 2),
    ("leave_out", "left out alike", 2),
    ("leave_out_and_wait", "left out alike", 3),
])  # fmt: skip
def test_what_scripts_do_with_it_is_as_in_plain_torch(name, said, workers):
    checks = {} if name == "not_finite" else {"P3_CHECK": "1"}  # which would wait for the norm within step()
    status, output = jobs.run_p3(workers, 2, script(name), **SLICES, **checks)
    assert status == 0, output
    assert output.count(said) == workers
    assert all(len(set(digests)) == 1 for digests in endings(output).values())


@pytest.mark.parametrize("name", ["never_waits", "frozen_and_scaled"])
def test_no_call_waits_for_the_network(name):
    status, output = jobs.run_p3(1, 1, script(name))
    assert status == 0, output
    assert "the step returned while the server was frozen" in output


@pytest.mark.parametrize("name, said", [
    ("differing", r"\(lr 0\.\d, wd 1, .*disagree in round 1 of key 'clipping'. All workers must .* norm to clip by"),
    ("leave_out_alone", r"zero_grad\(\) has left out other steps here .*: [01] here before one step, 1 on all 2 "),
    ("leave_out_alone_and_wait", r"zero_grad\(\) has left out other .*: [01] here before one step, 1 on all 2 "),
    ("kept_and_scaled", "keeps what it leaves out and p3.torch.GradScaler exclude each other.*Pass synchronous=True"),
])  # fmt: skip
def test_what_cannot_be_is_refused_on_all_workers(name, said):
    status, output = jobs.run_p3(2, 2, script(name))
    assert status != 0
    assert re.search(said, output), output


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adamax"])  # the servers update by one of them
def test_a_worker_that_clips_alone_is_named(rank, optimizer):
    status, output = jobs.run_p3(2, 1, script("on_one_alone", rank, optimizer), P3_WAIT_TIMEOUT_S="600")
    assert status != 0
    said = ("asked for", "not set") if rank == "0" else ("not set", "asked for")
    problem = (r"worker 0 \(.*\) and worker 1 \(.*\) disagree about the norm to clip the gradients of store \d+ by, .*"
               "it is %s on the first and %s on the second" % said)  # fmt: skip
    assert re.search(problem, output), output


def test_with_rows_whose_partitions_are_searched_none_moves():
    status, output = jobs.run_p3(2, 2, script("options"), **SLICES, P3_PARTITIONS="auto")
    assert status == 0, output


# One worker, in this process


def made(make=torch.optim.AdamW, **options):
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)
    return model, p3.torch.DistributedOptimizer(optimizer, model, **options)


def backward(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("make, options, kind", [
    (torch.optim.AdamW, {"max_grad_norm": 1.0}, Clipping),
    (torch.optim.AdamW, {"max_grad_norm": math.inf}, Clipping),
    (torch.optim.AdamW, {"grad_scaler": p3.torch.GradScaler("cpu")}, Clipping),
    (torch.optim.AdamW, {"max_grad_norm": 1.0, "synchronous": True}, Synchronous),
    (torch.optim.LBFGS, {"max_grad_norm": 1.0}, Synchronous),
])  # fmt: skip
def test_only_where_all_parameters_update_at_once_does_clipping_wait(make, options, kind):
    _, optimizer = made(make, **options)
    assert type(optimizer._p3) is kind
    optimizer.release()


def test_a_layer_with_factors_clips_where_all_gradients_are():
    model = p3.torch.factors(torch.nn.Linear(3, 2), batch_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=1.0)
    assert type(optimizer._p3) is Synchronous
    optimizer.release()


@pytest.mark.parametrize("make, options", [
    (torch.optim.AdamW, {}), (torch.optim.AdamW, {"staleness": 1}), (torch.optim.Adamax, {}),
])  # fmt: skip
def test_who_has_not_said_that_gradients_are_clipped_hears_how(make, options):
    model, optimizer = made(make, **options)
    backward(model, optimizer)
    with pytest.raises(ValueError, match="to clip by the global norm, pass max_grad_norm to DistributedOptimizer"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.release()


@pytest.mark.parametrize("arguments, problem", [
    ((0.0,), "max_norm is 0.0; it must be a positive number"),
    ((math.nan,), "max_norm is nan"),
    (("1",), "max_norm is '1'"),
    ((1.0, 1.0), "norm_type is 1.0; the servers tell norms of type 2 and inf"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_and_leaves_the_step_as_it_was(arguments, problem):
    model, optimizer = made(max_grad_norm=math.inf)
    before = model.weight.detach().clone()
    backward(model, optimizer)
    with pytest.raises(ValueError, match=problem):
        optimizer.clip_grad_norm_(*arguments)
    optimizer.step()
    optimizer.synchronize()
    assert not model.weight.equal(before)
    optimizer.release()


def test_torchs_grad_scaler_is_told_of_p3s():
    model, optimizer = made(max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(ValueError, match="use p3.torch.GradScaler, or pass synchronous=True"):
        scaler.step(optimizer)
    optimizer.step()
    optimizer.release()


def test_clipping_twice_is_clipping_by_the_smaller_norm_and_by_one_type():
    model, optimizer = made(torch.optim.SGD, max_grad_norm=1.0)
    before = model.weight.detach().clone()
    backward(model, optimizer)
    for norm in (math.inf, 2.0):  # to see the norm, as it would be
        assert optimizer.clip_grad_norm_(norm).item() == pytest.approx(math.sqrt(8))
    with pytest.raises(ValueError, match="clipped by a norm of type 2.0 already, by max_grad_norm or a call before"):
        optimizer.clip_grad_norm_(1.0, math.inf)
    optimizer.step()
    optimizer.synchronize()
    assert (before - model.weight).norm().item() == pytest.approx(0.1 * math.sqrt(6 / 8), rel=1e-5)
    optimizer.release()


def test_a_step_that_clipping_has_ended_says_what_comes_next():
    model, optimizer = made(max_grad_norm=1.0)
    backward(model, optimizer)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="behind clip_grad_norm_.*call step.. before the next backward pass"):
        backward(model, optimizer)
    optimizer.release()


def test_a_step_that_is_clipped_may_be_broken_off_by_release():
    model, optimizer = made(max_grad_norm=1.0)
    before = model.weight.detach().clone()
    for clips in (False, True):
        backward(model, optimizer)
        if clips:
            optimizer.clip_grad_norm_(1.0)
        optimizer.release()
        assert model.weight.equal(before)
        optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=1.0)
    optimizer.release()


def test_a_scaler_and_join_exclude_each_other():
    scaler = p3.torch.GradScaler("cpu")
    model, optimizer = made(grad_scaler=scaler)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ValueError, match=r"join\(\) and p3.torch.GradScaler exclude each other"):
        optimizer.join()
    optimizer.release()


def test_a_norm_can_be_read_when_training_is_over():
    model, optimizer = made(max_grad_norm=1.0)
    backward(model, optimizer)
    norm = optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.release()
    assert norm.item() == pytest.approx(math.sqrt(8))


def test_states_and_weights_resume_under_plain_torch():
    model, optimizer = made(max_grad_norm=0.5)
    plain = torch.nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(6):
        if step == 3:
            reference.load_state_dict(optimizer.state_dict())
            plain.load_state_dict(model.state_dict())
        backward(model, optimizer)
        optimizer.step()
        backward(plain, reference)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
    optimizer.release()
    assert torch.allclose(model.weight, plain.weight, atol=1e-6)


def test_a_parameter_may_have_the_name_of_a_norm():
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.norm = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return super().forward(x) * self.norm

    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=1.0)
    backward(model, optimizer)
    optimizer.step()
    optimizer.synchronize()
    assert not model.norm.equal(torch.ones(2))
    optimizer.release()


# As trainers have it (p3/trainers/gradients.py)


def made_of_two():
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    optimizer = torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, models, max_grad_norm=math.inf)
    optimizer._p3.act_as_ddp()
    sum(model(torch.ones(1, 3)).sum() for model in models).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer._p3.watch_gradients()
    return models, optimizer, [model.weight.detach().clone() for model in models]


def changes(models, optimizer, before):
    optimizer.step()
    optimizer.synchronize()
    return [(then - model.weight).norm().item() for model, then in zip(models, before)]


def test_a_step_that_zero_grad_leaves_out_changes_nothing_and_the_next_one_does():
    models, optimizer, before = made_of_two()
    optimizer.zero_grad()
    assert changes(models, optimizer, before) == [0, 0]
    sum(model(torch.ones(1, 3)).sum() for model in models).backward()
    optimizer.clip_grad_norm_(1.0)
    assert changes(models, optimizer, before) == pytest.approx([0.1 * math.sqrt(6 / 16)] * 2, rel=1e-5)
    optimizer.release()


def test_zero_grad_of_one_model_leaves_out_that_one():
    models, optimizer, before = made_of_two()
    models[0].zero_grad()
    assert changes(models, optimizer, before) == pytest.approx([0, 0.1 * math.sqrt(6 / 16)], rel=1e-5)
    optimizer.release()


def test_a_watched_gradient_is_shown_to_who_looks_and_copies_are_watched_by_nobody():
    models, optimizer, before = made_of_two()
    copied = copy.deepcopy(models[0])
    assert type(copied.weight) is torch.nn.Parameter and copied.weight.grad is None
    assert type(models[0].weight) is not torch.nn.Parameter, "watched"
    assert models[0].weight.grad.norm().item() == pytest.approx(math.sqrt(6 / 16), rel=1e-5), "clipped"
    assert type(models[0].weight) is torch.nn.Parameter, "watched no more"
    assert changes(models, optimizer, before) == pytest.approx([0.1 * math.sqrt(6 / 16)] * 2, rel=1e-5)
    optimizer.release()


def trained_as_ddp(**numbers):
    """Behind its first step, so that gradients leave in the backward pass."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **numbers)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=math.inf)
    optimizer._p3.act_as_ddp()
    backward(model, optimizer)
    optimizer.step()
    return model, optimizer


def test_who_uses_a_watched_weight_and_one_under_way_gets_the_new_value_of_that():
    (watched, one), (stepped, other) = trained_as_ddp(), trained_as_ddp()
    other.synchronize()
    before = stepped.weight.detach().clone()
    for model, optimizer in ((watched, one), (stepped, other)):
        backward(model, optimizer)
    one._p3.watch_gradients()
    other.step()
    with torch.no_grad():
        found = torch.stack([watched.weight, stepped.weight])
    assert torch.allclose(found[1], before - 0.1) and stepped.weight.equal(found[1])
    one.step()
    one.release(), other.release()


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_gradient_may_be_read_in_inference_mode(max_norm):
    model, optimizer = trained_as_ddp()
    optimizer.synchronize()
    before = model.weight.detach().clone()
    backward(model, optimizer)
    if max_norm is not None:
        optimizer.clip_grad_norm_(max_norm)
    optimizer._p3.watch_gradients()
    expected = 1.0 if max_norm is None else max_norm / math.sqrt(8)
    with torch.inference_mode():
        assert torch.allclose(model.weight.grad, torch.full((2, 3), expected))
    optimizer.step()
    optimizer.synchronize()
    assert torch.allclose(before - model.weight, torch.full((2, 3), 0.1 * expected))
    optimizer.release()


def test_zero_grad_leaves_out_a_step_that_nobody_has_clipped_or_looked_at():
    model, optimizer = trained_as_ddp(momentum=0.9)
    optimizer.synchronize()
    before = model.weight.detach().clone()
    backward(model, optimizer)
    optimizer.zero_grad()
    assert model.weight.equal(before) and model.weight.grad is None
    backward(model, optimizer)
    optimizer.step()
    optimizer.synchronize()
    assert torch.allclose(before - model.weight, torch.full((2, 3), 0.1 * 1.9)), "one step, after another one"
    optimizer.release()


@pytest.mark.parametrize("looks, problem", [
    (True, r"read or clipped before its last backward pass: .*no_sync\(\)"),
    (False, r"all but the last backward pass.*no_sync\(\).*call zero_grad\(\) on every worker"),
])  # fmt: skip
def test_a_second_backward_pass_hears_what_a_script_of_a_trainer_can_do(looks, problem):
    model, optimizer = trained_as_ddp()
    backward(model, optimizer)
    optimizer._p3.watch_gradients()
    if looks:
        assert model.weight.grad is not None
    with pytest.raises(RuntimeError, match=problem) as raised:
        model(torch.ones(1, 3)).sum().backward()
    assert "synchronous" not in str(raised.value)
    optimizer.release()


def test_gradients_that_could_not_be_shown_are_still_watched():
    model, optimizer = trained_as_ddp()
    backward(model, optimizer)
    optimizer.param_groups.append(dict(optimizer.param_groups[0], params=[torch.nn.Parameter(torch.ones(1))]))
    optimizer._p3.watch_gradients()
    for _ in range(2):
        with pytest.raises(ValueError):
            model.weight.grad
    optimizer.param_groups.pop()
    assert model.weight.grad.eq(1).all()
    assert type(model.weight) is torch.nn.Parameter
    optimizer.step()
    optimizer.release()
