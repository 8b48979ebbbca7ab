"""Which servers have dismissed a worker that departs."""

import pytest

from p3.cluster.departures import Departures
from p3.cluster.node import Node
from p3.errors import ProtocolError

SERVERS = [Node("server", rank, "10.0.0.%d" % rank) for rank in range(2)]
WORKERS = [Node("worker", rank, "10.0.0.%d" % rank) for rank in range(3)]


def dismissed(rank):
    return {"kind": "dismissed", "rank": rank}


def test_it_is_over_when_all_servers_have_dismissed_it_or_are_lost():
    departures = Departures()
    departures.begin(WORKERS[1], True, "it died", SERVERS)
    departures.begin(WORKERS[2], True, "it did, too", SERVERS)
    assert departures.on_dismissed(SERVERS[0], dismissed(1)) == []
    assert [one.worker for one in departures.on_dismissed(SERVERS[1], dismissed(1))] == [WORKERS[1]]
    assert departures.on_dismissed(SERVERS[1], dismissed(2)) == []
    assert [(one.worker, one.text) for one in departures.lose_server(SERVERS[0])] == [(WORKERS[2], "it did, too")]
    with pytest.raises(ProtocolError, match="server 1 .* not allowed now"):
        departures.on_dismissed(SERVERS[1], dismissed(2))


def test_of_one_on_its_way_nobody_hears_and_another_may_come_and_go_in_its_place_meanwhile():
    departures = Departures()
    for _ in range(2):  # of the first one server 1 has not said so yet
        departures.begin(WORKERS[2], False, "it died", SERVERS)
    for server in (SERVERS[0], SERVERS[0], SERVERS[1], SERVERS[1]):
        assert departures.on_dismissed(server, dismissed(2)) == []
    with pytest.raises(ProtocolError):
        departures.on_dismissed(SERVERS[0], dismissed(2))
