"""p3.factors: gradients of fully connected layers as sufficient factors, in jobs of real processes."""

import re

import plugin_jobs as jobs
import pytest

pytest.importorskip("mxnet")


@pytest.mark.parametrize("workers, servers", [(2, 2), (3, 1)])
def test_nets_train_as_without_and_all_workers_hold_the_same_bits(workers, servers):
    status, output = jobs.run_p3(workers, servers, jobs.python("factors.py", "like-dense"))
    assert status == 0, output
    digests = re.findall(r"like dense, digest (\w{16})", output)
    assert len(digests) == 8 * workers, output
    assert all(digests.count(one) % workers == 0 for one in digests), output
    assert re.search("gradients leave as factors of 4 rows: 416 elements instead of 2560", output), output


def test_several_workers_of_a_machine_may_push_on_their_own():
    status, output = jobs.run_p3(4, 2, jobs.python("factors.py", "uneven"), P3_LOCAL_AGGREGATION="0")
    assert status == 0 and len(set(re.findall(r"joined, digest (\w{16})", output))) == 1, output
    assert output.count("joined") == 4, output


def test_the_state_of_each_workers_update_is_saved_and_loaded(tmp_path):
    status, output = jobs.run_p3(2, 2, jobs.python("factors.py", "states"), FOLDER=str(tmp_path))
    assert status == 0 and output.count("states are back") == 2, output
    assert len(set(re.findall(r"digest (\w{16})", output))) == 1, output


def test_what_cannot_be_is_said():
    status, output = jobs.run_p3(2, 1, jobs.python("factors.py", "refused"))
    assert status == 0 and output.count("refused") == 2, output
    assert "stays dense: several layers share it" in output


def test_it_comes_before_the_first_push():
    status, output = jobs.run_p3(2, 1, jobs.python("factors.py", "late"))
    assert output.count("too late") == 2, output
