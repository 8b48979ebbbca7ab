"""The explorers of who leaves and who comes (test_departing.py, test_entering.py) find each of these faults, within as
many programs as they try."""

import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

sys.path.insert(0, str(Path(__file__).parent))
import test_departing
import test_entering

from p3.cluster.agreement import Agreement
from p3.cluster.departures import Departures
from p3.cluster.entrants import Entrants


LEAVING = test_departing.test_whoever_is_left_comes_to_the_end
COMING = test_entering.test_whoever_is_left_comes_to_the_end_with_those_that_have_entered


def barriers_wait_for_who_is_gone(monkeypatch):
    def without(agreement, number, node):
        agreement._barriers[number].discard(node)
        return []

    monkeypatch.setattr(Agreement, "_without_in_barrier", without)


def snapshots_wait_for_who_is_gone(monkeypatch):
    monkeypatch.setattr(Agreement, "_snapshot_without", lambda agreement, given_up: [])


def the_next_first_worker_has_not_said_what_the_former_one_had(monkeypatch):
    monkeypatch.setattr(Agreement, "_take_over", lambda agreement, former, first: None)


def who_enters_is_the_first(monkeypatch):
    enter = Agreement.enter

    def first(agreement, node):
        past = enter(agreement, node)
        agreement._workers.insert(0, agreement._workers.pop())
        return past

    monkeypatch.setattr(Agreement, "enter", first)


def who_enters_hears_nothing_of_the_past(monkeypatch):
    monkeypatch.setattr(Agreement, "_past", lambda agreement: [])


def one_that_dies_on_the_way_is_waited_for(monkeypatch):
    monkeypatch.setattr(Entrants, "drop", lambda entrants, node: node in entrants._admissions)


def one_server_alone_has_to_dismiss_a_worker(monkeypatch):
    def without(departures, server, its):
        over = [one for one in its if one in departures._under_way]
        departures._under_way = [one for one in departures._under_way if one not in over]
        return [one for one in over if one.is_member]

    monkeypatch.setattr(Departures, "_without", without)


FAULTS = [
    (LEAVING, barriers_wait_for_who_is_gone),
    (LEAVING, snapshots_wait_for_who_is_gone),
    (LEAVING, the_next_first_worker_has_not_said_what_the_former_one_had),
    (COMING, who_enters_is_the_first),
    (COMING, who_enters_hears_nothing_of_the_past),
    (COMING, one_that_dies_on_the_way_is_waited_for),
    (COMING, one_server_alone_has_to_dismiss_a_worker),
]


@pytest.mark.parametrize("explorer, fault", FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_the_explorer_finds(explorer, fault, monkeypatch):
    fault(monkeypatch)
    explore = given(st.data())(explorer.hypothesis.inner_test)
    tries = settings(max_examples=600, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    with pytest.raises(Exception):  # noqa: B017  whatever the explorer takes for one
        tries(explore)()
