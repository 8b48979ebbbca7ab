"""`p3 bench order`: orders that can be foreseen are, seldom announced; and the documentation shows what it prints."""

import pytest
from processes import ROOT

from p3 import cli
from p3.measure.micro import order as routes
from p3.settings import Settings
from p3.worker.session import Session

# (least share by the order in force, most share by the first one, most orders in 200 steps), of p3 bench order's routes
EXPECTED = {
    "the same in each step": (1.0, 1.0, 1),
    "each layer in half of the steps": (0.98, 0.75, 8),
    "a recurrent net of changing depth": (0.98, 0.85, 8),
    "another route every 20 steps": (0.94, 0.6, 10),
    "a route that drifts": (0.9, 0.8, 25),
    "a random route in each step": (0.45, 0.55, 8),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_orders_follow_routes_that_can_be_foreseen_and_are_announced_seldom(name):
    least, most_of_first, most_orders = EXPECTED[name]
    with Session.open(Settings()) as session:
        found = routes.stats_of(session, routes.ROUTES[name], 200)
    assert found["followed"] >= least and found["first"] <= most_of_first and found["orders"] <= most_orders, found


def test_every_route_is_tested():
    assert EXPECTED.keys() == routes.ROUTES.keys()


def test_the_documentation_shows_what_it_prints(capsys):
    assert cli.main(["bench", "order"]) == 0
    assert "```\n%s```" % capsys.readouterr().out in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
