"""What compression costs in learning, over seeds; and the table of compressed stores beside the usual way."""

import lab_results as made
import pytest

from p3.measure.bench import experiments, report
from p3.measure.results import curves, records, seeds
from p3.measure.results.summaries import mean_difference

STEPS = 20


def training(store, seed, last, slower=1.0, **changes):
    """A run whose losses fall evenly to `last`, in steps that take `slower` times half a second."""
    losses = [4.0 - (4.0 - last) * (step + 1) / STEPS for step in range(STEPS)]
    at_s = [0.5 * slower * (step + 1) for step in range(STEPS)]
    fields = {"model": "gpt", "computation": "real", "compute_s": None, "bound_s": None, "bound_reason": None,
              "repeat": seed, "losses": losses, "loss_at_s": at_s, "cpu_s": 0.9, "clip": 1.0, "result": "right"}
    return made.run("codecs", store, (0.5 * slower,), **{**fields, **changes})  # fmt: skip


def last(loss):
    """The smoothed one of such a run."""
    return curves.smooth(training("", 0, loss)["losses"])[-1]


RISING = [0.03 * step for step in range(STEPS)]
RUNS = [
    training("ddp_1", 0, 2.0), training("ddp_1", 1, 2.2),
    training("p3_torch", 0, 2.0, heldout_accuracy=0.5), training("p3_torch", 1, 2.2, heldout_accuracy=0.6),
    training("p3_torch_int8", 0, 2.1, slower=0.5, batch_accuracies=RISING),
    training("p3_torch_int8", 1, 2.1, slower=0.5, batch_accuracies=RISING),
    training("p3_torch_1bit", 0, 2.4), training("p3_torch_1bit", 1, 2.6),
    training("ddp_1_fp16", 1, 3.0, result="wrong", error="the loss has not fallen"),
]  # fmt: skip


@pytest.fixture
def found():
    return records.of_records([made.settings("codecs"), *RUNS])


def test_stores_are_compared_seed_by_seed_with_exact_training(found):
    by_store = {one.configuration.store: one for one in seeds.bands(found.runs)}
    assert list(by_store) == ["ddp_1", "p3_torch", "p3_torch_1bit", "p3_torch_int8"]
    exact = seeds.exact(list(by_store.values()))
    assert exact is by_store["p3_torch"]
    int8, one_bit = by_store["p3_torch_int8"], by_store["p3_torch_1bit"]
    less = mean_difference(int8.finals, exact.finals)
    assert less[1:] == pytest.approx((last(2.1) - last(2.2), last(2.1) - last(2.0)))
    assert int8.ends_within(exact) and not one_bit.ends_within(exact)
    assert int8.at_s[-1] == 5.0 and int8.loss_at(5.0) == int8.losses[-1].median and int8.loss_at(0.1) is None
    assert exact.loss_at(5.0) == exact.losses[STEPS // 2 - 1].median
    assert int8.accuracy_at(5.0) == pytest.approx(0.435) and exact.accuracy_at(5.0) is None


def test_without_p3_exact_training_is_ddps():
    (band,) = seeds.bands(records.of_records([made.settings("codecs"), training("ddp_1", 0, 2.0)]).runs)
    assert seeds.exact([band]) is band and seeds.exact([]) is None


def test_table_tells_losses_at_equal_steps_and_seconds_and_who_has_not_learnt(found):
    (table,) = report.tables(found)
    assert table.title == "codecs: GPT, 86 MB, 800 Mbit/s, 2 hosts, clipped to a norm of 1"
    assert table.rows[0] == [
        "store", "loss after 20 steps", "against exact", "within the seeds", "right of held out", "loss after 5 s",
        "right after 5 s", "seconds for a step", "CPU s", "seeds",
    ]  # fmt: skip
    rows = {row[0]: row[1:] for row in table.rows[1:]}
    assert rows["p3_torch"][0].endswith(" (%.3f..%.3f)" % (last(2.0), last(2.2)))
    assert float(rows["p3_torch"][0].split()[0]) == pytest.approx(last(2.1), abs=0.001)
    assert rows["p3_torch"][1:3] == ["-", "-"] and rows["p3_torch"][-1] == "2"
    assert rows["p3_torch"][3] == "55.0% (50.0..60.0)" and rows["ddp_1"][3] == "-"
    assert [rows[store][2] for store in ("ddp_1", "p3_torch_int8", "p3_torch_1bit")] == ["yes", "yes", "no"]
    assert rows["p3_torch_int8"][1].startswith("+0.000 (") and rows["p3_torch_1bit"][1].startswith("+0.3")
    assert rows["ddp_1_fp16"][0] == "has not learnt"
    assert [rows[store][5] for store in ("p3_torch", "p3_torch_int8")] == ["-", "43.5%"]
    assert any("the loss has not fallen" in note for note in table.notes)


def test_figure_draws_losses_over_steps_and_over_seconds(found):
    pytest.importorskip("matplotlib", reason="p3 plot needs matplotlib: pip install matplotlib")
    from p3.measure.results import drawing, figures

    figure = figures.draw(experiments.named("codecs").figure, found)
    by_step, by_seconds, accuracy_by_step, accuracy_by_seconds = figure.axes
    (rising,) = accuracy_by_step.lines
    assert list(rising.get_ydata()) == pytest.approx(curves.smooth(RISING))
    assert accuracy_by_step.get_ylabel() == "accuracy" and len(accuracy_by_seconds.lines) == 1
    orange = drawing.style("p3_torch_int8")[0]
    (steps,) = [line for line in by_step.lines if line.get_color() == orange]
    (seconds,) = [line for line in by_seconds.lines if line.get_color() == orange]
    assert list(steps.get_xdata()) == list(range(1, STEPS + 1)) and list(seconds.get_xdata())[-1] == 5.0
    assert list(steps.get_ydata()) == pytest.approx(curves.smooth(RUNS[4]["losses"]))
    assert len(by_step.collections) == 4 and drawing.dashes("ddp_1_fp16") == "--" != drawing.dashes("ddp_1")
    assert len({drawing.style(store)[0] for store in ("p3_torch", "p3_torch_int8", "p3_torch_fp16")}) == 3


def replay(store, seconds, bound_s, **changes):
    return made.run("targets", store, (seconds,), bound_s=bound_s, cpu_s=0.3, rate_mbit=100, **changes)


def test_compressed_stores_have_a_row_each_beside_ddp_with_and_without_its_hook():
    runs = [
        replay("ddp_5", 8.0, 6.9), replay("ddp_25", 7.8, 6.9), replay("ddp_5_fp16", 4.2, 3.5),
        replay("ddp_25_fp16", 4.0, 3.5), replay("ddp_100_powersgd", 1.5, None, bound_reason=None),
        replay("p3_torch", 7.0, 6.9), replay("p3_torch_fp16", 3.6, 3.5), replay("p3_torch_int8", 1.9, 1.8),
    ]  # fmt: skip
    plain, cpu, compressed = report.tables(records.of_records([made.settings("targets"), *runs]))
    assert plain.rows[0][:5] == ["model", "ddp_5", "ddp_25", "p3_torch", "bound"] and "6.90" in plain.rows[1]
    assert cpu.title.endswith("CPU seconds")
    assert compressed.title == "targets: VGG-19, 86 MB, 100 Mbit/s, 1 s of computation, 2 hosts"
    assert compressed.rows[0][3:] == ["above bound", "over ddp_25", "over ddp_25_fp16", "CPU s"]
    rows = {row[0]: row[2:6] for row in compressed.rows[1:]}
    assert rows["p3_torch_fp16"] == ["3.50", "+2.9%", "2.17x", "1.11x"]
    assert rows["ddp_25_fp16"] == ["3.50", "+14.3%", "1.95x", "1.00x"]
    assert rows["ddp_100_powersgd"] == ["-", "-", "5.20x", "2.67x"]
    assert list(rows) == ["ddp_5", "ddp_5_fp16", "ddp_100_powersgd", "ddp_25", "ddp_25_fp16", "p3_torch",
                          "p3_torch_fp16", "p3_torch_int8"]  # fmt: skip


def test_without_compressed_stores_targets_has_the_tables_that_it_had():
    found = records.of_records([made.settings("targets"), replay("ddp_5", 8.0, 6.9), replay("p3_torch", 7.0, 6.9)])
    assert len(report.tables(found)) == 2
