"""How large slices are: as P3_SLICE_ELEMENTS says, or with `auto` such that servers hold equally much of each key."""

import pytest
from hypothesis import given, strategies

from p3.plan.key_plan import SliceSize

KEYS = strategies.integers(1, 1 << 30)


@given(strategies.integers(1, 1 << 28), strategies.integers(1, 10_000), KEYS)
def test_a_number_counts_for_all_keys(setting, num_servers, elements):
    size = SliceSize(setting, num_servers)
    assert size.of(elements) == size.most == setting


@pytest.mark.parametrize("num_servers", [1, 2])
def test_with_few_servers_all_keys_have_large_ones(num_servers):
    size = SliceSize("auto", num_servers)
    assert size.of(1) == size.of(1 << 30) == size.most == 50_000


@given(strategies.integers(3, 10_000), KEYS)
def test_with_more_servers_each_holds_as_much_of_a_key(num_servers, elements):
    size = SliceSize("auto", num_servers)
    whole = size.of(elements)
    assert 2_500 <= whole <= size.most <= 20_000
    busiest = -(-elements // whole // num_servers) * whole  # what a server holds at most
    if elements >= 2_500 * num_servers:
        assert busiest <= 1.007 * elements / num_servers
    else:
        assert busiest == whole == 2_500


@given(strategies.integers(3, 10_000), KEYS)
def test_slices_are_as_few_as_that_allows(num_servers, elements):
    size = SliceSize("auto", num_servers)
    whole = size.of(elements)
    assert -(-elements // whole) <= num_servers or whole > size.most / 2


@pytest.mark.parametrize("num_servers, most", [(3, 20_000), (8, 20_000), (10, 16_000), (16, 10_000), (1_024, 10_000)])
def test_those_that_are_begun_on_all_connections_are_not_too_many(num_servers, most):
    assert SliceSize("auto", num_servers).of(1 << 40) == most
