"""p3.measure.results: what a results file may hold, and what is made of it."""

import json

import lab_results as made
import pytest

from p3.errors import ConfigError
from p3.measure.results import records, summaries


@pytest.fixture
def read(tmp_path):
    """read(*lines) -> Results, of a file that announces `targets` first."""

    def from_lines(*lines):
        return records.read([made.write(tmp_path / "results.jsonl", [made.settings("targets"), *lines])])

    return from_lines


def by_store(found):
    return {one.store: one for one in summaries.summarise(found.runs)}


def test_summary_is_the_median_of_run_medians_and_their_range(read):
    runs = [made.run("targets", seconds=(9, median, 0.1), repeat=number) for number, median in enumerate((3, 1, 2))]
    found = read(*runs)
    (one,) = summaries.summarise(found.runs)
    assert (one.median_s, one.low_s, one.high_s, one.runs, one.failed) == (2, 1, 3, 3, 0)
    assert one.throughput == pytest.approx(1 / 2) and one.throughput_spread == (pytest.approx(1 / 3), 1)


def test_only_right_runs_count_and_the_others_stay_in_sight(read):
    wrong = made.run("targets", seconds=(0.1,), result="wrong", repeat=1)
    found = read(made.run("targets", seconds=(2,)), wrong, made.failed("targets", "dist_sync", "server 1 | died"))
    of = by_store(found)
    assert (of["p3_sync"].median_s, of["p3_sync"].runs, of["p3_sync"].failed) == (2, 2, 1)
    assert of["dist_sync"].median_s is None
    assert of["dist_sync"].error == "server 1 | died"


def test_speedup_compares_runs_of_the_same_setting_only(read):
    found = read(
        made.run("targets", "dist_sync", (3,), slice_elements=None), made.run("targets", "p3_sync", (2,)),
        made.run("targets", "dist_sync", (9,), rate_mbit=200), made.run("targets", "p3_sync", (1,), rate_mbit=400),
    )  # fmt: skip
    summed = summaries.summarise(found.runs)
    speedups = {one.rate_mbit: summaries.speedup(one, "dist_sync", summed) for one in summed if one.store == "p3_sync"}
    assert speedups == {800: 1.5, 400: None}


def test_stores_keep_one_order_whatever_came_first(read):
    found = read(*(made.run("targets", store) for store in ("p3_sync", "another", "mxnet_p3", "dist_sync")))
    assert [one.store for one in summaries.summarise(found.runs)] == ["dist_sync", "mxnet_p3", "p3_sync", "another"]


def test_idle_intervals_are_those_that_carry_less_than_a_twentieth_of_the_rate():
    full = 800e6 / 8 * 0.01
    assert summaries.idle_share([full, 0.06 * full, 0.04 * full, 0], 0.01, 800) == 0.5
    assert summaries.idle_share([1, 0, 0, 0], 0.01, None) == 0.75


def test_results_of_different_commits_are_told(tmp_path):
    first, second = (
        made.write(tmp_path / name, [made.settings("targets", **changes), made.run("targets")])
        for name, changes in (("a", {"commit": "a"}), ("b", {"commit": "b"}))
    )
    assert records.read([first]).mixtures() == []
    assert records.read([first, first]).mixtures() == [] and len(records.read([first, first]).runs) == 1
    (told,) = records.read([first, second]).mixtures()
    assert told.startswith("targets: results of 2 different commits")


def test_load_of_the_machine_makes_no_other_machine(read):
    assert read(made.settings("targets", machine=dict(made.settings("targets")["machine"], load_before=1.5)),
                made.run("targets")).mixtures() == []  # fmt: skip


@pytest.mark.parametrize("line, text", [
    ({"kind": "guess"}, "kind is 'guess'; it must be settings, run or nic"),
    ([], "not a JSON object"),
    (made.run("scale"), "a run of experiment 'scale' before any settings of it"),
    ({name: value for name, value in made.run("targets").items() if name != "bound_s"}, "'bound_s' is missing"),
    (made.run("targets", rate_mbit="800"), "rate_mbit is '800'; it must be a number above 0"),
    (made.run("targets", hosts=True), "hosts is True; it must be a whole number above 0"),
    (made.run("targets", median_s=5.0), "median_s is 5, but the median of iteration_s is 1.1"),
    (made.run("targets", iteration_s=[]), "has iteration_s and median_s"),
    (made.run("targets", result="good"), "result is 'good'; it must be one of right, wrong, failed"),
    (made.failed("targets", "p3_sync", error=None), "a failed run must say its error"),
    (made.nic("targets", "p3_sync", bytes_in=[1]), "1 intervals in, 300 out"),
    (made.nic("targets", "p3_sync", packets_out=[1]), "300 intervals of bytes, 1 of packets"),
])  # fmt: skip
def test_unusable_line_is_refused_by_file_and_number(read, line, text):
    with pytest.raises(ConfigError) as caught:
        read(made.run("targets"), line)
    assert "results.jsonl, line 3: " in str(caught.value) and text in str(caught.value)


@pytest.mark.parametrize("text", ['{"kind": "run", "exp', '{"kind": "run", "median_s": NaN}', ""])
def test_broken_line_is_refused_by_file_and_number(tmp_path, text):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(made.settings("targets")) + "\n" + text + "\n")
    with pytest.raises(ConfigError, match=r"results.jsonl, line 2: (no JSON|NaN is no number)"):
        records.read([str(path)])


def test_file_without_a_run_and_no_file_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="no run in .*p3 bench"):
        records.read([made.write(tmp_path / "empty.jsonl", [made.settings("targets")])])
    with pytest.raises(ConfigError, match="none.jsonl cannot be read"):
        records.read([str(tmp_path / "none.jsonl")])
