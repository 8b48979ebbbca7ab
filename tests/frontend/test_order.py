"""The order that priorities follow: right about most pairs of keys, changed when that pays, announced by rank 0."""

import itertools
import random

import pytest

from p3.settings import Settings

pytest.importorskip("p3._core", reason="the extension is not built")
from p3.frontend.order import Order, merged, share_in_order
from p3.worker.session import Session


@pytest.fixture
def session():
    with Session.open(Settings()) as opened:
        yield opened


@pytest.fixture
def order(session):
    return Order(session, session.new_store())


@pytest.mark.parametrize("predicted, used, share", [
    ("abc", "abc", 1.0), ("abc", "cba", 0.0), ("abc", "acb", 2 / 3), ("abcd", "db", 0.0), ("ab", "a", 1.0),
    ("a", "abc", 2 / 3),  # nothing is foreseen of b and c but that they come behind a
    ("c", "abc", 0.0), ("", "ab", 0.0), ("", "", 1.0),
])  # fmt: skip
def test_share_of_pairs_whose_order_was_foreseen(predicted, used, share):
    assert share_in_order(predicted, used) == pytest.approx(share)


def test_share_counts_each_pair():
    draw = random.Random(3)
    for _ in range(200):
        names = draw.sample(range(30), draw.randint(2, 20))
        predicted = draw.sample(range(30), draw.randint(0, 30))
        place = {name: predicted.index(name) if name in predicted else 99 for name in names}
        pairs = list(itertools.combinations(names, 2))
        expected = sum(place[sooner] < place[later] for sooner, later in pairs) / len(pairs)
        assert share_in_order(predicted, names) == pytest.approx(expected), (predicted, names)


@pytest.mark.parametrize("order_before, used, made", [
    ("abcde", "dab", "dacbe"),  # those that were used exchange places
    ("abc", "", "abc"),
    ("", "cab", "cab"),
    ("ad", "abcd", "abcd"),  # new ones come behind the one before them
    ("ad", "xda", "xda"),
    ("abcd", "cxb", "acxbd"),
])  # fmt: skip
def test_merged_orders(order_before, used, made):
    assert "".join(merged(order_before, used)) == made


def test_merged_orders_have_all_keys_once_and_foresee_what_was_used():
    draw = random.Random(4)
    for _ in range(200):
        before = draw.sample(range(30), draw.randint(0, 20))
        used = draw.sample(range(30), draw.randint(0, 20))
        made = merged(before, used)
        assert len(made) == len(set(made)) and set(made) == {*before, *used}
        assert share_in_order(made, used) == 1.0, (before, used)


def test_an_order_that_stays_is_announced_once(session, order):
    before = session.orders.version
    assert [order.follow(list("abcd")) for _ in range(50)] == [True] + [False] * 49
    assert session.orders.version == before + 1 and session.orders.of(order._store) == list("abcd")
    assert order.stats() == {"orders": 1, "passes": 49, "first": 1.0, "followed": 1.0}


def test_an_order_that_changes_for_good_is_followed_when_it_has_come_twice(order):
    order.follow(list("abcd"))
    assert [order.follow(list("dcba")) for _ in range(4)] == [False, True, False, False]
    assert order.names == list("dcba")
    assert order.stats() == {"orders": 2, "passes": 4, "first": 0.0, "followed": 0.5}


def test_a_pass_that_differs_once_changes_nothing(order):
    passes = [list("abcd")] * 5 + [list("dcba")] + [list("abcd")] * 5
    assert [order.follow(one) for one in passes] == [True] + [False] * 10


def test_a_small_difference_is_not_worth_a_message(order):
    names = list(range(100))
    order.follow(names)
    swapped = [*names[:3], 4, 3, *names[5:]]
    assert not any(order.follow(swapped) for _ in range(1500))


def test_a_key_that_comes_later_gets_the_place_where_it_was_used(order):
    order.follow(["e0", "d0", "out"])
    assert order.follow(["e0", "e1", "d1", "d0", "out"])
    assert order.names == ["e0", "e1", "d1", "d0", "out"]
    assert not order.follow(["e0", "d0", "out"])


def test_more_of_the_same_pass_is_no_other_pass(order):
    for known in range(1, 5):
        assert order.follow(list("abcd")[:known], again=known > 1)
    assert order.names == list("abcd") and order.stats()["passes"] == 0
