"""`p3 plan`: shares that follow links, a search that only gains, and a file that `p3 run` takes."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3 import cli
from p3.codecs import Ways
from p3.frontend.local_steps.fragments import Schedule
from p3.measure.compressions import Compression
from p3.measure.planning import builders, lossy
from p3.measure.planning.search import Search
from p3.measure.replay import bound, models
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Setting, links
from p3.plan import strategy as strategies
from p3.plan.strategy import Strategy

SMALL = ["--models", "vgg19", "--size", "0.005", "--compute", "0.5", "--budget", "2"]
MODEL = models.load("vgg19", 0.005)


def setting_of(*rates, **how):
    return Setting(MODEL, 0.5, links(len(rates), *rates), iterations=3, warmup=1, **how)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any))
def test_servers_come_as_often_as_their_shares_say_and_evenly(shares):
    turns = builders.turns(shares)
    counts = [turns.count(server) for server in range(len(shares))]
    assert all(count * sum(shares) == share * len(turns) for count, share in zip(counts, shares))
    for server, count in enumerate(counts):  # in any part of it, too
        for end in range(len(turns)):
            assert abs(turns[:end].count(server) - end * count / len(turns)) < len(shares)


@settings(max_examples=30)
@given(st.lists(st.sampled_from([10.0, 20.0, 40.0, 60.0]), min_size=3, max_size=8), st.integers(1, 2))
def test_proportional_shares_are_as_fast_as_any(rates, workers_per_host):
    """The network alone: no computation hides anything, and the bound is that of the busiest link. To what a unit of
    the shares takes there."""
    setting = setting_of(*rates, workers_per_host=workers_per_host, slice_elements=500)
    shares = builders.proportional(setting)
    assert sum(shares) == sum(builders.equal(setting)) and min(shares) >= 0

    def least(shares):
        made = builders.strategy(setting, shares, setting.slice_size.most)
        return bound.bound(MODEL, 0.0, setting.cluster(), setting.slice_elements, strategy=made).seconds

    best = least(shares)
    slowest = min(rate for rate, share in zip(rates, shares) if share)
    unit_s = 1.2 * MODEL.bytes / sum(shares) * len(rates) * 8 / (slowest * 1e6)
    assert best <= least(builders.equal(setting)) + unit_s
    for giver in range(len(rates)):
        for taker in range(len(rates)):
            if shares[giver] >= 3:
                moved = list(shares)
                moved[giver] -= 3
                moved[taker] += 3
                assert best <= least(moved) + unit_s


def test_two_hosts_and_equal_links_keep_equal_shares():
    for setting in (setting_of(40.0, 20.0), setting_of(40.0, 40.0, 40.0)):
        assert builders.proportional(setting) == builders.equal(setting)
        usual = setting.slice_size.most
        assert builders.strategy(setting, builders.equal(setting), usual) == Strategy()


def test_nobody_asks_a_slow_host_for_more_than_its_own_pushes():
    setting = setting_of(40.0, 40.0, 40.0, 20.0)
    search = Search(setting)
    assert search.proportional().shares[3] == 0
    best = search.best(2.0)
    assert best.seconds <= search.proportional().seconds < 0.75 * search.without().seconds
    again = predict(dataclasses.replace(setting, strategy=strategies.parse(best.strategy.text())))
    assert again.mean_s == best.seconds


def test_without_time_the_better_builder_is_taken():
    search = Search(setting_of(40.0, 40.0, 20.0))
    assert search.best(0.0) is search.proportional() and search.tried == 2


def test_a_plan_is_told_and_written(capsys, tmp_path):
    path = tmp_path / "s.json"
    rates = ["--hosts", "4", "--rate", "40mbit:40mbit:40mbit:20mbit"]
    assert cli.main(["plan", *SMALL, *rates, "--price", "2", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    for said in ("strategy        seconds", "none ", "proportional ", "found ", "3 0.0%", "with equal shares: ",
                 "one more host, as host 0: ", "host 3 with twice its rate: ", "cost", "wrote "):  # fmt: skip
        assert said in out
    written = strategies.load(str(path))
    assert 3 not in written.default.servers
    assert cli.main(["plan", *SMALL, *rates, "--budget", "0", "--strategy", str(path)]) == 0
    assert "\ngiven " in capsys.readouterr().out
    assert cli.main(["simulate", *SMALL[:-2], *rates, "--strategy", str(path)]) == 0


@pytest.mark.parametrize("more", [[], ["--clip", "norm"]])
def test_from_eight_hosts_on_groups_are_simulated_too(capsys, tmp_path, more):
    asked = [*SMALL[:-1], "0", "--hosts", "8", "--rate", "40mbit", *more]
    assert cli.main(["plan", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["groups"] for one in told["groups"]] == ["2", "4"]
    assert cli.main(["plan", *asked]) == 0
    text, path = capsys.readouterr().out, tmp_path / "simulated.jsonl"
    for one in told["groups"]:
        assert f"in groups of workers, with P3_GROUPS={one['groups']}: {one['seconds']:.3f} s (" in text
    simulated = [*SMALL[:-2], "--hosts", "8", "--rate", "40mbit", *more, "--groups", "2,4", "--out", str(path)]
    assert cli.main(["simulate", *simulated]) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["mean_s"] for one in records] == [one["seconds"] for one in told["groups"]]


@pytest.mark.parametrize("more", [["--hosts", "4"], ["--hosts", "13"], ["--hosts", "8", "--compression", "fp16"]])
def test_no_groups_are_told_of_where_there_are_none(capsys, more):
    assert cli.main(["plan", *SMALL[:-1], "0", "--rate", "40mbit", *more, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == []


def test_who_asks_for_groups_gets_a_plan_for_them(capsys):
    asked = ["plan", *SMALL[:-1], "0", "--hosts", "8", "--rate", "40mbit", "--json"]
    assert cli.main(asked) == 0
    others = json.loads(capsys.readouterr().out)["groups"]
    assert cli.main([*asked, "--groups", "4"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["groups"] == [] and told["seconds"] == others[1]["seconds"]
    assert not any(one["what"].startswith("one more host") for one in told["what_if"]), "9 are no whole groups"


@pytest.mark.parametrize("rate", [200.0, 10.0, 1.0, 0.2])
def test_local_steps_are_proposed_where_nothing_else_comes_near_the_computation(rate):
    """With the smallest number of steps in which the simulator's exchange is over."""
    setting = setting_of(rate, rate, rate, rate)
    best = Search(setting).without()
    found = lossy.lossy(setting, best)
    fastest = min(best.seconds, *found.compressed_s.values())
    assert (found.proposal is None) == (fastest <= 1.5 * 0.5)
    assert (found.proposal is None) == (rate > 5)
    if found.proposal is None:
        return
    one = found.proposal
    alone = dataclasses.replace(setting, compute_s=0.0, compression=Compression("int4", "int4"))
    assert one.exchange_s == predict(alone).mean_s >= one.fragment_s >= one.exchange_s / one.fragments
    assert one.hides and one.seconds == 0.5 and one.fragment_s <= one.delay * one.seconds
    Schedule.checked(one.every, one.fragments, one.delay)
    smaller = [every for every in lossy.EVERY if every < one.every]
    assert all(one.exchange_s > (every - 1) * 0.5 for every in smaller)


def test_a_program_is_told_the_same_as_json(capsys, tmp_path):
    path, rates = tmp_path / "s.json", ["--hosts", "3", "--rate", "40mbit:40mbit:20mbit"]
    asked = ["plan", *SMALL[:-1], "0", *rates, "--price", "2", "--out", str(path)]
    assert cli.main(asked) == 0
    text = capsys.readouterr().out
    assert cli.main([*asked, "--json", "--allow-lossy", "--strategy", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["strategy"] == json.loads(path.read_text())
    assert told["others"]["given"] == {"seconds": told["seconds"], "bound_s": told["bound_s"]}
    for what, seconds in [("found", told["seconds"]), *((name, told["others"][name]["seconds"])
                                                        for name in ("none", "proportional"))]:  # fmt: skip
        assert "%-14s %8.3f" % (what, seconds) in text
    for one in told["ablation"]:
        assert f"{one['what']}: {one['seconds']:.3f} s" in text
    assert [one["what"] for one in told["what_if"]][0].startswith("one more host")
    assert all(f"{one['what']}: {one['seconds']:.3f} s, {one['gain']:+.1%}" in text for one in told["what_if"])
    assert sum(told["shares"]) == pytest.approx(1) and f"at most {told['slice']} elements" in text
    assert f"take {told['hours_of_1000_steps']:.2f} hours, and cost {told['price_of_1000_steps']:.2f}" in text
    assert set(told["lossy"]["compressed_s"]) == {"int8", "int4", "1bit"}
    assert f"found after {told['simulations']} simulations" in text


def test_where_no_exchange_hides_steps_wait():
    setting = setting_of(0.05, 0.05)
    one = lossy.local_steps(setting, 0.5)
    assert not one.hides and one.every == lossy.EVERY[-1] and one.seconds == one.fragment_s / one.delay > 0.5


def test_a_plan_may_propose_local_steps(capsys, tmp_path):
    path = tmp_path / "s.json"
    slow = ["plan", *SMALL, "--budget", "0", "--hosts", "4", "--rate", "1mbit", "--out", str(path)]
    assert cli.main(slow) == 0
    assert "LocalSteps" not in capsys.readouterr().out
    without = strategies.load(str(path))
    assert cli.main([*slow, "--allow-lossy"]) == 0
    out = capsys.readouterr().out
    assert "int8 " in out and "p3.torch.LocalSteps(optimizer, model, every=" in out and "docs/local-steps.md" in out
    written = strategies.load(str(path))
    assert written.allow_lossy and written.default == without.default._replace(codec=Ways.of("1bit"))
    assert "the strategy has 1bit, which loses least" in out
    assert cli.main(["plan", *SMALL, "--budget", "0", "--hosts", "2", "--rate", "1gbit", "--allow-lossy"]) == 0
    out = capsys.readouterr().out
    assert "int8 " in out and "LocalSteps" not in out and "the strategy has" not in out


@pytest.mark.parametrize("seconds, codec", [
    ((1.0, 1.0, 1.0, 1.0), None), ((1.05, 1.04, 1.0, 1.0), None), ((1.06, 1.04, 1.0, 1.0), "int8"),
    ((9.0, 5.0, 2.05, 2.0), "int4"), ((9.0, 5.0, 2.2, 2.0), "1bit"), ((1.0, 2.0, 2.0, 2.0), None),
])  # fmt: skip
def test_of_codecs_about_as_fast_as_the_fastest_the_one_that_loses_least_is_taken(seconds, codec):
    found = lossy.Lossy(1.0, seconds[0], dict(zip(lossy.CODECS, seconds[1:])), None)
    assert found.codec == codec
    strategy = found.of(strategies.Strategy())
    assert strategies.parse(strategy.text()) == strategy
    assert strategy.default.codec == (None if codec is None else Ways.of(codec)) and strategy.allow_lossy == bool(codec)


@pytest.mark.parametrize("options, said", [
    (["--hosts", "2,4"], "p3 plan is for one setting; 2 are given"),
    (["--hosts", "2", "--scheme", "ddp"], "scheme 'ddp' knows no strategies"),
    (["--hosts", "2", "--out", "/nowhere/s.json"], "/nowhere/s.json: No such file"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(options, said, capsys):
    assert cli.main(["plan", *SMALL, "--budget", "0", *options]) == 1
    assert said in capsys.readouterr().err


def test_a_strategy_for_servers_that_are_not_there_is_refused(capsys, tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"version": 1, "default": {"servers": [5]}}))
    assert cli.main(["simulate", *SMALL[:-2], "--hosts", "2", "--strategy", str(path)]) == 1
    assert "server 5 is named, but the job has 2 servers" in capsys.readouterr().err
    path.write_text(json.dumps({"version": 2, "allow_lossy": True, "default": {"codec": "int8"}}))
    assert cli.main(["simulate", *SMALL[:-2], "--hosts", "2", "--strategy", str(path), "--compression", "int4"]) == 1
    assert "the strategy the codec" in capsys.readouterr().err


def test_what_the_simulator_does_not_know_of_a_strategy_is_refused(capsys, tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"version": 2, "allow_lossy": True, "default": {"staleness": 2}}))
    with pytest.raises(SystemExit):
        cli.main(["simulate", *SMALL[:-2], "--hosts", "2", "--strategy", str(path)])
    assert "s.json has staleness, of which the simulator knows nothing" in capsys.readouterr().err
