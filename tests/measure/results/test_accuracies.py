"""Accuracies over epochs and seconds: bands over seeds, what a store loses against p3_sync, table and figure."""

import lab_results as made
import pytest

from p3.measure.bench import experiments, report
from p3.measure.results import accuracies, records
from p3.measure.results.summaries import mean_difference

AT_S = [2.0, 4.0, 6.0]


def training(store, seed, reached, slower=1.0, **changes):
    """A run whose accuracies are `reached`, after epochs that take `slower` times two seconds."""
    fields = {
        "model": "resnet14", "computation": "real", "compute_s": None, "bound_s": None, "bound_reason": None,
        "accuracies": list(reached), "accuracy_at_s": [slower * one for one in AT_S], "result": "right",
    }  # fmt: skip
    return made.run("accuracy", store, repeat=seed, **{**fields, **changes})


RUNS = [
    training("p3_sync", 0, (0.5, 0.98, 0.98)), training("p3_sync", 1, (0.7, 0.96, 0.99)),
    training("p3_sync", 2, (0.6, 0.97, 0.97), slower=3.0),
    training("p3_dgc_0.01", 0, (0.4, 0.9, 0.96), slower=0.5), training("p3_dgc_0.01", 2, (0.4, 0.9, 0.98), slower=0.5),
    training("p3_dgc_0.01", 1, (0.4, 0.9, 0.2), result="wrong", error="diverged"),
]  # fmt: skip


@pytest.fixture
def found():
    return records.of_records([made.settings("accuracy"), *RUNS])


def test_bands_are_of_the_right_runs_over_all_seeds(found):
    plain, sparse = accuracies.bands(found.runs)
    assert [one.configuration.store for one in (plain, sparse)] == ["p3_sync", "p3_dgc_0.01"]
    assert plain.epochs == ((0.6, 0.5, 0.7), (0.97, 0.96, 0.98), (0.98, 0.97, 0.99))
    assert plain.at_s == (2.0, 4.0, 6.0)
    assert plain.goal_s == (6.0, 4.0, 12.0) and sparse.goal_s is None  # which seed 0 never reaches


def test_differences_are_between_runs_of_the_same_seed(found):
    plain, sparse = accuracies.bands(found.runs)
    assert mean_difference(sparse.finals, plain.finals) == pytest.approx((-0.005, -0.02, 0.01))
    elsewhere = records.of_records([made.settings("accuracy"), training("dist_sync", 7, (1, 1, 1))])
    (other,) = accuracies.bands(elsewhere.runs)
    assert mean_difference(other.finals, plain.finals) is None


def test_table_tells_means_differences_and_the_papers(found):
    table = report.tables(found)[0]
    assert table.title == "accuracy: ResNet-14, 86 MB, 800 Mbit/s, 2 hosts"
    assert table.rows[1:] == [
        ["p3_sync", "0.9800 (0.9700..0.9900)", "-", "6.00 (4.00..12.0)", "6.00", "3"],
        ["p3_dgc_0.01", "0.9700 (0.9600..0.9800)", "-0.0050 (-0.0200..+0.0100)", "not reached", "3.00", "2"],
    ]
    assert "0.004 below P3" in table.notes[-1]


def test_accuracies_without_their_moments_are_refused():
    with pytest.raises(ValueError, match="3 accuracies at 2 moments"):
        records.of_records([made.settings("accuracy"), training("p3_sync", 0, (1, 1, 1), accuracy_at_s=[1.0, 2.0])])


def test_figure_draws_medians_over_epochs_and_over_seconds(found):
    pytest.importorskip("matplotlib", reason="p3 plot needs matplotlib: pip install matplotlib")
    from p3.measure.results import drawing, figures

    view = experiments.named("accuracy").figure
    by_epoch, by_seconds = figures.draw(view, found).axes
    orange = drawing.style("p3_dgc_0.01")[0]
    (epochs,) = [line for line in by_epoch.lines if line.get_color() == orange]
    (seconds,) = [line for line in by_seconds.lines if line.get_color() == orange]
    assert list(epochs.get_xdata()) == [1, 2, 3] and list(seconds.get_xdata()) == [1.0, 2.0, 3.0]
    assert list(epochs.get_ydata()) == list(seconds.get_ydata()) == pytest.approx([0.4, 0.9, 0.97])
    assert len(by_epoch.collections) == 2  # a band of each store
