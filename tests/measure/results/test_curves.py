"""Losses of real training: when a loss is reached, whose curve is another one, and what tables and figures show."""

import sys
import time

import lab_results as made
import pytest

from p3.measure.bench import experiments, measured, report
from p3.measure.bench.configuration import Configuration
from p3.measure.jobs.job import Job, LocalHost
from p3.measure.jobs.stores import STORES
from p3.measure.jobs.watched import Watched
from p3.measure.results import curves, records

FALLING = [4.0 - 0.1 * step for step in range(30)]
SECONDS = [0.5 * (step + 1) for step in range(30)]


def lesson(store, repeat=0, slower=1.0, **changes):
    """A run of `learn` whose steps take `slower` times half a second."""
    at_s = [slower * one for one in SECONDS]
    fields = {"model": "gpt", "computation": "real", "compute_s": 0.4, "bound_s": None, "bound_reason": None,
              "repeat": repeat, "goal_loss": 2.0, "losses": FALLING, "loss_at_s": at_s, "cpu_s": 0.9 * slower,
              "result": "right"}  # fmt: skip
    return made.run("learn", store, (0.5 * slower,), **{**fields, **changes})


@pytest.fixture
def read():
    return lambda *lines: records.of_records([made.settings("learn"), *lines])


def test_loss_is_reached_when_the_mean_of_ten_steps_is():
    losses = [3.0] * 10 + [1.0] * 10
    assert curves.smooth(losses)[8:13] == pytest.approx([3.0, 3.0, 2.8, 2.6, 2.4])
    at_s = [float(step) for step in range(20)]
    assert curves.seconds_to(2.4, losses, at_s) == 12.0
    assert curves.seconds_to(1.0, losses, at_s) == 19.0
    assert curves.seconds_to(0.9, losses, at_s) is None
    assert curves.seconds_to(2.0, [1.0, *losses], [-1.0, *at_s]) == 14.0  # one easy batch is no success


def test_a_run_whose_losses_are_others_is_wrong_and_says_where():
    agreement = curves.Agreement()
    first, same, other = lesson("ddp_1"), lesson("p3_torch"), lesson("p3_torch", losses=[*FALLING[:20], *[9.0] * 10])
    for record in (first, same, other):
        agreement.check("here", record)
    assert [record["result"] for record in (first, same, other)] == ["right", "right", "wrong"]
    assert "p3_torch: the loss of step 29 is not that of the first run, ddp_1" in other["error"]
    elsewhere = lesson("p3_torch", losses=FALLING[::-1])
    agreement.check("another configuration", elsewhere)
    assert elsewhere["result"] == "right"


def test_curves_are_medians_of_the_right_runs(read):
    found = read(*(lesson("p3_torch", repeat, slower) for repeat, slower in enumerate((3.0, 1.0, 2.0))),
                 lesson("p3_torch", 3, 9.0, result="wrong", error="diverged"))  # fmt: skip
    (curve,) = curves.curves(found.runs)
    assert curve.at_s == pytest.approx([2 * one for one in SECONDS])
    assert (curve.low_s[3], curve.high_s[3]) == pytest.approx((SECONDS[3], 3 * SECONDS[3]))
    # The mean of ten steps, 4.5 steps behind the last of them, is 2.0 there.
    reached = curves.seconds_to(2.0, FALLING, SECONDS)
    assert curve.goal_s == pytest.approx((2 * reached, reached, 3 * reached))


def test_table_compares_with_the_best_ddp_and_tells_the_cpu(read):
    stores = {"ddp_1": 1.5, "ddp_25": 1.2, "p3_torch": 1.0}
    _, cpu, goals = report.tables(read(*(lesson(store, slower=slower) for store, slower in stores.items())))
    assert cpu.title.endswith(": CPU seconds") and cpu.rows[1][1:] == [
        "1.35 (1.35..1.35)", "1.08 (1.08..1.08)", "0.900 (0.900..0.900)",
    ]  # fmt: skip
    assert goals.rows[0] == ["training", "ddp_1", "ddp_25", "p3_torch", "over best DDP"]
    assert goals.rows[1][0] == "GPT at 800 Mbit/s, to 2" and goals.rows[1][-1] == "1.20x"


def test_loss_that_was_not_reached_is_told(read):
    table = report.tables(read(lesson("ddp_1"), lesson("p3_torch", losses=[3.0] * 30)))[-1]
    assert table.rows[1][-2:] == ["not reached", "-"]


def test_records_without_the_newer_fields_are_still_read(read):
    (one,) = read(made.run("learn")).runs
    assert one.losses is one.goal_loss is one.cpu_s is None


def test_losses_without_their_moments_are_refused(read):
    with pytest.raises(ValueError, match="30 losses at 29 moments"):
        read(lesson("p3_torch", loss_at_s=SECONDS[1:]))


def test_figure_draws_losses_over_seconds(read):
    pytest.importorskip("matplotlib", reason="p3 plot needs matplotlib: pip install matplotlib")
    from p3.measure.results import drawing, figures

    figure = figures.draw(experiments.named("learn").figure, read(lesson("ddp_25", slower=1.2), lesson("p3_torch")))
    losses, cpu = figure.axes
    drawn = {line.get_color(): line for line in losses.lines if len(line.get_xdata()) == len(SECONDS)}
    (blue, green) = (drawn[drawing.style(store)[0]] for store in ("ddp_25", "p3_torch"))
    assert list(green.get_xdata()) == pytest.approx(SECONDS)
    assert list(blue.get_xdata()) == pytest.approx([1.2 * one for one in SECONDS])
    assert list(green.get_ydata()) == list(blue.get_ydata()) == pytest.approx(curves.smooth(FALLING))
    assert [bar.get_height() for bar in cpu.patches] == pytest.approx([0.9 * 1.2, 0.9])


def lines_of(begin, *steps):
    """What a worker writes of steps that end so long after its begin, with these losses."""
    ends = [begin + end for end, _ in steps]
    return [{"kind": "iteration", "warmup": False, "start": start, "seconds": end - start, "loss": loss}
            for start, end, (_, loss) in zip([begin, *ends], ends, steps)]  # fmt: skip


def test_mean_loss_is_known_when_the_slowest_worker_has_read_it():
    workers = [lines_of(100.0, (1.0, 4.0), (2.5, 3.0)), lines_of(7.0, (1.5, 2.0), (2.0, 1.0))]
    assert measured.curve(workers, False) == {"losses": [3.0, 2.0], "loss_at_s": pytest.approx([1.5, 2.5])}


def test_of_workers_that_are_apart_a_step_is_as_many_losses_whoever_has_read_them():
    workers = [lines_of(100.0, (1.0, 4.0), (2.0, 3.0)), lines_of(7.0, (3.0, 2.0), (9.0, 1.0))]
    assert measured.curve(workers, True) == {"losses": [3.5, 1.5], "loss_at_s": pytest.approx([2.0, 9.0])}


def test_ways_to_a_loss_are_told_in_steps_and_seconds():
    trained = [dict(lesson(store, slower=slower), experiment="compute", losses=losses)
               for store, slower, losses in (("p3_sync", 1.0, FALLING), ("p3_ssp_1", 0.5, FALLING),
                                             ("p3_async", 0.5, [3.0] * 30))]  # fmt: skip
    table = report.tables(records.of_records([made.settings("compute"), *trained]))[-1]
    assert table.title.startswith("compute: to a loss of 2: ")
    assert [[cell.partition(" (")[0] for cell in row] for row in table.rows] == [
        ["store", "steps", "seconds", "steps a second"],
        ["p3_sync", "26.0", "13.0", "2.00"],
        ["p3_ssp_1", "26.0", "6.50", "4.00"],
        ["p3_async", "not reached", "-", "-"],
    ]


def test_rate_makes_communication_as_long_as_computation():
    configuration = Configuration("learn", "gpt", 1.0, None, None, 0.0, 2, 50000, computation="real")
    made = experiments.balanced(configuration, 10_000_000, 0.4)
    assert (made.rate_mbit, made.compute_s) == (200.0, 0.4) and not made.is_emulated


# Burns 0.6 s when it has been seen, and ends when it has been seen again.
BURNS = """
import json, os, sys, time
def tell(**what):
    print(json.dumps(what), flush=True)
def wait(name):
    while not os.path.exists(os.path.join(sys.argv[1], name)):
        time.sleep(0.01)
tell()
wait("begin")
used = time.process_time()
while time.process_time() < used + 0.6:
    pass
tell(used=time.process_time() - used)
wait("end")
"""


def test_cpu_of_a_job_is_that_of_all_its_processes(tmp_path):
    here = LocalHost("127.0.0.1")
    command = [sys.executable, "-c", BURNS, str(tmp_path)]
    with Job(STORES["alone"], [here, here], command, root=here, port=1, folder=tmp_path, omp_threads=1) as job:
        job.start()
        watched, seen = Watched(job), []

        def watch():
            told = min(len(job.lines("worker %d" % number)) for number in range(2))
            before = time.monotonic()
            watched.sample()
            if told == 1 and not seen:
                seen.append(before)
                (tmp_path / "begin").touch()
            elif told == 2 and len(seen) == 1:
                seen.append(time.monotonic())
                (tmp_path / "end").touch()

        job.wait(60, watch)
        burnt = [job.lines("worker %d" % number)[1] for number in range(2)]
    begin, end = seen
    assert watched.cpu_s(begin, end) == pytest.approx(sum(one["used"] for one in burnt), rel=0.25)
    assert watched.cpu_s(end, time.monotonic()) < 0.2
