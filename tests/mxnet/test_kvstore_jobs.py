"""The store between several workers, each a real process of a job."""

import json
import re

import plugin_jobs as jobs
import pytest

pytest.importorskip("mxnet")


@pytest.mark.parametrize("workers, servers", [(2, 2), (3, 1)])
def test_workers_together(workers, servers):
    status, output = jobs.run_p3(workers, servers, jobs.python("together.py"))
    assert status == 0, output
    assert output.count("passed check_") == 6 * workers, output


def test_servers_hold_what_the_strategy_of_the_script_says_and_bits_stay():
    told = []
    strategy = '{"version": 1, "default": {"servers": [0, 2]}, "keys": {"1": {"servers": [2]}}}'
    for given in ("{}", '{"strategy": %s}' % strategy):
        status, output = jobs.run_p3(2, 3, jobs.python("mxnet_planned.py", given))
        assert status == 0, output
        told.append(json.loads(next(line[line.index("{"):] for line in output.splitlines() if '"held"' in line)))
    usual, placed = told
    assert placed["digest"] == usual["digest"]
    assert min(usual["held"]) > 0
    assert placed["held"][0] > 0 and placed["held"][1] == 0
    assert placed["held"][2] >= 2 * 4 * 60 * 50, "the first layer's weight, with its momentum"


@pytest.mark.parametrize("other", ['{"strategy": {"version": 1, "default": {"slice": 7}}}', "{}"])
def test_workers_that_give_other_strategies_are_named(other):
    status, output = jobs.run_p3(2, 3, jobs.python("mxnet_planned.py", '{"strategy": {"version": 1}}', other))
    assert status != 0
    assert "worker 0 (127.0.0.1) and worker 1 (127.0.0.1) disagree about the strategy of store 0: sha256 is" in output


def test_a_step_returns_while_the_network_is_stopped():
    status, output = jobs.run_p3(1, 1, jobs.python("frozen_server.py"))
    assert status == 0, output
    assert "the step returned while the server was frozen" in output and "and took effect afterwards" in output


def test_a_weight_does_not_wait_for_others_that_are_late():
    status, output = jobs.run_p3(2, 1, jobs.python("late_keys.py"), P3_WAIT_TIMEOUT_S="10")
    assert status == 0, output
    assert output.count("has all") == 2


def test_a_worker_that_is_late_gets_the_first_value_and_not_the_one_that_was_set_behind_it(tmp_path):
    status, output = jobs.run_p3(2, 1, jobs.python("set_again.py", tmp_path))
    assert status == 0, output


def test_workers_that_go_their_own_ways_follow_rank_0s_order_and_end_with_the_same_bits():
    digests = set()
    for priority in ("auto", "off"):
        status, output = jobs.run_p3(3, 2, jobs.python("ways.py", 10), P3_PRIORITY=priority)
        assert status == 0, output
        found = re.findall(r"worker \d has ([0-9a-f]{8}) and follows ([\d ]+)", output)
        assert len(found) == 3, output
        digests |= {digest for digest, _ in found}
        if priority == "auto":
            assert {order for _, order in found} == {"4 2 0 3 1"}, output
    assert len(digests) == 1


def errors_of(case, **variables):
    """{rank: first error}, {rank: error of the next call} of the two workers of a job in which something goes wrong."""
    status, output = jobs.run_p3(2, 1, jobs.python("failures.py", case), timeout_s=60, **variables)
    lines = {}
    for line in output.splitlines():
        _, found, text = line.partition("rank ")
        if found:
            name, _, message = text.partition(": ")
            lines[name] = message
    assert set(lines) == {"0", "1", "0 again", "1 again"}, output
    assert status != 0
    return lines


@pytest.mark.parametrize(
    "case, values",
    [("different_shapes", ("(2, 3)", "(3, 2)")), ("different_types", ("float32", "float64"))],
)
def test_workers_that_disagree_about_a_key_are_both_named(case, values):
    for message in errors_of(case).values():
        for part in ("worker 0", "worker 1", "weight", *values):
            assert part in message.replace("[", "(").replace("]", ")")


@pytest.mark.parametrize("rank, values", [(0, "sgd on the first and not set"), (1, "not set on the first and sgd")])
def test_a_worker_that_pushes_without_the_optimizer_of_another_is_an_error_on_all(rank, values):
    """The scheduler says so, or a server that has both pushes before the scheduler has their words."""
    for message in errors_of("optimizer_on_rank_%d_alone" % rank).values():
        pushed_first = "must use the same optimizer" in message
        causes = () if pushed_first else ("disagree about the optimizer of store 0", values)
        for part in ("worker 0", "worker 1", *causes):
            assert part in message


def test_workers_that_update_at_other_rates_are_an_error_on_all():
    for message in errors_of("other_rates_of_updating_workers").values():
        for part in ("worker 0", "worker 1", "lr 0.1,", "lr 0.2,", "must use the same optimizer, learning rate"):
            assert part in message


def test_gradient_that_fails_on_one_worker_is_an_error_on_all():
    errors = errors_of("failed_gradient")
    assert "gradient of key 'weight' failed on this worker" in errors["1 again"]
    for rank in ("0", "0 again"):
        assert "gradient of key 'weight' failed" in errors[rank]


def test_gradients_may_be_held_in_a_blocked_layout():
    status, output = jobs.run_p3(2, 1, jobs.python("failures.py", "blocked_gradient"))
    assert status == 0 and output.count("no error") == 2, output
