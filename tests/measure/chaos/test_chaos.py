"""`p3 chaos`: a few cells of the matrix, with short time-outs; the whole of it is a command's work."""

import json

import numpy as np
import pytest
from lab_traces import needs_lab

from p3 import cli
from p3.measure.chaos import job, run, tables
from p3.measure.chaos.matrix import (
    BLOWS, CUT, DEPARTS, FAULTS, LOSES_SERVER, KILL, MOMENTS, NUMPY, REGAINS, ROLES, TRAININGS, Cell, Victim, cells,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_imports")

# Longer than a machine pauses, and than it takes to start a job.
QUICK = {"P3_TIMEOUT_S": "6", "P3_RENDEZVOUS_TIMEOUT_S": "60"}


def judged(role, rank, fault, moment, outcome="raised", training=NUMPY, by=""):
    record = run.run(Cell(Victim(role, rank), fault, moment, training, by), 1, QUICK)
    assert record["hit"] is not None, record
    assert (record["weights"], sum(record["left"].values())) == ("right", 0), record
    assert record["outcome"] == outcome, record
    return record


def test_the_matrix_has_every_fault_at_every_moment_for_every_role():
    all_cells = list(cells(ROLES, tuple(FAULTS), tuple(MOMENTS), tuple(TRAININGS)))
    found = {(cell.victim.role, cell.fault, cell.moment) for cell in all_cells if cell.training == NUMPY}
    faults = [fault for fault in FAULTS if fault not in (*DEPARTS, *LOSES_SERVER, "gone", "back")]
    machines = {(role, fault) for role, fault, _ in found if fault in ("gone", "back")}
    assert machines == {("worker", "gone"), ("worker", "back")}
    found = {one for one in found if one[1] in faults}
    everything = {(role, fault, moment) for role in ROLES for fault in faults for moment in MOMENTS}
    # A job that has not begun is not started again.
    not_restarted = {("scheduler", "restart", moment) for moment in MOMENTS}  # but outlived
    assert everything - found == not_restarted | {(role, "restart", "rendezvous") for role in ROLES}


def test_the_matrix_brings_every_training_back_and_goes_on_without_each_worker():
    gluon = {cell for cell in cells(ROLES, tuple(FAULTS), tuple(MOMENTS), tuple(TRAININGS)) if cell.training != NUMPY}
    restarted = {cell.training for cell in gluon if cell.fault == "restart"}
    departed = {(cell.training, cell.victim.rank) for cell in gluon if cell.fault == "depart"}
    rejoined = {(cell.training, cell.victim.rank) for cell in gluon if cell.fault == "rejoin"}
    assert {cell.fault for cell in gluon} == {"restart", "depart", "rejoin"}
    assert restarted == TRAININGS.keys() - {NUMPY}
    assert departed == rejoined == {(training, rank) for training in restarted for rank in range(3)}


def test_the_matrix_loses_every_worker_in_every_way_at_every_moment_of_a_job_that_goes_on():
    departing = list(cells(ROLES, ("depart",), tuple(MOMENTS), (NUMPY,)))
    found = {(cell.victim.role, cell.victim.rank, cell.moment, cell.blow) for cell in departing}
    moments = MOMENTS.keys() - {"rendezvous"}  # a job that has not begun ends
    assert found == {("worker", rank, moment, blow) for rank in range(3) for moment in moments for blow in BLOWS}
    assert len(found) == len(departing)
    returning = [cell for cell in cells(ROLES, ("return",), tuple(MOMENTS), (NUMPY,)) if cell.returns]
    assert {(*cell.victim, cell.moment, cell.blow) for cell in returning} == {one for one in found if one[3] != KILL}
    assert len(returning) == len(found) * 2 // 3


def test_who_is_back_may_have_trained_on_and_been_given_up_in_any_later_round():
    cell, rounds = Cell(Victim("worker", 1), "return", "snapshot", NUMPY, CUT), 6
    until = {last: [[0, 1, 2] if number <= last else [0, 2] for number in range(1, rounds + 1)] for last in (3, 4, 5)}
    values = {last: [np.full(1, job.weights(history, key), np.float32) for key in range(job.KEYS)]
              for last, history in until.items()}  # fmt: skip
    told = {last: job.judged(cell, [[0, 1, 2]] * rounds, landings)["right"] for last, landings in values.items()}
    assert told == {3: False, 4: True, 5: True}  # it was struck behind round 4


def test_a_server_killed_while_gradients_leave():
    record = judged("server", 1, "kill", "mid-push")
    assert 0 < record["hit"]["sent"] < record["hit"]["slices"]
    assert record["p3_run"][0].startswith("server 1 ended with signal SIGKILL")
    assert record["names_victim"] == len(record["errors"]) == 4


def test_a_worker_stopped_while_values_land():
    record = judged("worker", 1, "stop", "mid-broadcast")
    assert 0 < record["hit"]["landed"] < record["hit"]["slices"]
    assert record["names_victim"] == record["names_round"] == len(record["errors"]) == 4
    assert record["endings"]["worker 1"] == "signal SIGTERM"  # woken, to end


@needs_lab
def test_a_worker_cut_off_raises_like_all_others():
    record = judged("worker", 0, "cut", "mid-push")
    assert set(record["errors"]) == {"worker 0", "worker 1", "server 0", "server 1", "scheduler"}
    assert "nor from anyone else" in record["errors"]["worker 0"], record["errors"]


def test_a_job_comes_back_when_a_server_is_killed_while_a_snapshot_is_written():
    record = judged("server", 0, "restart", "snapshot", outcome="came back")
    assert (record["code"], record["rounds"]) == (0, 6) and record["begun"] in (2, 4), record


@needs_lab
@pytest.mark.parametrize("fault, workers", [("gone", 1), ("back", 2)])
def test_a_job_goes_on_without_a_machine_and_with_it_when_it_is_back(fault, workers):
    record = judged("worker", 1, fault, "mid-push", outcome="came back")
    assert (record["code"], record["rounds"]) == (0, 8) and record["begun"] >= 2, record
    assert any("with 1 instead of 2 workers" in line for line in record["p3_run"]), record
    assert any("with 2 instead of 1 workers" in line for line in record["p3_run"]) == (fault == "back"), record
    assert sum(line.startswith("leaving out host ") for line in record["p3_run"]) == 1, record


@pytest.mark.parametrize("rank, moment, by", [
    (0, "mid-broadcast", "kill"), (2, "exit", "stop"), pytest.param(1, "first-round", "cut", marks=needs_lab),
])  # fmt: skip
def test_the_others_go_on_without_a_worker(rank, moment, by):
    record = judged("worker", rank, "depart", moment, "departed", by=by)
    assert (record["code"], record["rounds"], record["errors"]) == (0, 6, {}), record
    assert record["p3_run"][0].startswith(f"worker {rank} ") and "goes on without it" in record["p3_run"][0], record
    assert 0 < record["on_s"] <= record["end_s"], record


@pytest.mark.parametrize("moment, by", [("mid-push", "stop"), pytest.param("mid-broadcast", "cut", marks=needs_lab)])
def test_the_others_go_on_with_a_worker_that_returns_or_without_it(moment, by):
    record = judged("worker", 1, "return", moment, "returned", by=by)
    assert (record["code"], record["rounds"]) == (0, 6) and record["on_s"] > 0, record


def test_another_process_joins_in_the_place_of_a_worker():
    record = judged("worker", 0, "rejoin", "mid-push", "rejoined")
    assert (record["code"], record["rounds"], record["begun"], record["errors"]) == (0, 6, 3, {}), record


def test_the_matrix_loses_every_server_in_every_way_at_every_moment_of_a_job_that_goes_on():
    inheriting = list(cells(ROLES, LOSES_SERVER, tuple(MOMENTS), (NUMPY,)))
    found = {(*cell.victim, cell.fault, cell.moment, cell.blow) for cell in inheriting}
    moments = MOMENTS.keys() - {"rendezvous"}  # a job that has not begun ends
    assert found == {
        ("server", rank, fault, moment, blow)
        for rank in range(2) for fault in LOSES_SERVER for moment in moments for blow in BLOWS
        # Nobody comes back to a job that ends; and who is cut off may not have been lost at all.
        if fault not in REGAINS or (moment != "exit" and blow != CUT)
    }  # fmt: skip
    assert len(found) == len(inheriting)


@pytest.mark.parametrize("fault, moment, by", [
    ("inherit", "mid-push", "kill"), ("inherit-sums", "mid-broadcast", "kill"),
    ("inherit", "mid-broadcast", "stop"), pytest.param("inherit-sums", "mid-push", "cut", marks=needs_lab),
])  # fmt: skip
def test_another_server_takes_over(fault, moment, by):
    record = judged("server", 1, fault, moment, outcome="inherited", by=by)
    assert record["on_s"] is not None and (record["code"], record["rounds"]) == (0, 6), record


@pytest.mark.parametrize("rank, fault, by", [(0, "regain", "kill"), (1, "regain-sums", "stop")])
def test_servers_come_back_one_after_the_other(rank, fault, by):
    record = judged("server", rank, fault, "mid-push", outcome="regained", by=by)
    assert (record["code"], record["rounds"], record["errors"]) == (0, 6, {}), record
    lost = [line.split(" ")[1] for line in record["p3_run"] if line.startswith("server ")]
    assert {str(rank), str(1 - rank)} <= set(lost), record


@pytest.mark.parametrize("rank, fault", [(0, "grow"), (2, "grow-heir")])
def test_a_further_process_joins_although_others_die_meanwhile(rank, fault):
    record = judged("worker", rank, fault, "mid-push", outcome="grew")
    assert (record["code"], record["rounds"]) == (0, 6), record
    told = "worker " if fault == "grow" else "server "
    assert sum(line.startswith(told) for line in record["p3_run"]) == (2 if fault == "grow" else 1), record
    assert record["p3_run"][0].startswith(f"worker {rank} ended with signal SIGKILL"), record


def test_the_second_worker_that_departs_is_missed_in_the_last_round_that_had_it_or_in_none():
    cell = Cell(Victim("worker", 0), "grow", "mid-push")
    assert (cell.course.hit_in, cell.second) == (3, 2)
    history = [[0, 1, 2]] * 3 + [[1, 2, 3]] * 2 + [[1, 3]]
    of_slices = [[0, 1, 2]] * 2 + [[1, 2]] + [[1, 2, 3], [1, 3]] + [[1, 3]]

    def is_right(one):
        landings = [np.full(2, job.weights(one, key), np.float32) for key in range(job.KEYS)]
        return job.judged(cell, history, landings)["right"]

    assert is_right(history) and is_right(of_slices)
    assert not is_right([[0, 1, 2]] * 3 + [[1, 3]] * 3)
    assert not is_right([[0, 1, 2]] * 3 + [[1, 2, 3]] * 3)


def test_another_process_joins_although_a_server_dies_meanwhile():
    judged("worker", 1, "rejoin-heir", "mid-push", outcome="rejoined")


def test_whoever_joins_takes_part_in_all_rounds_but_that_in_which_its_predecessor_was_lost():
    cell = Cell(Victim("worker", 1), "rejoin", "mid-push")
    history = [[0, 1, 2]] * cell.course.rounds
    lacks = [[0, 2] if number == cell.course.hit_in else ranks for number, ranks in enumerate(history, 1)]

    def is_right(one):
        landings = [np.full(2, job.weights(one, key), np.float32) for key in range(job.KEYS)]
        return job.judged(cell, history, landings)["right"]

    assert is_right(history) and is_right(lacks)
    assert not is_right([[0, 2] if number >= cell.course.hit_in else ranks for number, ranks in enumerate(history, 1)])


def test_a_slice_of_who_departs_is_in_the_sums_of_the_round_under_way_or_it_is_not():
    cell = Cell(Victim("worker", 1), "depart", "mid-push", by="kill")
    hit, history = cell.course.hit_in, [[0, 1, 2]] * cell.course.rounds
    without, having = ([[0, 1, 2]] * whole + [[0, 2]] * (cell.course.rounds - whole) for whole in (hit - 1, hit))

    def is_right(*of_slices):
        landings = [np.array([job.weights(one, key) for one in of_slices], np.float32) for key in range(job.KEYS)]
        return job.judged(cell, history, landings)["right"]

    assert is_right(without, having) and is_right(having, having)
    assert not is_right(without, history) and not is_right(without, [[0, 2]] * len(history))


# One worker's first call after it has come back is join(): where workers update, and where the servers do.
@pytest.mark.timeout(320)
@pytest.mark.parametrize("training", ["fp16-sums", "joins"])
def test_a_job_comes_back_before_a_join(training):
    pytest.importorskip("mxnet")
    record = judged("server", 0, "restart", "mid-push", "came back", training)
    assert (record["code"], record["begun"], record["rounds"]) == (0, 3, 12), record


def test_other_bits_after_the_same_step_are_wrong_weights():
    same = [{"round": 1, "digest": "a"}, {"round": 1, "digest": "a"}, {"round": 2, "digest": "b"}]
    assert run._are_right(same)
    assert not run._are_right([*same, {"round": 2, "digest": "c"}])
    assert run._are_right([{"round": 1, "right": True}]) and not run._are_right([{"round": 1, "right": False}])


def test_a_server_that_is_left_alone_by_a_stopped_scheduler_ends_as_well():
    record = judged("scheduler", 0, "stop", "exit")
    assert {record["endings"][name] for name in ("server 0", "server 1")} == {"exit code 1"}, record


def test_servers_say_why_they_end_before_they_wait_for_a_stopped_scheduler():
    """With the time-outs of users: behind the workers' errors `p3 run` waits less than those."""
    record = run.run(Cell(Victim("scheduler", 0), "stop", "mid-push"), 1)
    assert (record["outcome"], record["mute"]) == ("raised", []), record


def test_the_tables_count_what_went_wrong(tmp_path, capsys):
    good = {
        "role": "server", "rank": 0, "fault": "kill", "moment": "exit", "code": 137, "p3_run": ["x"], "error_s": 0.2,
        "end_s": 1.0, "names_victim": 2, "names_round": 1, "errors": {"a": "", "b": ""},
    }  # fmt: skip
    path = tmp_path / "records"
    path.write_text("".join(json.dumps(dict(good, outcome=outcome)) + "\n" for outcome in ("raised", "wrong", "hung")))
    assert cli.main(["chaos", "--markdown", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| a weight was wrong | 1 |" in shown and "| hung | 1 |" in shown
    assert "3 runs: 0.2 (0.2), 1.0 (1.0); **1 wrong, 1 hung**" in shown
    went_on = dict(good, role="worker", fault="depart", blow="stop", on_s=11.5, errors={}, outcome="departed")
    assert "| exit |  | 1 run: 11.5 (11.5), 1.0 (1.0) |  |" in tables.markdown([went_on])
    assert shown.strip() == tables.markdown([json.loads(line) for line in path.read_text().splitlines()])


@pytest.mark.parametrize("options", [["--faults", "flood"], ["--jobs", "0"], ["--moments", "exit,exit"]])
def test_wrong_options_are_refused(options, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["chaos", *options])
    assert caught.value.code == 2 and options[0] in capsys.readouterr().err
