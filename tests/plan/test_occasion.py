"""When a plan is due: a link that has changed by more than a quarter is planned for soon, and nothing else is."""

import hypothesis.strategies as st
from hypothesis import given

from p3.plan.occasion import APART, IN_ROW, OF_LATE, Occasion, Rates

HOSTS = {0: "a", 1: "b", 2: "b", 3: "c"}  # of workers
STEPS = 30
SOON = OF_LATE + IN_ROW  # steps


def plans(steps, hosts=HOSTS):
    """In which of these steps a plan is due, and for which rates. `steps`: what each worker tells in each."""
    rates, occasion, due = Rates(len(hosts)), Occasion(), {}
    for number, told in enumerate(steps):
        rates.note(told)
        found = rates.of_hosts(hosts)
        if occasion.is_there(found):
            occasion.plan(found)
            due[number] = found
    return due


def near(rate):
    """What is measured of it: off by less than a quarter, and now and then nothing."""
    return st.one_of(st.just(0.0), st.floats(0.89 * rate, 1.1 * rate))


RATE = st.floats(1e5, 1e10)
LINKS = st.lists(RATE, min_size=len(HOSTS), max_size=len(HOSTS))
SHARED = st.tuples(RATE, RATE, RATE).map(lambda rates: [dict(zip("abc", rates))[HOSTS[rank]] for rank in HOSTS])


def noisy(links, steps=STEPS):
    return st.lists(st.tuples(*map(near, links)), min_size=steps, max_size=steps)


@given(st.data())
def test_links_that_stay_as_they_are_are_planned_for_once(data):
    assert len(plans(data.draw(noisy(data.draw(SHARED))))) <= 1
    links = data.draw(LINKS)
    steady = plans([links] * STEPS)
    assert list(steady) == [1 + IN_ROW - 1], "when two steps have told of each"
    assert steady[IN_ROW] == {"a": links[0], "b": max(links[1:3]), "c": links[3]}


@given(st.data(), st.floats(0.05, 0.55) | st.floats(1.7, 20), st.sampled_from(["a", "b", "c"]))
def test_a_link_that_changes_by_more_than_a_quarter_is_planned_for_soon_and_once(data, factor, changed):
    links = data.draw(LINKS)
    after = [rate * factor if HOSTS[rank] == changed else rate for rank, rate in enumerate(links)]
    due = plans([links] * STEPS + [after] * STEPS)
    later = [step for step in due if step >= STEPS]
    assert 1 <= len(later) <= 2, "a host's workers may be seen one after the other"
    assert later[0] < STEPS + SOON + 1
    assert due[later[-1]][changed] == max(rate for rank, rate in enumerate(after) if HOSTS[rank] == changed)


@given(LINKS, st.floats(0.1, 3), st.integers(0, 3))
def test_a_step_that_is_off_changes_nothing(links, factor, worker):
    off = [rate * factor if rank == worker else rate for rank, rate in enumerate(links)]
    assert len(plans([links] * STEPS + [off] + [links] * STEPS)) == 1


@given(LINKS)
def test_a_link_that_has_nothing_to_send_is_not_taken_for_a_slower_one(links):
    for unloaded in range(4):
        told = [0.0 if rank == unloaded else rate for rank, rate in enumerate(links)]
        assert len(plans([links] * STEPS + [told] * STEPS)) == 1


@given(st.lists(st.lists(st.one_of(st.just(0.0), RATE), min_size=4, max_size=4), max_size=60))
def test_whatever_is_told_plans_are_steps_apart_and_differ_by_more_than_a_quarter(steps):
    due = sorted(plans(steps).items())
    for (first, before), (second, after) in zip(due, due[1:]):
        assert second - first >= IN_ROW
        assert any(abs(after[host] - before[host]) > APART * before[host] for host in after)


def test_nothing_is_planned_for_links_of_which_one_has_never_been_full():
    assert plans([[5.0, 5.0, 5.0, 0.0]] * STEPS) == {}
    assert plans([[5.0] * 4]) == {}, "one measurement may be anything"


def test_other_hosts_are_planned_for_anew():
    occasion, rates = Occasion(), {"a": 5.0, "b": 5.0}
    occasion.plan(rates)
    assert not any(occasion.is_there(rates) for _ in range(STEPS))
    assert [occasion.is_there({"a": 5.0}) for _ in range(IN_ROW)][-1]
