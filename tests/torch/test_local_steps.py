"""Local steps: jobs against plain implementations of the papers in one process, and what is refused."""

import copy
import re
import sys

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.errors import ConfigError  # noqa: E402
from torch_steps import backward, sgd, small_model, step  # noqa: E402


def script(*arguments):
    return jobs.python("torch_local_steps.py", *arguments)


def run(workers, *arguments, **variables):
    status, output = jobs.run_p3(workers, 2, script(*arguments), **variables)
    assert status == 0, output
    return output


@pytest.mark.parametrize("kind, workers", [("sgd", 2), ("adamw", 3), ("adagrad", 2), ("lbfgs", 2)])
def test_an_exchange_behind_each_step_is_training_on_averaged_weights(kind, workers):
    assert run(workers, "averaged", kind).count("averages") == workers


@pytest.mark.parametrize("kind, every, fragments", [("adamw", 1, 1), ("sgd", 5, 3), ("lbfgs", 4, 2)])
def test_one_worker_is_its_own_optimizer_to_the_bit(kind, every, fragments):
    assert run(1, "alone", kind, every, fragments).count("is alone") == 1


@pytest.mark.parametrize("workers, momentum, nesterov", [(2, 0.9, 1), (4, 0.9, 1), (2, 0.9, 0), (2, 0, 0)])
def test_diloco_is_that_of_the_paper(workers, momentum, nesterov):
    assert run(workers, "follows_diloco", 200, momentum, nesterov).count("follows") == workers


@pytest.mark.parametrize("workers, delay, alpha", [(2, 2, 0.5), (4, 7, 0.25), (2, 0, 0.0), (2, 4, 1.0)])
def test_streaming_diloco_is_that_of_the_paper(workers, delay, alpha):
    assert run(workers, "follows_streaming", 200, delay, alpha).count("follows") == workers


def test_differences_weigh_as_much_as_the_samples_since_a_fragments_last_exchange():
    assert run(2, "follows_streaming", 200, 2, 0.5, "weighed").count("follows") == 2


def test_fragments_and_delays_change_no_sum_of_bytes():
    assert run(2, "counts_bytes", P3_LOCAL_AGGREGATION="0").count("has counted") == 2


@pytest.mark.parametrize("codec, delay", [("none", 0), ("none", 4), ("int4", 4), ("topk", 2)])
@pytest.mark.parametrize("aggregates", ["0", "1"])
def test_all_workers_have_the_same_global_bits(codec, delay, aggregates):
    output = run(3, "has_same_bits", codec, delay, P3_CHECK="1", P3_LOCAL_AGGREGATION=aggregates)
    found = re.findall(r"local (\w+) global (\w+)", output)
    assert len(found) == 3 and len({of_all for _, of_all in found}) == 1, output
    assert len({local for local, _ in found}) == 3, output


@pytest.mark.parametrize("codec, delay", [("none", 0), ("bf16 up", 4)])
def test_a_quorum_of_all_workers_changes_no_bit(codec, delay):
    runs = [run(3, "has_same_bits", codec, delay, *quorum) for quorum in ((), (3, 0), (3, 1e6))]
    bits = [sorted(re.findall(r"local \w+ global \w+", output)) for output in runs]
    assert len(bits[0]) == 3 and bits[0] == bits[1] == bits[2], runs


@pytest.mark.parametrize("codec, delay", [("bf16 up", 0), ("int4 up", 4)])
def test_where_a_quorum_waits_for_all_the_bits_are_those_without(codec, delay):
    runs = [run(3, "has_same_bits", codec, delay, *quorum, P3_LOCAL_AGGREGATION="0")
            for quorum in ((), (1, 1e6), (2, 1e6))]  # fmt: skip
    bits = [sorted(re.findall(r"local \w+ global \w+", output)) for output in runs]
    assert len(bits[0]) == 3 and bits[0] == bits[1] == bits[2], runs


@pytest.mark.parametrize("codec", ["none", "int4 up"])
def test_whoever_meets_has_the_same_bits_whatever_came_when(codec):
    output = run(4, "at_own_speed", codec, 20)
    for meeting, steps in enumerate((41, 82, 123)):
        bits = re.findall(r"meeting %d, step %d: (\w+)" % (meeting, steps), output)
        assert len(bits) == 4 and len(set(bits)) == 1, output


@pytest.mark.parametrize("deaths", [("1:15",), ("3:11", "0:50")])
def test_members_leave_a_job_with_a_quorum_and_the_others_go_on_with_the_same_bits(deaths):
    output = run(4, "at_own_speed", "none", 20, *deaths, P3_ON_WORKER_LOSS="continue")
    for meeting in range(3):
        bits = re.findall(r"meeting %d, step \d+: (\w+)" % meeting, output)
        assert len(bits) >= 4 - len(deaths) and len(set(bits)) == 1, output


@pytest.mark.parametrize("quorum", [(), (1, 0.0)])
def test_what_is_broadcast_is_what_the_script_has_loaded_whatever_is_under_way(quorum):
    assert run(2, "broadcasts_what_it_loads", *quorum).count("has what was loaded") == 2


def test_a_merged_weight_is_the_global_one_to_the_bit():
    assert len(set(re.findall(r"worker \d: (\w+)", run(2, "takes_the_global_weights")))) == 1


def test_buffers_stay_each_workers_own():
    output = run(2, "normalized")
    found = re.findall(r"weights (\w+), statistics (\w+)", output)
    assert len(set(re.findall(r"first (\w+)", output))) == 1
    assert len({weights for weights, _ in found}) == 1 and len({own for _, own in found}) == 2, found


@pytest.mark.parametrize("codec", ["none", "bf16", "weighed", "quorum"])
@pytest.mark.parametrize("saved_at", [0, 4, 8])
def test_a_loaded_state_takes_the_same_steps(codec, saved_at):
    assert run(2, "loads", codec, saved_at).count("goes on") == 2


@pytest.mark.parametrize("codec, die_at", [("none", 9), ("int4", 9), ("int4", 7), ("weighed", 9)])
def test_a_job_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path, codec, die_at):
    whole = run(2, "resumed", tmp_path, codec, 17, 0)
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--restarts", "1"]
    status, output = jobs.run([*launcher, *script("resumed", tmp_path, codec, 17, die_at)], timeout_s=100,
                              P3_SNAPSHOT_DIR=str(tmp_path / "snapshots"), P3_SNAPSHOT_EVERY="4")  # fmt: skip
    assert status == 0, output
    assert "began at %d" % (die_at // 4 * 4) in output
    expected, found = (sorted(re.findall(r"has (\w+ of \w+)", one)) for one in (whole, output))
    assert len(found) == 2 and found == expected


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_job_resumes_with_another_number_of_workers(tmp_path, codec):
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "4"}
    run(2, "resumed", tmp_path, codec, 9, 0, **variables)
    output = run(3, "resumed", tmp_path, codec, 17, 0, **variables)
    assert output.count("began at 8") == 3
    assert len(set(re.findall(r"has (\w+) of", output))) == 1 and len(set(re.findall(r" of (\w{8})", output))) == 3


@pytest.mark.parametrize("codec, share", [("int4", 1 / 14 * 1.01), ("int8", 1 / 254 * 1.01)])
def test_what_all_have_is_as_near_the_exact_weight_as_the_codec_says(codec, share):
    assert run(2, "published", codec, share).count("is near") == 2


@pytest.mark.parametrize("codec, momentum", [("int4", 0.9), ("largest", 0), ("1bit", 0)])
def test_with_a_codec_it_learns_as_much(codec, momentum):
    """What a codec leaves out comes later; with codecs that leave out much, momentum swings about that."""
    assert run(2, "learns", codec, momentum).count("has learned as much") == 2


def test_training_waits_at_the_deadline_and_not_before(tmp_path):
    assert run(2, "waits_at_the_deadline", tmp_path).count("has waited") == 2


@pytest.mark.parametrize("what, told", [
    ("every", "every=5, and on worker 0 4"), ("lr", "outer lr=0.5, and on worker 0 0.75"),
])  # fmt: skip
def test_workers_with_other_options_are_told_so(what, told):
    """And are left as they were: with the former one, and the servers without the new one's keys."""
    output = run(2, "differs", what)
    assert "worker 1 (127.0.0.1): LocalSteps was given %s: give all workers the same" % told in output
    assert "worker 0 (127.0.0.1): LocalSteps has failed on worker 1, as the error there says, and so on all" in output
    assert len(set(re.findall(r"worker \d: (\w+)", output))) == 1


@pytest.mark.parametrize("how, problem", [
    ("plain", "this worker's state is of step 6, and worker 1's the plain optimizer's"),
    ("step", "this worker's state is of step 6, and worker 1's of step 5: load what all workers have saved behind"),
    ("shape", "load_state_dict() has failed on worker 1, as the error there says, and so on all"),
    ("broken", "load_state_dict() has failed on worker 1"),
    ("groups", "load_state_dict() has failed on worker 1"),
])  # fmt: skip
def test_a_state_that_does_not_fit_on_one_worker_is_refused_on_all(how, problem):
    output = run(2, "loads_wrong", how, P3_WAIT_TIMEOUT_S="20")
    assert problem in output and output.count("refused: ") == 2, output
    assert len(set(re.findall(r"worker \d: (\w+)", output))) == 1, output


@pytest.mark.parametrize("workers, nesterov", [(3, 1), (7, 1), (3, 0)])
def test_weights_that_nobody_trains_stay_to_the_bit(workers, nesterov):
    assert run(workers, "untrained", nesterov).count("has not moved") == workers


def test_a_dropped_one_is_there_until_its_parameters_are_taken_over():
    """Whenever the garbage collector comes, on each worker."""
    assert run(2, "dropped", P3_WAIT_TIMEOUT_S="10").count("has gone on") == 2


def test_trainers_of_arrays_beside_it_go_on_when_parameters_are_taken_over():
    assert run(2, "mixed").count("has trained all") == 2


@pytest.mark.parametrize("of", ["take_global", "release", "snapshot"])
def test_workers_that_have_taken_more_steps_than_others_are_told_so(tmp_path, of):
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path), "P3_SNAPSHOT_EVERY": "1"} if of == "snapshot" else {}
    _, output = jobs.run_p3(2, 2, script("uneven", tmp_path, of), **variables)
    for taken, other in ((8, "worker 1 7"), (7, "worker 0 8")):
        assert "%s(): this worker has taken %d steps, and %s." % (of, taken, other) in output, output
    assert "ended, but others still push round 2" in output, output
    assert "or call join() after their last one, if there is a join()." in output, output


def test_who_waits_for_the_weights_of_a_worker_that_has_ended_is_told_about_steps():
    status, output = jobs.run_p3(2, 2, script("ends_early"))
    assert status != 0
    assert "All workers must take the same number of local steps; this one has taken 8" in output, output


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
def test_workers_leave_out_the_same_steps_by_a_sum_of_what_their_scalers_have_found():
    found = re.findall(r"has taken 7 steps, (\w+)", run(2, "scaled"))
    assert len(found) == 2 and len(set(found)) == 1, found


@pytest.mark.parametrize("first", ["LocalSteps", "DistributedOptimizer"])
def test_a_snapshot_of_the_other_optimizer_is_refused_by_name(tmp_path, first):
    then = "DistributedOptimizer" if first == "LocalSteps" else "LocalSteps"
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path), "P3_SNAPSHOT_EVERY": "2"}
    run(1, "saves", first, **variables)
    status, output = jobs.run_p3(1, 2, script("saves", then), **variables)
    assert status != 0 and "number 1 of what the snapshot has is a %s, and here it is a %s" % (first, then) in output


# One worker, in this process


@pytest.fixture
def made():
    """LocalSteps of a small model, with what it is given."""
    made = []

    def make(model, **given):
        made.append(p3.torch.LocalSteps(sgd(model), model, **{"every": 4, **given}))
        return made[-1]

    yield make
    for one in made:
        if hasattr(one, "_p3_local"):
            one.release()


@pytest.mark.parametrize("given, problem", [
    ({"every": 0}, "every is 0; it must be at least 1"),
    ({"every": 2.5}, "every is 2.5; it must be a whole number"),
    ({"every": 2, "fragments": 3}, "fragments is 3 and every is 2: .*take 1 to 2 fragments"),
    ({"fragments": 0}, "fragments is 0"),
    ({"every": 9, "fragments": 3}, "fragments is 3, and the model has 2 layers"),
    ({"delay": 4}, "delay is 4 and every is 4: .*take a delay from 0 to 3"),
    ({"delay": -1}, "delay is -1"),
    ({"alpha": 1.5}, "alpha is 1.5; it must be a number from 0"),
    ({"alpha": "half"}, "alpha is 'half'"),
    ({"outer": {"rate": 1}}, "outer has the field 'rate', .*lr, momentum, nesterov"),
    ({"outer": {"lr": 0}}, "the outer lr is 0; it must be a number above 0"),
    ({"outer": {"momentum": -0.1}}, "the outer momentum is -0.1"),
    ({"outer": {"momentum": 0, "nesterov": True}}, "nesterov is True and its momentum 0"),
    ({"outer": 0.7}, "outer is 0.7; it must be a dict"),
    ({"codec": "int5"}, "codec: .*int5"),
    ({"codec": lambda name, shape: None}, "codec is a function"),
    ({"codec": {"type": "lowrank", "rank": 2}}, "local steps and lowrank exclude each other: .*topk"),
    ({"codec": {"type": "dgc"}}, "local steps and dgc exclude each other: .*topk"),
    ({"staleness": 2}, "local steps and staleness .*exclude each other: .*larger delay"),
    ({"synchronous": True}, "local steps and .*synchronous=True.* exclude each other: .*Leave it out"),
    ({"max_grad_norm": 1.0}, "local steps and .*max_grad_norm=1.0.*clip_grad_norm_"),
    ({"grad_scaler": object()}, "local steps and grad_scaler .*torch's GradScaler"),
    ({"independent": True}, "local steps and .*independent=True"),
    ({"compression": "int8"}, "compression='int8': give it as codec"),
    ({"quorum": 0, "grace": 1}, "quorum is 0; it must be a whole number of workers, at least 1"),
    ({"quorum": 1.5, "grace": 1}, "quorum is 1.5; it must be"),
    ({"quorum": True, "grace": 1}, "quorum is True; it must be"),
    ({"quorum": 2}, "grace is None; with a quorum it must be the seconds"),
    ({"quorum": 2, "grace": -1}, "grace is -1; with"),
    ({"quorum": 2, "grace": float("nan")}, "grace is nan; with"),
    ({"quorum": 2, "grace": float("inf")}, "grace is inf; with"),
    ({"grace": 1}, "grace is 1, and there is no quorum whose end it could put off: give quorum as well"),
    ({"quorum": 2, "grace": 1}, "quorum is 2, and the job has 1 worker: take at most as many"),
    ({"quorum": 1, "grace": 1, "codec": "int8"}, "a quorum .quorum=1. and .*int8.*: .*one way alone"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_do(made, given, problem):
    with pytest.raises(ValueError, match=problem):
        made(small_model(), **given)


def test_an_argument_that_there_is_not_is_a_type_error(made):
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        made(small_model(), evry=3)


def test_it_is_one_optimizer_or_the_other(made):
    model = small_model()
    optimizer = made(model)
    with pytest.raises(ValueError, match="call its release"):
        p3.torch.DistributedOptimizer(optimizer, model)
    with pytest.raises(ValueError, match="distributed already: call its release"):
        p3.torch.LocalSteps(optimizer, model, every=3)
    optimizer.release()
    step(model, optimizer)  # torch's own again
    distributed = p3.torch.DistributedOptimizer(optimizer, model)
    step(model, distributed)
    taken_over = made(model)
    step(model, taken_over)
    with pytest.raises(RuntimeError, match="LocalSteps has taken over"):
        distributed.step()


@pytest.mark.parametrize("wrapper", ["LocalSteps", "DistributedOptimizer"])
def test_who_has_lost_its_parameters_to_another_says_so(made, wrapper):
    model = small_model()
    former = made(model)
    schedule = torch.optim.lr_scheduler.StepLR(former, 1)
    given = {"every": 3} if wrapper == "LocalSteps" else {}
    taker = getattr(p3.torch, wrapper)(sgd(model), model, **given)
    step(model, taker)
    for call in (former.step, former.take_global, former.stats):
        with pytest.raises(RuntimeError, match="this optimizer was released: .*taken over .*call that one's methods"):
            call()
    former.load_state_dict(former.state_dict())  # torch's own
    taker.release()
    former.release()
    assert type(former) is torch.optim.SGD
    step(model, former)
    schedule.step()


@pytest.mark.parametrize("given, problem", [
    ({"fragments": 3}, "fragments is 3"),
    ({"strategy": {"version": 1, "default": {"servers": [1]}}}, "server 1 is named, but the job has 1 server"),
    ({"strategy": {"version": 1, "keys": {"9.weight": {}}}}, "an entry for key '9.weight', but the keys are"),
])  # fmt: skip
def test_a_refused_one_leaves_the_former_as_it_was(made, given, problem):
    model = small_model()
    former = made(model)
    with pytest.raises(ValueError, match=problem):
        p3.torch.LocalSteps(sgd(model), model, every=4, **given)
    step(model, former)
    assert former.stats()["step"] == 1


def test_what_is_no_model_is_refused_with_what_it_takes(made):
    model = small_model()
    with pytest.raises(ValueError, match="LocalSteps takes a torch.nn.Module or several, not a NoneType"):
        p3.torch.LocalSteps(sgd(model), None, every=4)


def test_a_step_counts_once_however_it_is_called(made):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    Own([torch.zeros(1)], lr=0.1)  # torch has wrapped both by now
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    model, calls = small_model(), []
    plain = Own(model.parameters(), lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = p3.torch.LocalSteps(plain, model, every=4)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for number in (1, 2):
        assert optimizer.step(closure).requires_grad
        before.step()
        after.step()
        assert optimizer.stats()["step"] == number
        optimizer.load_state_dict(optimizer.state_dict())  # torch wraps step() again
    optimizer.release()
    optimizer.step(closure)  # plain, by the wrapper that the scheduler has made
    again = p3.torch.LocalSteps(optimizer, model, every=4)
    again.step(closure)
    assert again.stats()["step"] == 1
    again.release()
    hooked = made(small_model())
    hooked.register_step_post_hook(lambda *_: calls.append(1))
    hooked.load_state_dict(hooked.state_dict())
    hooked.step()
    assert len(calls) == 1


def test_a_compiled_step_is_a_step(made):
    model, plain = small_model(), small_model()
    optimizer, reference = made(model, every=2, outer={"lr": 1.0, "momentum": 0.0}), sgd(plain)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(4):
        step(plain, reference)
        backward(model)
        compiled()
        optimizer.zero_grad()
    assert optimizer.stats()["step"] == 4
    for one, two in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(one, two)


def test_nothing_is_lost_within_global_weights(made):
    model = small_model()
    optimizer = made(model)
    state = optimizer.state_dict()
    with optimizer.global_weights():
        for call in (optimizer.step, optimizer.take_global, optimizer.broadcast,
                     lambda: optimizer.load_state_dict(state)):  # fmt: skip
            with pytest.raises(RuntimeError, match="within global_weights.*leave the with block before"):
                call()
    assert optimizer.stats()["step"] == 0
    step(model, optimizer)
    assert optimizer.stats()["step"] == 1


@pytest.mark.parametrize("samples", [-1, float("nan"), "3", True, torch.tensor([1.0, 2.0])])
def test_what_is_no_number_of_samples_is_refused(made, samples):
    optimizer = made(small_model())
    with pytest.raises(ValueError, match="it takes how many samples or tokens"):
        optimizer.weigh(samples)


def test_a_step_is_weighed_once_but_for_one_that_is_left_out(made):
    model = small_model()
    optimizer = made(model, every=2)
    for _ in range(3):  # every other one is due
        optimizer.weigh(3)
        optimizer.zero_grad()
        optimizer.weigh(2)  # the scaler has left out the step
        with pytest.raises(ValueError, match="was called before in this step, and step.. has not ended it"):
            optimizer.weigh(2)
        backward(model)
        optimizer.step()
    assert optimizer._p3_local.own_part("save")["samples"] == [2.0]  # of the step since the last exchange


def test_a_part_of_another_checkpoint_is_refused(made):
    model = small_model()
    optimizer = made(model)
    step(model, optimizer)
    with optimizer.global_weights():  # own weights are in it all the same
        part = copy.deepcopy(optimizer._p3_local.own_part("save"))
    own = [one.detach().clone() for one in model.parameters()]
    optimizer.take_global()
    optimizer._p3_local.take_own_part(lambda: part, "load")
    assert all(map(torch.equal, own, model.parameters()))
    step(model, optimizer)
    with pytest.raises(ValueError, match="load: this worker's part is of step 1, and the rest of step 2"):
        optimizer._p3_local.take_own_part(lambda: part, "load")


def test_a_model_that_was_changed_behind_it_is_an_error_that_names_the_parameter(made):
    model = small_model()
    optimizer = made(model)
    model.double()
    with pytest.raises(RuntimeError, match="parameter 0.weight is torch.float64 .*was torch.float32"):
        optimizer.step()
    model.float()
    optimizer.step()
    model.load_state_dict(small_model().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="parameter 0.weight of the model is another tensor .*assign=False"):
        optimizer.step()


def test_factors_are_refused(made):
    model = p3.torch.factors(small_model())
    with pytest.raises(ValueError, match="local steps and factors exclude each other"):
        made(model)


def test_it_is_the_same_object_and_class_to_schedulers_and_copies(made):
    model = small_model()
    plain = sgd(model)
    optimizer = p3.torch.LocalSteps(plain, model, every=2)
    try:
        assert optimizer is plain and isinstance(optimizer, torch.optim.SGD)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        step(model, optimizer)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.05 and optimizer.stats()["step"] == 1
        with pytest.raises(Exception, match="save its state_dict"):
            __import__("copy").deepcopy(optimizer)
        with pytest.raises(ValueError, match="add_param_group comes before LocalSteps"):
            optimizer.add_param_group({"params": []})
    finally:
        optimizer.release()
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
def test_a_step_that_a_scaler_leaves_out_is_none(made):
    """Of one worker whose outer step has a rate of 1: as the plain optimizer, to the bit."""
    model, plain = small_model(), small_model()
    optimizer, reference = made(model, every=2, outer={"lr": 1.0, "momentum": 0.0}), sgd(plain)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for number in range(6):
        for one, its, scaler in ((model, optimizer, scalers[0]), (plain, reference, scalers[1])):
            its.zero_grad()
            loss = one(torch.ones(2, 4)).square().sum() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(its)
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            scaler.step(its)
            scaler.update()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters()))
    assert optimizer.stats()["step"] == 5 and scalers[0].get_scale() == 512


@pytest.mark.parametrize("name, value, problem", [
    ("P3_CHECK", "1", "a quorum .quorum=1. and .*P3_CHECK.* exclude each other: .*Unset P3_CHECK"),
    ("P3_SNAPSHOT_DIR", "/nowhere", "a quorum .quorum=1. and snapshots .* exclude each other: .*save state_dict"),
])  # fmt: skip
def test_what_does_not_go_with_a_quorum_is_refused_by_name(made, monkeypatch, name, value, problem):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem):
        made(small_model(), quorum=1, grace=0)


def test_half_precision_has_a_global_value_of_float32(made):
    model = small_model().to(torch.bfloat16)
    optimizer = made(model, every=1, outer={"lr": 1 / 1024, "momentum": 0})
    first = {name: one.float() for name, one in model.state_dict().items()}
    model(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    values = optimizer.state_dict()["local_steps"]["global"]
    assert all(values[name].dtype == torch.float32 for name in first)
    for name, one in model.named_parameters():
        assert torch.equal(one, values[name].to(torch.bfloat16))
    unseen = [(values[name] != first[name]) & (one == first[name]) for name, one in model.named_parameters()]
    assert any(one.any() for one in unseen)  # steps of less than a bfloat16 can show


def test_a_plain_optimizers_state_leaves_the_global_one(made):
    model = small_model()
    optimizer = made(model, every=2)
    for _ in range(3):
        step(model, optimizer)
    plain = sgd(small_model())
    optimizer.load_state_dict(plain.state_dict())
    assert not optimizer.state_dict()["state"] and optimizer.stats()["step"] == 3


def test_a_state_of_another_model_is_refused(made):
    optimizer, other = made(small_model()), torch.nn.Sequential(torch.nn.Linear(4, 3))
    content = {**optimizer.state_dict(), "local_steps": made(other).state_dict()["local_steps"]}
    with pytest.raises(ValueError, match="of another model: 2.bias is in one of them only"):
        optimizer.load_state_dict(content)


def test_a_state_of_other_shapes_is_refused_before_anything_is_loaded(made):
    model = small_model()
    optimizer = made(model)
    step(model, optimizer)
    before, content = optimizer.state_dict(), optimizer.state_dict()
    content["local_steps"]["global"]["0.bias"] = torch.zeros(7)
    content["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ValueError, match=r"of another model: there 0.bias has the shape \(7,\), here"):
        optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["lr"] == before["param_groups"][0]["lr"] != 5.0


def test_weights_that_the_script_loads_become_global_ones_by_broadcast(made):
    model = small_model()
    optimizer = made(model)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    optimizer.broadcast()
    assert (optimizer.state_dict()["local_steps"]["global"]["0.weight"] == 2).all()
    backward(model)


def test_release_within_global_weights_is_refused(made):
    """Behind the block the parameters become this worker's own again, whoever trains them by then."""
    model = small_model()
    optimizer = made(model)
    step(model, optimizer)
    with optimizer.global_weights():
        with pytest.raises(RuntimeError, match="release\\(\\) within global_weights"):
            optimizer.release()
        with pytest.raises(RuntimeError, match="within global_weights"):
            p3.torch.DistributedOptimizer(sgd(model), model)
    optimizer.release()
