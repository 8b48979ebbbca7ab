"""All processes of a job are told one rate and one number of connections, whatever each of them has measured."""

import math

import pytest

from p3.cluster.connections import frames
from p3.cluster.connections.frames import LinkShare
from p3.cluster.roster import Entry, Roster
from p3.cluster.windows import Windows

UNKNOWN = LinkShare(0.0, 0.0)


class Job:
    """Workers and servers, two processes to a machine; `tell` is a heartbeat of one, a second after the last one."""

    def __init__(self, machines):
        self.roster = Roster()
        self.roster.entries = [Entry(None, {"machine": name}) for name in machines for _ in range(2)]
        for entry in self.roster.entries:
            entry.watched = True
        self.windows = Windows(self.roster)
        self.now = 0.0

    def tell(self, number, rate, connections=3, after_s=1.0):
        self.now += after_s
        return self.windows.note(self.roster.entries[number], LinkShare(rate, connections), self.now)


def test_until_somebody_knows_a_rate_nothing_is_agreed():
    job = Job("ab")
    assert job.tell(0, 0.0) == UNKNOWN
    assert job.tell(1, 6e6) == LinkShare(6e6, 6)


def test_the_fastest_link_and_the_machine_with_most_connections_count():
    job = Job("abc")
    for number, rate in enumerate((6e6, 12e6, 5e6, 3e6, 1e6)):
        job.tell(number, rate)
    assert job.tell(5, 2e6, connections=5) == LinkShare(12e6, 8)


def test_all_hear_the_same_within_half_a_second_and_noise_is_no_news():
    job = Job("ab")
    job.tell(0, 10e6)
    assert job.tell(1, 30e6, after_s=0.1) == LinkShare(10e6, 3)
    assert job.tell(2, 20e6) == LinkShare(30e6, 6)
    assert job.tell(1, 31e6) == LinkShare(30e6, 6)
    assert job.tell(1, 32e6) == LinkShare(32e6, 6)
    assert job.tell(1, 15e6) == LinkShare(20e6, 6)


@pytest.mark.parametrize("how", ["left", "gone"])
def test_who_is_not_there_any_more_does_not_count(how):
    job = Job("ab")
    job.tell(0, 50e6)
    job.tell(2, 10e6)
    setattr(job.roster.entries[0], how, True)
    assert job.tell(3, 9e6) == LinkShare(10e6, 6)


@pytest.mark.parametrize("told", [math.nan, math.inf, -1.0, 1.1e12])
def test_numbers_that_make_no_sense_are_unknown(told):
    header = frames.with_link_share(bytes(frames.HEADER.size), LinkShare(told, told))
    assert frames.link_share_of(header) == UNKNOWN


def test_a_scheduler_that_took_anothers_place_agrees_on_nothing_before_all_have_come_back():
    job = Job("ab")
    job.roster.entries[3].watched = False
    assert job.tell(0, 6e6) == job.tell(1, 9e6) == UNKNOWN
    job.roster.entries[3].watched = True
    assert job.tell(0, 6e6) == LinkShare(9e6, 6)
