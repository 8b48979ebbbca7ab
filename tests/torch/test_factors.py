"""p3.torch.factors: gradients of nn.Linear as sufficient factors, in jobs of real processes."""

import re

import plugin_jobs as jobs
import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize("workers, servers, aggregates", [(2, 2, "1"), (3, 1, "1"), (3, 2, "0")])
def test_models_train_as_without_and_all_workers_hold_the_same_bits(workers, servers, aggregates):
    """Without local aggregation: as if each worker was on a machine of its own."""
    command = jobs.python("torch_factors.py", "like-dense")
    status, output = jobs.run_p3(workers, servers, command, P3_LOCAL_AGGREGATION=aggregates)
    assert status == 0, output
    digests = re.findall(r"like dense, digest (\w{16})", output)
    assert len(digests) == 6 * workers, output
    assert all(digests.count(one) % workers == 0 for one in digests), output


def test_uneven_steps_and_digests_compared_after_each():
    status, output = jobs.run_p3(3, 2, jobs.python("torch_factors.py", "uneven"), P3_CHECK="1")
    assert status == 0 and output.count("joined") == 3, output
    assert len(set(re.findall(r"joined, digest (\w{16})", output))) == 1, output


def test_exact_weights_of_compression_are_none_of_factors():
    status, output = jobs.run(jobs.python("torch_factors.py", "exact"))
    assert status == 0 and "exact weights stay" in output, output


def test_what_cannot_be_is_said():
    status, output = jobs.run(jobs.python("torch_factors.py", "refused"))
    assert status == 0 and "refused" in output, output
