"""weigh(): uneven batches train as one process on the whole ones, and what makes no sense is an error with a name."""

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from torch_steps import sgd, step  # noqa: E402

TRAININGS = ("Training on_workers synchronous clipped closure lbfgs lbfgs_in_closure half sparse factored accumulated "
             "empty empty_synchronous zeroed seldom joined joined_synchronous").split()  # fmt: skip
SCALED = ["scaled"] * hasattr(torch.amp, "GradScaler")


def script(*arguments):
    return jobs.python("torch_weights.py", *arguments)


@pytest.mark.parametrize("workers, aggregates", [(2, "1"), (3, "0")])
def test_uneven_batches_train_as_the_whole_ones(workers, aggregates):
    names = TRAININGS + SCALED
    status, output = jobs.run_p3(workers, 2, script(*names), 110, P3_LOCAL_AGGREGATION=aggregates, P3_CHECK="1")
    assert status == 0, output
    assert output.count("is as one process") == workers * len(names), output


def test_on_a_device():
    names = [name for name in TRAININGS if name not in ("sparse", "factored")]
    status, output = jobs.run_p3(2, 2, script("--staged", *names), 110)
    assert status == 0 and output.count("is as one process") == 2 * len(names), output


def test_compression_that_keeps_what_it_leaves_out_takes_gradients_with_their_weights():
    status, output = jobs.run_p3(4, 2, script("in_two_bits", "by_dgc"), 110)
    assert status == 0 and output.count("is as one process") == 8, output


def test_workers_that_do_not_all_call_it_are_told():
    for synchronous in ("0", "1"):
        status, output = jobs.run_p3(3, 2, jobs.python("torch_jobs.py", "weighed_by_some", synchronous))
        assert status != 0, output
        assert "weigh() was called by 2 of the 3 workers that take this step: call it on every worker" in output, output


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), "3", None, True, [1], torch.ones(2)])
def test_what_is_no_number_of_samples_is_refused(optimizer, samples):
    with pytest.raises(ValueError, match="it takes how many samples or tokens"):
        optimizer.weigh(samples)


def test_alone_the_bits_are_those_without_it(model, optimizer):
    import copy

    other = copy.deepcopy(model)
    plain = sgd(other)
    for samples in (3, torch.tensor(2.5), 1e-300, torch.tensor([7])):
        optimizer.weigh(samples)
        step(model, optimizer)
        step(other, plain)
    optimizer.synchronize()
    assert all(torch.equal(one, of) for one, of in zip(model.parameters(), other.parameters()))


def test_it_is_called_once_in_a_step_and_before_any_gradient_has_left(model, optimizer):
    step(model, optimizer)
    optimizer.weigh(2)
    with pytest.raises(ValueError, match=r"weigh\(\) was called before in this step"):
        optimizer.weigh(2)
    with pytest.raises(ValueError, match=r"weigh\(\) has begun a step.*call step\(\) before join"):
        optimizer.join()
    step(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"before the step's last backward pass, and the gradient of 0.weight is"):
        optimizer.weigh(2)
    optimizer.step()
    optimizer.weigh(0)
    optimizer.step()  # without gradients
    optimizer.join()


def test_with_staleness_there_is_no_mean_to_weigh_in(model):
    optimizer = p3.torch.DistributedOptimizer(sgd(model), model, staleness=1)
    with pytest.raises(ValueError, match=r"staleness and weights of workers exclude each other.*Leave weigh\(\) out"):
        optimizer.weigh(2)
