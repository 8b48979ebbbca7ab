"""The process that plans for a job which trains."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("p3.measure._simulator", reason="the extension is not built")

from p3.frontend.planner import Planner
from p3.plan import strategy

QUESTION = {
    "rates_mbit": [40, 40, 40, 20], "workers": [0, 1, 2, 3], "servers": [0, 1, 2, 3], "compute_s": 0.2,
    "layers": [["0.weight", [300, 1000], 0.05], ["0.bias", [1000], 0.0], ["2.weight", [1000, 300], 0.1]],
    "slice_elements": 10000, "keeps_slices": False, "clip": "none", "compression": {"up": None, "down": None},
    "adds_up": True, "strategy": strategy.Strategy().text(), "budget_s": 0.5,
}  # fmt: skip


def asked(**changed):
    done = subprocess.run([sys.executable, "-m", "p3.measure.planning.answer"], timeout=60, universal_newlines=True,
                          input=json.dumps({**QUESTION, **changed}), stdout=subprocess.PIPE, check=True)  # fmt: skip
    answer = json.loads(done.stdout)
    return answer, strategy.parse(answer["strategy"]).default


def test_a_slow_host_holds_less_than_the_others():
    answer, cut = asked()
    shares = [cut.servers.count(rank) for rank in range(4)]
    assert shares[3] < min(shares[:3]), shares
    assert answer["seconds"] < 0.9 * answer["before_s"]


def test_what_is_in_use_already_is_nothing_new():
    answer, _ = asked()
    again, _ = asked(strategy=answer["strategy"])
    assert again["before_s"] == pytest.approx(answer["seconds"], rel=0.05)


def test_links_alike_have_equal_shares_and_slices_may_have_to_stay():
    _, cut = asked(rates_mbit=[40] * 4, keeps_slices=True)
    assert cut == strategy.Cut()


def test_bytes_that_compression_saves_are_known():
    exact, _ = asked(rates_mbit=[10] * 4)
    both, _ = asked(rates_mbit=[10] * 4, compression={"up": {"type": "int8"}, "down": {"type": "int8"}})
    up, _ = asked(rates_mbit=[10] * 4, compression={"up": {"type": "lowrank", "rank": 2}, "down": None})
    assert both["before_s"] < 0.5 * exact["before_s"] and up["before_s"] < both["before_s"]


def test_what_updates_wait_for_is_known():
    """Where most bytes are of the last layers, with which no forward pass begins."""
    layers = [["%d.weight" % number, [100 * 4 ** (number // 2), 100], 0.05] for number in range(8)]
    seconds = {
        clip: asked(rates_mbit=[100] * 4, compute_s=0.6, layers=layers, clip=clip)[0]["before_s"]
        for clip in ("none", "norm", "wait")
    }
    assert max(seconds["none"], seconds["norm"]) < 0.95 * seconds["wait"], seconds
    assert seconds["none"] != seconds["norm"]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_processes_stand_where_they_are(slow):
    rates = [20 if host == slow else 40 for host in range(3)]
    answer, cut = asked(rates_mbit=rates, workers=[2, 0, 1], servers=[1, 2, 0])
    held = [(cut.servers or (0, 1, 2)).count([1, 2, 0].index(host)) for host in range(3)]
    assert held[slow] < min(held[host] for host in range(3) if host != slow), held


def test_a_planner_answers_while_others_go_on_and_says_what_it_could_not_do():
    planner = Planner(QUESTION)
    answer = None
    while answer is None:
        answer = planner.answer()
    assert strategy.parse(answer["strategy"]).default.servers
    planner = Planner({**QUESTION, "servers": [0, 9]})
    with pytest.raises(RuntimeError, match="9|range"):
        while planner.answer() is None:
            pass
    Planner({**QUESTION, "budget_s": 1000}).close()
