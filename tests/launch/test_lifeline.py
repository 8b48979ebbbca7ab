"""The line between the supervisors of one machine: who hears of whose end, in whatever order they come and go."""

import os
import select

import pytest

from p3.launch.launchers import lifeline
from p3.launch.launchers.lifeline import Lifeline
from p3.launch.launchers.place import Place


def line(local_rank, job):
    return Lifeline(Place("openmpi", local_rank, 2, local_rank, 2, 1, "0", job), "127.0.0.1:1")


@pytest.fixture
def job():
    return "openmpi-" + os.urandom(8).hex()


def ready(one):
    """Its next step, once there is something to read; fails if nothing comes."""
    assert select.select(one.sockets, [], [], 10)[0]
    return one.step()


def pair(job):
    first, second = line(0, job), line(1, job)
    assert second.step() and not second.waits
    assert ready(first)
    return first, second


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("ends", [0, 1])
def test_the_other_hears_how_one_has_ended(job, ends, good):
    both = pair(job)
    both[ends].close(good)
    assert ready(both[1 - ends]) == good
    assert both[1 - ends].step()  # said once
    both[1 - ends].close(True)


def test_a_second_one_that_comes_first_tries_again(job):
    second = line(1, job)
    assert second.step() and second.waits
    first = line(0, job)
    assert second.step() and not second.waits
    second.close(True)
    assert ready(first) and first.step()
    first.close(True)


def test_a_failure_before_the_first_one_listens_is_told_later(job):
    second = line(1, job)
    second.close(good=False)
    assert second.waits
    first = line(0, job)
    second.step()
    assert not second.waits and not ready(first)
    first.close(False)


def test_another_users_process_counts_for_nothing(job, monkeypatch):
    first, second = line(0, job), line(1, job)
    second.step()
    monkeypatch.setattr(lifeline, "source_of", lambda *_: None)
    assert ready(first) and first.sockets == [first._listener]
    second.close(False)
    assert first.step()
    first.close(True)


def test_the_first_of_a_machine_with_one_worker_listens_nowhere(job):
    alone = Lifeline(Place("slurm", 0, 2, 0, 1, 2, "0", job), "127.0.0.1:1")
    assert alone.sockets == [] and not alone.waits and alone.step()
