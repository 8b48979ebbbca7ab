"""Jobs that come back from a snapshot with another number of workers."""

import re
import shutil

import numpy as np
import plugin_jobs as jobs
import pytest

from p3.snapshots import reading, tree
from p3.worker.snapshots.resumed import Resumed, part_rank, takes_over_from

NUMBERS = [(before, now) for before in range(1, 8) for now in range(1, 8)]


# The rule


def test_every_residual_goes_to_one_worker_and_a_rank_that_stays_keeps_its_own():
    for before, now in NUMBERS:
        taken = [list(takes_over_from(rank, before, now)) for rank in range(now)]
        assert sorted(sum(taken, [])) == list(range(before)), (before, now)
        assert [ranks[0] for ranks in taken if ranks] == list(range(min(before, now))), (before, now)
        assert max(map(len, taken)) - min(map(len, taken)) <= 1, (before, now)


def test_a_rank_that_stays_has_its_own_part_and_a_new_one_worker_0s():
    for before, now in NUMBERS:
        parts = [part_rank(rank, before) for rank in range(now)]
        assert parts == [rank if rank < before else 0 for rank in range(now)], (before, now)


def test_what_resume_returns_is_the_pair_that_scripts_take_apart():
    round, state = resumed = Resumed(4, {"a": 1}, 3, 2, lambda rank: {"a": rank})
    assert (round, state) == resumed == (4, {"a": 1})
    assert (resumed.workers, resumed.from_rank, resumed.state_of(1)) == (3, 2, {"a": 1})
    changed = resumed.map(lambda state: state["a"])
    assert changed == (4, 1) and changed.workers == 3 and changed.state_of(2) == 2
    for rank in (3, -1):
        with pytest.raises(ValueError, match="a job with 3 workers: it has no rank %d" % rank):
            resumed.state_of(rank)
    assert Resumed(0, {}).workers == 0


# Jobs, without MXNet


def run(directory, workers, servers, *arguments, **variables):
    variables = {"P3_SNAPSHOT_DIR": str(directory), "P3_SNAPSHOT_EVERY": "1", **variables}
    return jobs.run_p3(workers, servers, jobs.python("regrouped.py", *arguments), **variables)


def ends(output):
    """[(round it began at, workers of that snapshot, whose state, values)] of the workers, in the order of ranks."""
    pattern = r"\[worker (\d)\] from (\d+) of (\d+), rank (\d+): (\w+)"
    return [tuple(found[1:]) for found in sorted(re.findall(pattern, output))]


def test_a_job_comes_back_with_more_workers_and_then_with_fewer_to_the_bits_of_one_that_never_stopped(tmp_path):
    status, output = run(tmp_path / "whole", 2, 1, "plain", 9, 0)
    assert status == 0, output
    values = ends(output)[0][-1]
    directory = tmp_path / "snapshots"
    status, output = run(directory, 2, 2, "plain", 9, 3)
    assert status == 137, output
    status, output = run(directory, 4, 3, "plain", 9, 6)
    assert status == 137, output
    assert "of round 3 is of a job with 2 workers; this one has 4." in output
    assert output.count("ranks from 2 on are new") == 1
    shutil.copytree(directory, tmp_path / "copy")
    status, output = run(directory, 3, 1, "plain", 9, 0)
    assert status == 0, output
    assert ends(output) == [("6", "4", str(rank), values) for rank in range(3)]
    assert output.count("ranks from 3 on are gone") == 1
    states = [{"rank": rank, "of": 4} for rank in range(4)]
    assert all("state %s of %s" % (states[rank], states) in output for rank in range(3)), output
    status, output = run(tmp_path / "copy", 6, 2, "plain", 9, 0)
    assert status == 0, output
    assert ends(output) == [("6", "4", str(rank if rank < 4 else 0), values) for rank in range(6)]


KINDS = ("2bit", "2bit-average", "2bit-mean", "1bit", "int8", "int4", "topk", "dgc")


def left_out(directory, round):
    """What compression has left out of key "w", by kind and rank."""
    snapshot = reading.Snapshot(str(directory), round).verify()
    found = [[] for _ in KINDS]
    for rank in range(snapshot.workers):
        for store, name, residual in tree.decode(snapshot.worker(rank))["residuals"]:
            if name == "w":
                found[store].append(residual)
    return found


def resumed(directory, workers, aggregates):
    """(kind, what each worker had left out, what each then has) of a job that comes back with that number of workers.
    `aggregates`: both times, whether one worker encodes for all, as all share a machine."""
    for number, steps, aggregate in zip(workers, (3, 0), aggregates):
        status, output = run(directory, number, 2, ",".join(KINDS), steps, 0, P3_LOCAL_AGGREGATION=aggregate)
        assert status == 0, output
    found = list(zip(KINDS, left_out(directory, 3), left_out(directory, 4)))
    for _kind, old, new in found:
        assert (len(old), len(new)) == workers
    return found


@pytest.mark.parametrize("aggregates", ["11", "10", "01"])
@pytest.mark.parametrize("workers", [(3, 2), (2, 3), (3, 3)])
def test_what_a_machine_has_left_out_stays_owed_to_the_weights(tmp_path, workers, aggregates):
    before, now = workers
    for kind, old, new in resumed(tmp_path, workers, aggregates):
        if kind == "dgc":  # each worker has its own
            assert all(len(residual) > 2 for residual in (*old, *new))
            continue
        for some, aggregate in ((old, aggregates[0]), (new, aggregates[1])):
            kept = [len(residual) > 0 for residual in some]
            assert kept == ([True, *[False] * (len(some) - 1)] if aggregate == "1" else [True] * len(some)), kind
        shares = np.float32(now / before if "-" in kind else 1)
        had, has = (sum(residual for residual in some if len(residual)) for some in (old, new))
        assert had.any(), kind
        np.testing.assert_allclose(has, shares * had, rtol=1e-6, atol=1e-6, err_msg=kind)
        if workers == (3, 3) and aggregates == "11":
            np.testing.assert_array_equal(has, had, kind)


@pytest.mark.parametrize("workers", [(3, 2), (2, 3)])
def test_what_compression_has_left_out_stays_owed_to_the_weights(tmp_path, workers):
    before, now = workers
    for kind, old, new in resumed(tmp_path, workers, "00"):
        assert all(residual.any() for residual in old), kind
        if kind == "dgc":  # behind u and v: how far the warm-up is
            rounds = [residual[-2:].tobytes() for residual in (*old, *new)]
            assert len(set(rounds)) == 1
            old, new = ([residual[:-2] for residual in some] for some in (old, new))
        shares = now / before if "-" in kind else 1
        for rank, residual in enumerate(new):
            wanted = np.float32(shares) * sum((old[gone] for gone in range(rank, before, now)), np.zeros_like(residual))
            np.testing.assert_array_equal(residual, wanted, kind)
        np.testing.assert_allclose(sum(new), shares * sum(old), rtol=1e-6, atol=1e-6, err_msg=kind)


# Real trainings, with MXNet


def said(output, when):
    """{rank: (weights, statistics)}"""
    found = re.findall(r"worker (\d) %s: weights (\w+) statistics (\w+)" % when, output)
    return {int(rank): (weights, statistics) for rank, weights, statistics in found}


def test_every_kind_of_training_comes_back_with_more_workers_and_then_with_one(tmp_path):
    pytest.importorskip("mxnet")
    kinds = "momentum adam nadam scheduler down updates_on_trainer updates_on_store float16 sparse".split()
    variables = {"P3_SNAPSHOT_EVERY": "2"}

    def run(directory, workers, servers, kill_at):
        variables["P3_SNAPSHOT_DIR"] = str(tmp_path / directory)
        return jobs.run_p3(workers, servers, jobs.python("regrouped_training.py", 6, kill_at, *kinds), **variables)

    status, output = run("whole", 1, 1, 0)
    assert status == 0, output
    whole = said(output, "behind 6")[0]
    status, output = run("snapshots", 2, 2, 2)
    assert status == 137, output
    two = said(output, "behind 2")
    assert two[0][0] == two[1][0] and two[0][1] != two[1][1], output
    status, output = run("snapshots", 4, 1, 4)
    assert status == 137, output
    assert said(output, "at 2 of 2") == {0: two[0], 1: two[1], 2: two[0], 3: two[0]}, output
    four = said(output, "behind 4")
    status, output = run("snapshots", 1, 2, 0)
    assert status == 0, output
    assert said(output, "at 4 of 4") == {0: four[0]}, output
    assert said(output, "behind 6") == {0: whole}, output


@pytest.mark.parametrize("aggregates, before", [("0", [0.125, 0.25]), ("1", [0.375, None])])
def test_what_compression_has_left_out_of_a_gluon_training_goes_to_the_worker_that_stays(tmp_path, aggregates, before):
    pytest.importorskip("mxnet")
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path), "P3_SNAPSHOT_EVERY": "1", "P3_LOCAL_AGGREGATION": aggregates}
    command = jobs.python("regrouped_rest.py", "mxnet")
    for status, output in (jobs.run_p3(2, 1, command, **variables), jobs.run(command, **variables)):
        assert status == 0, output
    for round, wanted in ((1, before), (2, [0.375])):
        parts = [tree.decode(reading.Snapshot(str(tmp_path), round).worker(rank)) for rank in range(len(wanted))]
        residuals = [part["stores"][0]["residuals"].get("w", [None]) for part in parts]
        assert [set(residual) for residual in residuals] == [{left_out} for left_out in wanted]
