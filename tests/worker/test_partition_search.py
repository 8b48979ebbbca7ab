"""The search for the number of partitions, fed with step times that are known."""

import random

import pytest

from p3.settings import Settings
from p3.frontend import partitions
from p3.frontend.partitions import PartitionSearch, fit, minimum_of
from p3.worker.session import Session


def search(time_of, servers=4, rows=100000, steps=12):
    """Runs a search to its end; returns it and the numbers of partitions that it went through."""
    found = PartitionSearch(servers, rows, steps=steps, warm_up=3)
    visited = [found.partitions]
    for _ in range(100000):
        if found.finished:
            return found, visited
        changed = found.observe(time_of(found.partitions))
        if changed is not None:
            assert changed == found.partitions
            visited.append(changed)
    raise AssertionError("the search does not end")


def model(a, b, c):
    return lambda partitions: a + b / partitions + c * partitions


@pytest.mark.parametrize("a, b, c", [(1, 10, 0.1), (0.1, 64, 0.004), (2, 0.01, 0.5), (1, 0, 0), (1, 3, 3)])
@pytest.mark.parametrize("servers", [1, 2, 4, 16])
def test_ends_within_5_percent_of_the_best(a, b, c, servers):
    time_of = model(a, b, c)
    found, _ = search(time_of, servers)
    assert time_of(found.partitions) <= 1.05 * min(time_of(partitions) for partitions in range(1, 2000))


def test_ends_near_the_best_with_noisy_steps():
    noise = random.Random(7)
    time_of = model(1, 20, 0.05)
    best = min(time_of(partitions) for partitions in range(1, 1000))
    for _ in range(20):
        found, _ = search(lambda partitions: time_of(partitions) * noise.lognormvariate(0, 0.05))
        assert time_of(found.partitions) <= 1.05 * best


def test_doubles_and_then_halves_from_the_number_of_servers():
    _, visited = search(model(1, 1, 0.05), servers=4)
    assert visited[:3] == [4, 8, 2]
    _, visited = search(model(1, 1, 0.03), servers=4)
    assert visited[:4] == [4, 8, 16, 2]


def test_never_exceeds_the_rows():
    _, visited = search(model(0, 100, 0), servers=2, rows=20)
    assert max(visited) == 16
    assert PartitionSearch(8, 3).partitions == 3


def test_steps_right_after_a_change_do_not_count():
    found = PartitionSearch(2, 100, steps=1, warm_up=2)
    assert found.observe(100.0) is None and found.observe(100.0) is None
    assert found.observe(1.0) == 4
    assert found.samples == {2: 1.0}


def test_a_bad_guess_of_the_fit_is_not_kept():
    """A function of another shape, on which the fit's minimum is worse than a sample."""
    times = {1: 9.0, 2: 5.0, 4: 1.0, 8: 4.0}
    found, visited = search(lambda partitions: times.get(partitions, 6.0), servers=4)
    assert found.partitions == 4
    assert visited[-1] == 4


def test_fit_finds_the_numbers():
    time_of = model(0.5, 8.0, 0.02)
    coefficients = fit({partitions: time_of(partitions) for partitions in (2, 4, 8, 16, 32)})
    assert coefficients == pytest.approx([0.5, 8.0, 0.02])
    assert minimum_of(coefficients, 2, 32) == 20


def test_fit_never_takes_a_cost_for_a_gain():
    assert (fit({2: 1.0, 4: 2.0, 8: 1.5, 16: 3.0}) >= 0).all()


@pytest.mark.parametrize("setting", ["auto", 3])
def test_front_ends_tell_of_every_push_and_only_keys_of_rows_are_searched(setting):
    with Session.open(Settings(partitions=setting)) as session:
        dense = session.declare("dense", (4, 2), "float32")
        rows = session.declare("rows", (9, 2), "float32", sparse=True)
        session.keys.wait_for(rows)
        partitions.note_push(session, dense)
        assert session not in partitions._searches
        partitions.note_push(session, rows)
        if setting != "auto":
            assert session not in partitions._searches
            return
        assert partitions._searches[session]._key == rows
        partitions.forget(session, rows.store)
        assert partitions._searches[session]._key is None


def test_keys_of_which_a_strategy_names_servers_or_partitions_are_not_searched(tmp_path):
    path = tmp_path / "strategy.json"
    path.write_text('{"version": 2, "keys": {"placed": {"servers": [0, 0, 0]}, "cut": {"partitions": 5}}}')
    with Session.open(Settings(strategy=str(path))) as session:
        of = {name: session.declare(name, (9, 2), "float32", sparse=True) for name in ("placed", "cut", "free")}
        placed, cut, free = of.values()
        for key in (placed, cut, free):
            session.keys.wait_for(key)
            partitions.note_push(session, key)
        assert [session.partitions(key) for key in (placed, cut, free)] == [3, 5, 1]
        assert partitions._searches[session]._key == free
        for key in (placed, cut):
            partitions.note_push(session, key)
            assert key not in partitions._searches[session]._waiting
