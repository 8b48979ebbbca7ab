"""Jobs with a strategy: the bits of those without, on the servers that it names; and what is refused."""

import json

import plugin_jobs as jobs
import pytest

pytest.importorskip("p3._core", reason="the extension is not built")

PLACED = {
    "version": 1,
    "default": {"servers": [2, 0, 2], "slice": 1000},
    "keys": {"last": {"servers": [1]}, "absent": {"slice": 7}},
}
STATE = 12  # bytes of an element and Adam's two states


@pytest.fixture
def run(tmp_path):
    """run(strategy) -> exit status and output of tests/jobs/placed.py, with two workers and three servers."""

    def placed(strategy=None):
        if strategy is None:
            return jobs.run_p3(2, 3, jobs.python("placed.py"))
        (tmp_path / "strategy.json").write_text(json.dumps(strategy))
        return jobs.run_p3(2, 3, jobs.python("placed.py"), P3_STRATEGY=str(tmp_path / "strategy.json"))

    return placed


def result(output):
    return json.loads(next(line[line.index("{"):] for line in output.splitlines() if '"landed"' in line))


def test_servers_hold_what_the_strategy_says_and_bits_stay(run):
    (status, usual), (other_status, placed) = run(), run(PLACED)
    assert (status, other_status) == (0, 0), usual + placed
    usual, told = result(usual), result(placed)
    assert told["landed"] == usual["landed"]
    # The slices in turn: 1000 and 1 of `first`, four times 1000 of `second`, and 10 of `last`.
    assert told["held"] == [STATE * (1 + 1000), STATE * 10, STATE * (1000 + 3 * 1000)]
    assert told["held"] != usual["held"]
    of_rows = [after - before for before, after in zip(told["held"], told["with_rows"])]
    assert of_rows[1] == 0 and min(of_rows[0], of_rows[2] - of_rows[0]) > 0
    assert "the job had no keys 'absent', which have entries there" in placed


def test_a_strategy_for_more_servers_is_refused_before_anything_starts(run):
    status, output = run({"version": 1, "default": {"servers": [0, 3]}})
    assert status == 1 and "[worker" not in output
    assert "server 3 is named, but the job has 3 servers, from 0 to 2: plan for as many, or start more" in output


def test_an_entry_that_does_not_fit_fails_the_job_on_all(run):
    status, output = run({"version": 1, "keys": {"rows": {"slice": 7}}})
    assert status != 0
    for rank in (0, 1):
        said = [line for line in output.splitlines() if line.startswith("[worker %d]" % rank)]
        assert any("a slice for key 'rows', whose gradients are sparse" in line for line in said), output
