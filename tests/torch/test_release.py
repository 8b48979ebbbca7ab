"""optimizer.release(): the end of one training, and the beginning of the next on the same model."""

import re
import sys

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import forked  # noqa: E402
import p3.torch  # noqa: E402
from processes import write_script  # noqa: E402
from torch_steps import backward, sgd, small_model, step  # noqa: E402


def script(*arguments):
    return jobs.python("torch_release.py", *arguments)


@pytest.mark.parametrize("releases, aggregates", [(1, "1"), (0, "0")])
def test_ten_trials_on_one_model_are_each_as_plain_torch_and_leave_nothing_on_the_servers(releases, aggregates):
    status, output = jobs.run_p3(2, 2, script("trials", releases), P3_LOCAL_AGGREGATION=aggregates)
    assert status == 0, output
    assert output.count("all trials are as plain torch") == 2


def test_keys_of_every_kind_go():
    status, output = jobs.run_p3(2, 2, script("kinds"))
    assert status == 0, output
    assert output.count("nothing is left of any kind") == 2


@pytest.mark.parametrize(
    "how, text",
    [
        ("waits", r"worker 0 \(127.0.0.1\): waited 2 s for worker 1 \(127.0.0.1\) to release store \d as well"),
        ("joins", r"worker 0 \(127.0.0.1\): waited 2 s for worker 1 \(127.0.0.1\) to release store \d as well"),
        ("leaves", r"worker 1 \(127.0.0.1\) left the job while worker 0 .* waits for all workers to release store"),
        ("dies", r"lost worker 1 \(127.0.0.1\)|worker 1 \(127.0.0.1\) closed its control connection"),
    ],
)
def test_a_worker_that_does_not_release_is_named_and_nobody_waits_for_ever(how, text):
    status, output = jobs.run_p3(2, 1, script("missing", how))
    assert status != 0 and re.search(text, output) and "nobody was missed" not in output, output


@pytest.mark.parametrize("die_at", [3, 7])
def test_a_job_resumes_in_the_phase_that_it_was_in(tmp_path, die_at):
    whole = jobs.run_p3(2, 2, script("phases", tmp_path, 0))
    assert whole[0] == 0, whole[1]
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--restarts", "1"]
    status, output = jobs.run([*launcher, *script("phases", tmp_path, die_at)], timeout_s=100,
                              P3_SNAPSHOT_DIR=str(tmp_path / "snapshots"), P3_SNAPSHOT_EVERY="2")  # fmt: skip
    assert status == 0, output
    assert "began at %d" % (die_at - 1) in output
    assert sorted(re.findall(r"has ([0-9a-f]{8})", output)) == sorted(re.findall(r"has ([0-9a-f]{8})", whole[1]))


def test_a_released_optimizer_says_so_and_is_plain_where_no_job_is_needed(model, optimizer):
    step(model, optimizer)
    optimizer.release()
    optimizer.release()
    for call in (optimizer.step, optimizer.synchronize, optimizer.broadcast, optimizer.join, optimizer.no_sync):
        with pytest.raises(RuntimeError, match=r"was released: give it to DistributedOptimizer again"):
            call()
    backward(model)
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())
    kept = optimizer.state_dict()
    assert len(kept["state"]) == 4
    optimizer.load_state_dict(kept)
    plain = sgd(model)
    plain.load_state_dict(kept)
    step(model, plain)


def test_an_optimizer_may_be_distributed_again_and_goes_on_with_its_state():
    model, reference = small_model(), small_model()
    optimizer, plain = sgd(model), sgd(reference)
    schedule, of_plain = (torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, plain))
    for life in range(3):
        assert p3.torch.DistributedOptimizer(optimizer, model) is optimizer and isinstance(optimizer, torch.optim.SGD)
        for one, made, rates in ((model, optimizer, schedule), (reference, plain, of_plain)):
            for _ in range(2):
                step(one, made)
                rates.step()
        if life == 1:
            optimizer.release()
    optimizer.release()
    for weight, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(weight, expected)


def test_of_two_optimizers_on_one_model_the_other_trains_on():
    model, reference = small_model(), small_model()
    optimizers = [p3.torch.DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=0.1), model)
                  for one in (model[0], model[2])]  # fmt: skip
    for released, other in ((0, 1), (1, 0)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
        optimizers[released].release()
        model.zero_grad()
        backward(model)
        optimizers[other].step()
        optimizers[released] = p3.torch.DistributedOptimizer(optimizers[released], model)
    plain = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference[0], reference[2])]
    for both in ((0, 1), (1,), (0, 1), (0,)):
        reference.zero_grad()
        backward(reference)
        for number in both:
            plain[number].step()
    for optimizer in optimizers:
        optimizer.release()
    assert "zero_grad" not in vars(model)
    for weight, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(weight, expected)


@pytest.mark.skipif(not hasattr(torch.nn.Module, "compile"), reason="this torch cannot compile in place")
def test_a_module_compiled_in_place_is_as_it_was():
    model = small_model()
    model.compile(backend="eager")
    call = model._compiled_call_impl
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model)
    step(model, optimizer)
    assert model._compiled_call_impl is not call
    optimizer.release()
    assert model._compiled_call_impl is call


def test_a_former_training_that_cannot_be_released_says_so_once(tmp_path):
    """Of two, one, of which the workers have taken different numbers of steps."""
    script = """
        import torch, p3.torch
        from p3.trainers import former
        trained = []
        for steps in (1 + p3.torch.rank(), 1):
            model = torch.nn.Linear(2, 1)
            optimizer = p3.torch.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), model, every=10)
            for step in range(steps):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            trained.append(optimizer)
        former.set_aside(trained)
        try:
            former.release_all()
        except RuntimeError as error:
            print("not released:", error)
        former.release_all()
        assert not hasattr(trained[1], "_p3_local")
    """
    status, output = jobs.run_p3(2, 1, forked.command(write_script(tmp_path, script)))
    assert status == 0 and output.count("not released: ") == 2, output
