"""`p3 bench cards`, and with it real jobs: the cards of all their hosts carry what the frames add up to."""

import card_frames
import pytest
from lab_traces import needs_lab

from p3 import cli
from p3.measure.lab.hosts import lab
from p3.measure.micro import cards
from p3.plan.factor_shape import FactorShape

# Headers of TCP and IP, acknowledgements; of a segment that leaves as one they are counted once. Besides, heartbeats,
# and the barriers around a round.
OVER, BESIDES = 1.05, 20_000


@needs_lab
@pytest.mark.parametrize("workers, servers, count, environment", [
    (5, 2, 3, {}),  # two hosts of two workers and a server, one with a worker alone
    (2, 3, 3, {"P3_SLICE_ELEMENTS": "20000"}),  # one with a server alone
    (4, 1, 2, {"P3_LOCAL_AGGREGATION": "0"}),
])  # fmt: skip
def test_every_card_carries_the_frames_of_its_machine(workers, servers, count, environment):
    with lab(count) as hosts:
        found = cards.count(hosts, workers, servers, FactorShape(300, 1000, 800), 9100, environment)
    for way, counted in found.cards.items():
        expected = card_frames.counted(found.plans[way], found.placement)
        for each, of_each in zip(zip(*counted), zip(*expected.values())):  # sent, received
            for bytes_, frames in zip(sorted(each), sorted(of_each)):
                assert frames <= bytes_ <= OVER * frames + BESIDES, (way, counted, expected)


@needs_lab
def test_it_says_how_much_slower_the_rules_choice_is(capsys):
    assert cli.main(["bench", "cards", "--jobs", "3/1/2", "--outputs", "500", "--inputs", "400"]) == 0
    output = capsys.readouterr().out
    assert "\n3/1/2 " in output and "the rule's choice was at most " in output


@pytest.mark.parametrize("wrong", ["1/1/2", "4/2", "4/2/5", "a/1/2"])
def test_jobs_that_make_no_sense_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "cards", "--jobs", wrong])
    assert repr(wrong) in capsys.readouterr().err


def test_all_jobs_have_2_to_8_workers_1_to_8_servers_and_1_to_4_workers_on_a_host():
    jobs = cards.parse_options(["--all"]).jobs
    assert {workers for workers, _, _ in jobs} == set(range(2, 9))
    assert {servers for _, servers, _ in jobs} == set(range(1, 9))
    assert {-(-workers // hosts) for workers, _, hosts in jobs} == {1, 2, 3, 4}
