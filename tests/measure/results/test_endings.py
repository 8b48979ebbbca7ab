"""What local steps cost in learning: the table over seeds, workers, steps between exchanges and codecs."""

import lab_results as made
import pytest

from p3.measure.bench import report
from p3.measure.results import endings, records


def training(store, hosts, seed, loss, **changes):
    fields = {"model": "gpt", "computation": "real", "compute_s": None, "bound_s": None, "bound_reason": None,
              "repeat": seed, "losses": [4.0, 3.0], "loss_at_s": [1.0, 2.0], "clip": 1.0, "result": "right",
              "hosts": hosts, "workers": hosts, "servers": hosts, "heldout_loss": loss}  # fmt: skip
    return made.run("local_steps", store, (0.5,), **{**fields, **changes})


RUNS = [
    training("p3_torch", 2, 0, 2.0, card_bytes=5e6), training("p3_torch", 2, 1, 4.0, card_bytes=5e6),
    training("p3_local_30_int4", 2, 0, 2.2, card_bytes=2e4), training("p3_local_30_int4", 2, 1, 4.0, card_bytes=2e4),
    training("p3_local_100:0.5", 4, 0, 3.0), training("p3_local_30_int4", 4, 0, 2.5),
    training("p3_torch", 4, 0, 2.5), training("p3_torch", 4, 1, 1.0, result="wrong", error="weights differ"),
]  # fmt: skip


@pytest.fixture
def found():
    return records.of_records([made.settings("local_steps"), *RUNS])


def test_endings_are_of_right_runs_and_compared_seed_by_seed(found):
    of_it = {(one.configuration.store, one.configuration.hosts): one for one in endings.endings(found.runs)}
    assert of_it["p3_torch", 4].losses == {0: 2.5} and of_it["p3_torch", 2].steps == 2
    above = of_it["p3_local_30_int4", 2].above(of_it["p3_torch", 2])
    assert above == pytest.approx((0.05, 0.0, 0.1))
    of_another_seed = records.of_records([made.settings("local_steps"), training("p3_torch", 2, 7, 1.0)])
    assert of_it["p3_torch", 2].above(endings.endings(of_another_seed.runs)[0]) is None


def test_table_has_a_row_for_each_course_and_columns_for_each_number_of_workers(found):
    (table,) = report.tables(found)
    assert table.title == "local_steps: GPT, 86 MB, 800 Mbit/s, clipped to a norm of 1"
    assert table.rows == [
        ["exchange every", "codec", "outer momentum", "loss, 2 workers", "against every step, 2 workers",
         "MB of a card, 2 workers", "loss, 4 workers", "against every step, 4 workers", "MB of a card, 4 workers"],
        ["1", "-", "-", "3.000 (2.000..4.000)", "-", "5.00", "2.500 (2.500..2.500)", "-", "-"],
        ["30", "int4", "0.9", "3.100 (2.200..4.000)", "+5.0% (+0.0..+10.0)", "0.0200", "2.500 (2.500..2.500)",
         "+0.0% (+0.0..+0.0)", "-"],
        ["100", "-", "0.5", "-", "-", "-", "3.000 (3.000..3.000)", "+20.0% (+20.0..+20.0)", "-"],
    ]  # fmt: skip
    assert "after 2 steps" in table.notes[0] and any("weights differ" in note for note in table.notes)
