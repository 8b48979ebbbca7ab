"""Which workers are in groups together, and who leads them: as docs/groups.md says, and the same on all nodes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3.cluster.groups import Groups
from p3.errors import ConfigError
from p3.placement import Placement
from p3.plan import choices, combinations
from p3.settings import Settings


def apart(workers, servers):
    """Each worker on a machine of its own, and servers on these in turn."""
    return Placement.of(range(workers), [rank % workers for rank in range(servers)], True)


@given(workers=st.integers(1, 40), servers=st.integers(1, 40), size=st.integers(2, 50))
def test_each_worker_is_in_one_group(workers, servers, size):
    groups = Groups.of(apart(workers, servers), (size,))
    if workers == 1:
        assert groups is None
        return
    assert groups.sizes == (min(size, workers),) and groups.homes == tuple(rank % workers for rank in range(servers))
    for worker in range(workers):
        together = sorted([worker, *groups.members(worker)])
        assert len(together) <= size and together == list(range(together[0], together[-1] + 1))
        assert {groups.of_workers[member] for member in together} == {groups.of_workers[worker]}
        assert all(worker in groups.members(member) for member in groups.members(worker))


@given(sizes=st.lists(st.integers(2, 4), min_size=2, max_size=3), count=st.integers(1, 3))
def test_groups_of_groups_connect_who_differs_in_one_digit(sizes, count):
    workers = count * math.prod(sizes)
    groups = Groups.of(apart(workers, workers), sizes)
    for worker in range(workers):
        assert len(groups.members(worker)) == sum(size - 1 for size in sizes)
        assert all(worker in groups.members(member) for member in groups.members(worker))
        assert all(groups.of_workers[member] == groups.of_workers[worker] for member in groups.members(worker))
    # One of each greatest group has all of a server's digits.
    assert groups.places == [rank % math.prod(sizes) for rank in range(workers)]


def test_servers_on_machines_of_their_own_have_their_ranks_for_homes():
    assert Groups.of(Placement.of("abcd", "xyz", True), (2,)).homes == (0, 1, 2)
    assert Groups.of(Placement.of("abcd", "dxb", True), (2,)).homes == (3, 1, 1)
    assert Groups.of(Placement.of("aabb", "bbaba", False), (2,)).homes == (2, 3, 0, 2, 1)


def test_what_no_groups_can_be_made_of_is_refused():
    together = Placement.of("abb", "ab", True)
    assert Groups.of(together, ()) is None
    with pytest.raises(ConfigError, match="P3_GROUPS=2: workers 1 and 2 are on one machine, .*P3_LOCAL_AGGREGATION=0"):
        Groups.of(together, (2,))
    assert Groups.of(together._replace(aggregates=False), (2,)).of_workers == [0, 0, 1]
    with pytest.raises(ConfigError, match="P3_GROUPS=4x2: groups of groups need a multiple of 8 workers; there are 12"):
        Groups.of(apart(12, 12), (4, 2))


@pytest.mark.parametrize("text, sizes", [("1", ()), ("2", (2,)), ("16x8", (16, 8)), ("2x3x4", (2, 3, 4))])
def test_sizes_are_read(text, sizes):
    assert Settings.from_env({"P3_GROUPS": text}).group_sizes == sizes


@pytest.mark.parametrize("text", ["0", "1x2", "2x1", "x2", "2x", "-2", "02", "2.0", "99999", "auto"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="P3_GROUPS=.*: it must be 1, a size of groups, or sizes as 16x8"):
        Settings.from_env({"P3_GROUPS": text})


@pytest.mark.parametrize(
    "variable, lost", [("P3_ON_WORKER_LOSS", choices.LEAVING), ("P3_ON_SERVER_LOSS", choices.HEIRS)]
)
def test_jobs_that_outlive_what_is_lost_have_no_groups(variable, lost):
    with pytest.raises(ConfigError) as refused:
        Settings.from_env({variable: "continue", "P3_GROUPS": "4"})
    assert str(refused.value) == combinations.refusal(lost, choices.GROUPS) and "P3_GROUPS" in str(refused.value)
    assert Settings.from_env({variable: "continue", "P3_GROUPS": "1"}).groups == "1"
