"""Tables of results: each store's time beside the bound, and nothing hidden."""

import lab_results as made
import pytest

from p3.measure.bench import report
from p3.measure.results import records, tables


@pytest.fixture
def tables_of():
    """tables_of(line, ...) -> the tables of runs, whose experiments need no announcement."""

    def from_lines(*lines):
        settings = [made.settings(name) for name in dict.fromkeys(line["experiment"] for line in lines)]
        return report.tables(records.of_records([*settings, *lines]))

    return from_lines


def runs(experiment, medians, **changes):
    """A run for each store's median."""
    return [made.run(experiment, store, (seconds,), **changes) for store, seconds in medians.items()]


TARGETS = {"dist_sync": 1.5, "mxnet_p3": 1.25, "p3_sync": 1.0}


def test_targets_have_a_row_for_each_model_in_a_table_for_each_regime(tables_of):
    fast = runs("targets", TARGETS, bound_s=0.95) + runs("targets", TARGETS, model="bert", bound_s=0.8)
    slow = runs("targets", TARGETS, rate_mbit=200, compute_s=4.0)
    first, second = tables_of(*fast, *slow)
    assert first.title == "targets: 800 Mbit/s, 1 s of computation, 2 hosts"
    assert second.title == "targets: 200 Mbit/s, 4 s of computation, 2 hosts"
    names, vgg, bert = first.rows
    assert names == [
        "model", "dist_sync", "mxnet_p3", "p3_sync", "bound", "over dist_sync", "over mxnet_p3", "above bound",
    ]  # fmt: skip
    assert vgg == [
        "VGG-19, 86 MB", "1.50 (1.50..1.50)", "1.25 (1.25..1.25)", "1.00 (1.00..1.00)", "0.950", "1.50x", "1.25x",
        "+5.3%",
    ]  # fmt: skip
    assert bert[0] == "BERT-base-like, 86 MB" and bert[-1] == "+25.0%"


def test_targets_fit_on_a_terminal(tables_of):
    lines = runs("targets", TARGETS, model="inception_v3", bytes=95.4e6)
    assert max(map(len, tables.text(tables_of(*lines)).splitlines())) <= 120


def test_spread_is_of_the_runs_medians(tables_of):
    lines = [made.run("targets", "p3_sync", (seconds,), repeat=seconds) for seconds in (3, 1, 2)]
    (table,) = tables_of(*lines)
    assert table.rows[1][1] == "2.00 (1.00..3.00)" and "of 3 runs" in table.notes[0]


@pytest.mark.parametrize("experiment, changes, title, label", [
    ("bandwidth", {}, "VGG-19, 86 MB, 1 s of computation, 2 hosts", "800 Mbit/s"),
    ("scale", {}, "VGG-19, 86 MB, 800 Mbit/s, 1 s of computation", "2"),
    ("slices", {}, "VGG-19, 86 MB, 800 Mbit/s, 1 s of computation, 2 hosts", "slices of 50000"),
    ("ratio", {}, "VGG-19, 86 MB, 800 Mbit/s, 2 hosts", "0.86"),
    ("sweep", {"compute_share": 0.25}, "VGG-19, 86 MB, computation 0.25 of communication, 2 hosts", "800 Mbit/s"),
    ("compute", {"computation": "real", "compute_s": None}, "VGG-19, 86 MB, 2 hosts", "800 Mbit/s"),
    ("paths", {"path": "TLS"}, "VGG-19, 86 MB, 800 Mbit/s, 1 s of computation, 2 hosts", "TLS"),
    ("utilization", {"delay_ms": 5}, "800 Mbit/s, 1 s of computation, 5 ms delay, 2 hosts", "VGG-19, 86 MB"),
])  # fmt: skip
def test_what_differs_names_the_row_and_all_else_the_table(tables_of, experiment, changes, title, label):
    table = tables_of(made.run(experiment, **changes))[0]
    assert table.title == "%s: %s" % (experiment, title) and table.rows[1][0] == label


def test_late_gradients_have_a_table_of_their_own(tables_of):
    plain, late = tables_of(*runs("targets", TARGETS), *runs("targets", TARGETS, bound_s=0.99, release="end"))
    assert late.title == plain.title + ", gradients at the end"
    assert (plain.rows[1][4], late.rows[1][4]) == ("0.900", "0.990")


def test_store_without_slices_is_compared_with_every_size(tables_of):
    lines = [made.run("slices", seconds=(time,), slice_elements=size) for size, time in ((5000, 2), (50000, 1))]
    (table,) = tables_of(*lines, made.run("slices", "dist_sync", (3,), slice_elements=None))
    assert [(row[0], row[1], row[4]) for row in table.rows[1:]] == [
        ("slices of 5000", "3.00 (3.00..3.00)", "1.50x"), ("slices of 50000", "3.00 (3.00..3.00)", "3.00x"),
    ]  # fmt: skip


def test_the_size_that_p3_chooses_by_itself_tells_no_tables_apart(tables_of):
    sizes = {2: 50000, 4: 10000}
    (table,) = tables_of(*(made.run("scale", hosts=hosts, slice_elements=size) for hosts, size in sizes.items()))
    assert [row[0] for row in table.rows[1:]] == ["2", "4"] and "slices" not in table.title


def test_slices_of_two_sizes_are_no_row_of_one_table(tables_of):
    first, second = tables_of(*(made.run("targets", slice_elements=size) for size in (5000, 50000)))
    assert first.title.endswith("slices of 5000") and second.title.endswith("slices of 50000")
    _, automatic = tables_of(*(made.run("targets", slice_elements=size) for size in (5000, "auto")))
    assert automatic.title.endswith("slices as P3 cuts them")


def test_failures_are_told_with_their_errors(tables_of):
    (table,) = tables_of(
        made.run("targets"), made.run("targets", repeat=1, result="wrong"),
        made.failed("targets", "dist_sync", "server 1 | died"), made.run("targets", "mxnet_p3"),
    )  # fmt: skip
    assert table.rows[1][1:4] == ["failed", "1.10 (1.10..1.10)", "1.10 (1.10..1.10) 1 of 2"]
    assert table.rows[1][5:7] == ["-", "1.00x"]
    notes = "\n".join(table.notes)
    assert "1 of 1 runs failed: server 1 | died" in notes and "1 of 2 runs failed: the weights are wrong" in notes


def test_no_tick_of_processor_time_is_told_as_none(tables_of):
    printed = tables.text(tables_of(*runs("bandwidth", TARGETS, cpu_s=0.0)))
    assert "CPU seconds" in printed and "0 (0..0)" in printed


def test_result_below_the_bound_is_marked(tables_of):
    (table,) = tables_of(made.run("targets", seconds=(1.0,), bound_s=1.1))
    assert table.rows[1][1].endswith("(!)") and "(!) Below the bound, which is impossible" in table.notes[-1]


def test_a_worker_that_waits_for_nobody_may_be_below_the_bound_of_those_that_do(tables_of):
    (table,) = tables_of(made.run("targets", "p3_async", seconds=(1.0,), bound_s=1.1))
    assert "(!)" not in table.rows[1][1] + "".join(table.notes)


def test_changed_links_have_iterations_before_just_behind_and_ten_later(tables_of):
    halved = {"from_mbit": 200, "rate_mbit": 100, "bound_s": 2.0}
    lines = [
        made.run("changes", seconds=(2.1,), before_s=[1.0, 1.2, 1.1], settling_s=[1.5, 3.0, 2.2], **halved),
        made.run("changes", seconds=(2.2,), repeat=1, before_s=[1.3], settling_s=[2.5], **halved),
        made.failed("changes", "p3_sync", repeat=2, **halved),
    ]
    (table,) = tables_of(*lines)
    assert table.rows[1:] == [[
        "VGG-19, 86 MB, 200 Mbit/s, then 100 Mbit/s, 1 s of computation, 2 hosts", "p3_sync", "1.20 (1.10..1.30)",
        "2.75 (2.50..3.00)", "2.15 (2.10..2.20) 2 of 3", "2.00", "+7.5%",
    ]]  # fmt: skip
    (table,) = tables_of(lines[-1])
    assert table.rows[1][2:5] == ["-", "-", "failed"]


def test_sweep_lists_what_is_far_from_its_bound_and_says_of_how_many(tables_of):
    slow, fast = ({"rate_mbit": rate, "compute_s": 10 / rate, "compute_share": 0.5} for rate in (30, 100))
    lines = [
        made.run("sweep", seconds=(1.07,), bound_s=1.0, **slow),
        made.run("sweep", seconds=(1.09,), bound_s=1.0, **fast),
        *(made.run("sweep", "p3_torch", (seconds,), bound_s=1.0, repeat=repeat, **slow)
          for repeat, seconds in enumerate((1.0, 1.2, 1.3))),
        made.failed("sweep", "p3_torch", **fast),
    ]  # fmt: skip
    times, far = tables_of(*lines)
    assert [row[0] for row in times.rows[1:]] == ["30 Mbit/s", "100 Mbit/s"]
    assert far.title == "sweep: more than 8% above the bound: 2 of 3"
    share = "computation 0.5 of communication"
    assert far.rows[1:] == [
        ["p3_torch", "VGG-19, 86 MB", "30 Mbit/s", share, "1.20 (1.00..1.30)", "1.00", "+20.0%"],
        ["p3_sync", "VGG-19, 86 MB", "100 Mbit/s", share, "1.09 (1.09..1.09)", "1.00", "+9.0%"],
    ]
    assert tables_of(lines[0])[-1] == ("sweep: more than 8% above the bound: 0 of 1", far.rows[:1], ())


def test_real_training_has_neither_bound_nor_emulation(tables_of):
    (table,) = tables_of(made.run("compute", computation="real", compute_s=None, bound_s=None, bound_reason=None))
    assert table.rows[0] == ["rate", "p3_sync"] and "Nothing is emulated" in table.notes[0]


def test_best_speedup_over_the_bandwidths_stands_beside_the_papers(tables_of):
    lines = [*runs("bandwidth", {"dist_sync": 1.5, "p3_sync": 1.2}, rate_mbit=400),
             *runs("bandwidth", {"dist_sync": 3.0, "p3_sync": 2.0}, rate_mbit=200),
             *runs("bandwidth", {"dist_sync": 1.1, "p3_sync": 1.0}, model="bert")]  # fmt: skip
    assert tables_of(*lines)[-1].rows == [
        ["model", "best", "at", "paper's best"],
        ["VGG-19", "+50%", "200 Mbit/s", "+66%"],
        ["BERT-base-like", "+10%", "800 Mbit/s", "-"],
    ]


@pytest.mark.parametrize("packets, frames", [({"packets_out": [1] * 300}, "1.000"), ({}, "-")])
def test_what_cards_counted_is_compared_with_the_formula_with_headers_and_without(tables_of, packets, frames):
    seconds = (1.0, 1.0, 1.0)
    run = made.run("dgc", seconds=seconds, card_bytes=100_000, worker_peak_bytes=1, server_peak_bytes=1)
    card = made.nic("dgc", "p3_sync", bytes_out=[1066] * 300, **packets)  # 1000 of frames in each interval
    table = next(one for one in tables_of(run, card) if "by formula" in one.rows[0])
    of_store = dict(zip(*table.rows))
    assert (of_store["over it"], of_store["frames over it"]) == ("1.066", frames)


def test_idle_share_is_told_of_every_card(tables_of):
    lines = [made.run("utilization"), made.nic("utilization", "p3_sync"), made.nic("utilization", "p3_sync", host=1)]
    table = tables_of(*lines)[-1]
    assert table.rows == [
        ["store", "host", "sending", "receiving"], ["p3_sync", "0", "20%", "20%"], ["p3_sync", "1", "20%", "20%"],
    ]  # fmt: skip


def test_markdown_is_a_table_for_github(tables_of):
    text = tables.markdown(tables_of(made.run("targets", seconds=(1.0,), bound_s=0.5)))
    assert text.splitlines()[2:5] == [
        "| model | p3_sync | bound | above bound |", "| --- | --- | --- | --- |",
        "| VGG-19, 86 MB | 1.00 (1.00..1.00) | 0.500 | +100.0% |",
    ]  # fmt: skip
