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
    """run(strategy, *given) -> exit status and output of tests/jobs/placed.py, with two workers and three servers.
    `strategy`: of P3_STRATEGY; `given`: by the script, on each worker."""

    def placed(strategy=None, *given):
        variables = {}
        if strategy is not None:
            (tmp_path / "strategy.json").write_text(json.dumps(strategy))
            variables["P3_STRATEGY"] = str(tmp_path / "strategy.json")
        return jobs.run_p3(2, 3, jobs.python("placed.py", *map(json.dumps, given)), **variables)

    return placed


def result(output):
    return json.loads(next(line[line.index("{"):] for line in output.splitlines() if '"landed"' in line))


def said_by(rank, output):
    return "\n".join(line for line in output.splitlines() if line.startswith("[worker %d]" % rank))


@pytest.mark.parametrize("by", ["P3_STRATEGY", "script", "both"])
def test_servers_hold_what_the_strategy_says_and_bits_stay(run, tmp_path, by):
    (tmp_path / "of_script.json").write_text(json.dumps(PLACED, indent=4))
    given = [] if by == "P3_STRATEGY" else [PLACED, str(tmp_path / "of_script.json")]
    (status, usual), (other_status, placed) = run(), run(None if by == "script" else PLACED, *given)
    assert (status, other_status) == (0, 0), usual + placed
    usual, told = result(usual), result(placed)
    assert told["landed"] == usual["landed"]
    # The slices in turn: 1000 and 1 of `first`, four times 1000 of `second`, and 10 of `last`.
    assert told["held"] == [STATE * (1 + 1000), STATE * 10, STATE * (1000 + 3 * 1000)]
    assert told["held"] != usual["held"]
    of_rows = [after - before for before, after in zip(told["held"], told["with_rows"])]
    assert of_rows[1] == 0 and min(of_rows[0], of_rows[2] - of_rows[0]) > 0
    assert ("the job had no keys 'absent', which have entries there" in placed) == (by != "script")


def test_a_strategy_for_more_servers_is_refused_before_anything_starts(run):
    status, output = run({"version": 1, "default": {"servers": [0, 3]}})
    assert status == 1 and "[worker" not in output
    assert "server 3 is named, but the job has 3 servers, from 0 to 2: plan for as many, or start more" in output


def test_what_a_script_gives_for_more_servers_fails_the_job(run):
    status, output = run(None, *2 * [{"version": 1, "keys": {"last": {"servers": [0, 3]}}}])
    assert status != 0
    text = "the strategy in the script, key 'last': server 3 is named, but the job has 3 servers, from 0 to 2"
    assert text in output and '"landed"' not in output


@pytest.mark.parametrize("by", ["P3_STRATEGY", "script"])
def test_an_entry_that_does_not_fit_fails_the_job_on_all(run, by):
    wrong = {"version": 1, "keys": {"rows": {"slice": 7}}}
    status, output = run(wrong) if by == "P3_STRATEGY" else run(None, wrong, wrong)
    assert status != 0
    for rank in (0, 1):
        assert "a slice for key 'rows', whose gradients are sparse" in said_by(rank, output), output
    assert by == "P3_STRATEGY" or "the strategy in the script has a slice" in output


@pytest.mark.parametrize("given", [(PLACED, {**PLACED, "default": {}}), (None, PLACED), (PLACED, None)])
def test_workers_that_give_other_strategies_fail_the_job_on_all(run, given):
    status, output = run(None, *given)
    assert status != 0
    for rank in (0, 1):
        said = said_by(rank, output)
        assert "worker 0 (127.0.0.1) and worker 1 (127.0.0.1) disagree about the strategy of store 0: sha256 is" in said
        assert ("not set" in said) == (None in given), output


def test_another_strategy_than_p3_strategys_fails_the_job_on_all(run, tmp_path):
    other = {**PLACED, "keys": {**PLACED["keys"], "last": {"servers": [0]}}}
    status, output = run(PLACED, other, other)
    assert status != 0
    for rank in (0, 1):
        said = said_by(rank, output)
        assert "worker 0 (127.0.0.1) gives store 0 the strategy in the script, and P3_STRATEGY gives the job " in said
        assert "%s: they differ in key 'last'. Leave one of them out" % (tmp_path / "strategy.json") in said
