"""Groups of hosts: who leads whom, and what the bound makes of it."""

import argparse
import math
import random
from collections import Counter

import pytest

from p3.measure.replay import groups as trees
from p3.measure.replay import models
from p3.measure.replay.bound import NO_OVERHEAD, Cluster, bound, card_bytes, one_of_each

SHAPES = [((), 5), ((1,), 5), ((3,), 9), ((9,), 9), ((2, 3), 18), ((4, 2, 2), 16), ((2, 2), 12)]


def model_of(*layers):
    """Layers as (elements, share of the time); backward takes twice as long as forward."""
    total = 3 * sum(share for _, share in layers)
    return models.Model("made", 1.0, tuple(
        models.Layer("layer%d" % number, (models.Tensor("weight", (elements,)),), share / total, 2 * share / total)
        for number, (elements, share) in enumerate(layers)
    ))


def test_in_groups_of_three_the_member_at_the_servers_place_leads():
    assert trees.leaders((3,), 9, 4) == [1, -1, 1, 4, -1, 4, 7, -1, 7]
    assert trees.leaders((3,), 9, 0) == [-1, 0, 0, -1, 3, 3, -1, 6, 6]


def test_leaders_are_members_of_groups_of_groups():
    # Pairs, and three pairs together, whose leader is the one that shares two digits with host 0; then the server.
    assert trees.leaders((2, 3), 12, 0) == [-1, 0, 0, 2, 0, 4, -1, 6, 6, 8, 6, 10]


@pytest.mark.parametrize("groups", [(), (1,), (1, 1)])
def test_in_groups_of_one_all_push_to_the_server(groups):
    assert {tuple(trees.leaders(groups, 5, home)) for home in range(5)} == {(trees.SERVER,) * 5}


@pytest.mark.parametrize("groups, hosts", SHAPES)
def test_from_every_host_a_way_leads_to_the_server_and_its_own_host_is_the_last_leader(groups, hosts):
    for home in range(hosts):
        leaders = trees.leaders(groups, hosts, home)
        assert leaders[home] == trees.SERVER
        assert leaders.count(trees.SERVER) == hosts // math.prod(groups)
        for host in range(hosts):
            steps = 0
            while host != trees.SERVER:
                host, steps = leaders[host], steps + 1
            assert steps <= len(groups) + 1


@pytest.mark.parametrize("groups, hosts", SHAPES)
def test_as_many_others_lead_a_host_as_its_groups_have_members(groups, hosts):
    """So 2(R-1 + N/R-1) connections leave a host, half of them as a member, or to servers, and half as a leader."""
    led, served = set(), set()
    for home in range(hosts):
        for host, leader in enumerate(trees.leaders(groups, hosts, home)):
            if leader != trees.SERVER:
                led.add((host, leader))
            elif host != home:
                served.add((host, home))
    for ways, many in ((led, sum(size - 1 for size in groups)), (served, hosts // math.prod(groups) - 1)):
        for counted in (Counter(one for one, _ in ways), Counter(other for _, other in ways)):
            assert [counted[host] for host in range(hosts)] == [many] * hosts


def test_a_groups_sum_of_a_power_of_two_is_one_that_the_tree_of_fixed_shape_makes():
    # There neighbours are added, then neighbours of those: 0-1, 2-3, 0-3, 4-5 and so on.
    for home in range(16):
        leaders = trees.leaders((4,), 16, home)
        sums = [{host for host, its in enumerate(leaders) if leader in (host, its)}
                for leader, top in enumerate(leaders) if top == trees.SERVER]
        assert sums == [set(range(first, first + 4)) for first in range(0, 16, 4)]


def test_groups_are_parsed_and_told():
    assert trees.parse("8") == (8,) and trees.parse("8x4x2") == (8, 4, 2)
    assert trees.told(trees.parse("16x4")) == "16x4" and trees.told(()) == ""
    for text in ("", "0", "8x", "x8", "8x0", "8 4", "-2", "8,4"):
        with pytest.raises(argparse.ArgumentTypeError, match="neither a size of groups"):
            trees.parse(text)


def test_groups_that_do_not_divide_the_hosts_are_refused():
    with pytest.raises(ValueError, match=r"groups of 4x3 need a multiple of 12 hosts; there are 16"):
        bound(model_of((10, 1)), 1.0, one_of_each(16, 8.0), groups=(4, 3))
    with pytest.raises(ValueError, match="a group has at least one host"):
        trees.check((4, 0), 16)


@pytest.mark.parametrize("groups", [(), (1,), (4,), (2, 4), (16,)])
def test_a_card_carries_as_much_in_groups_as_without(groups):
    # Each host pushes 15/16 of 1.6 MB to others, and passes on as much, at 1 MB/s. Nothing hides.
    model = model_of((400_000, 1))
    least = bound(model, 0.0, one_of_each(16, 8.0), 1000, NO_OVERHEAD, groups=groups)
    assert least.seconds == pytest.approx(2 * 15 / 16 * 1.6)
    assert least.seconds == pytest.approx(card_bytes(model, one_of_each(16, 8.0), 1000, NO_OVERHEAD) / 1e6)


def test_few_slices_are_no_load_for_few_cards():
    # One slice of 0.4 MB: its server's host sends it to 15 others, or to 3 of its group and 3 leaders. In pairs of
    # pairs of pairs it goes whole over four links, and back.
    model = model_of((100_000, 1))
    seconds = [bound(model, 0.0, one_of_each(16, 8.0), 100_000, NO_OVERHEAD, groups=groups).seconds
               for groups in ((), (4,), (2, 2, 2))]
    assert seconds == pytest.approx([15 * 0.4, 6 * 0.4, 8 * 0.4])


def test_a_slice_goes_whole_from_leader_to_leader():
    # Of 2 x 2 hosts host 3 pushes by way of 2; nothing else takes as long as this one slice, three hops and three back.
    model = model_of((1000, 1))
    assert bound(model, 0.0, one_of_each(4, 8.0), 1000, NO_OVERHEAD, groups=(2, 2)).seconds == pytest.approx(4 * 0.004)
    slow = Cluster([8.0, 8.0, 8.0, 1.0], [8.0] * 4, range(4), range(4))
    assert bound(model, 0.0, slow, 1000, NO_OVERHEAD, groups=(2, 2)).seconds == pytest.approx(0.032 + 3 * 0.004)


def test_the_bound_is_the_one_without_groups_where_those_are_of_one():
    draw = random.Random(3)
    for _ in range(20):
        model = model_of(*((draw.choice([10, 5000, 40000]), draw.uniform(0.1, 3)) for _ in range(draw.randint(1, 5))))
        cluster = one_of_each(draw.randint(1, 6), draw.uniform(5, 50))
        assert bound(model, 0.3, cluster, 3000, groups=(1,)) == bound(model, 0.3, cluster, 3000)
