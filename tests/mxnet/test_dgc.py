"""Deep gradient compression through stores of real processes."""

import re

import plugin_jobs as jobs
import pytest

pytest.importorskip("mxnet")

WORKERS = [(1, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize("workers, servers", WORKERS)
def test_weights_are_those_of_numpy_to_the_bit_and_plain_keys_those_of_a_plain_store(workers, servers):
    status, output = jobs.run_p3(workers, servers, jobs.python("dgc.py", "numpy"))
    assert status == 0, output
    assert output.count("weights are those of NumPy") == 2 * workers, output
    assert len(set(re.findall(r"NumPy, (\w{16})", output))) == 2
    # Said once in the log of the job: of each of the two stores that have it.
    assert output.count("is compressed, {") == 2, output
    told = "key 'd': dgc and a type other than float32 (float64) exclude each other: dgc is for dense"
    assert output.count(told) == 2 and "key 'b'" not in output, output


@pytest.mark.parametrize("workers, servers", [(2, 2), (3, 2)])
def test_a_net_learns_and_all_workers_end_with_the_same_weights(workers, servers):
    status, output = jobs.run_p3(workers, servers, jobs.python("dgc.py", "trainer"))
    assert status == 0, output
    digests = re.findall(r"digest (\w{16})", output)
    assert len(digests) == workers and len(set(digests)) == 1, output
    # And the same in another run.
    status, again = jobs.run_p3(workers, servers, jobs.python("dgc.py", "trainer"), P3_SERVER_THREADS="2")
    assert status == 0 and re.findall(r"digest (\w{16})", again) == digests, again


def test_what_it_is_not_for_is_refused_by_name():
    status, output = jobs.run(jobs.python("dgc.py", "refused"))
    assert status == 0, output
    assert "rank 0: refused" in output
