"""`p3 simulate`: what it prints and writes, and how it compares itself with results of `p3 bench`."""

import json
from collections import Counter

import lab_results as made
import pytest

from p3 import cli
from p3.measure.bench import validation
from p3.measure.replay import models
from p3.measure.results import records, summaries

SMALL = ["--models", "vgg19", "--size", "0.005", "--compute", "0.5", "--rate", "40mbit"]


@pytest.fixture
def simulate(capsys):
    """simulate(option, ...) -> what is printed."""

    def run(*options):
        assert cli.main(["simulate", *options]) == 0
        return capsys.readouterr().out

    return run


def test_one_setting_is_told_in_full(simulate):
    out = simulate(*SMALL, "--hosts", "4")
    assert "vgg19, 2.9 MB, P3: 4 hosts, 40 Mbit/s, 0.5 s of computation" in out
    assert "above the bound" in out and "bound 0." in out and "computation" in out and "waits for" in out
    assert [line.split()[0] for line in out.split("link ")[1].splitlines()[1:]] == ["0", "1", "2", "3"]


def test_every_combination_of_lists_and_ranges_has_a_row_and_a_record(simulate, tmp_path):
    path = tmp_path / "out.jsonl"
    out = simulate(*SMALL, "--hosts", "1,2-8x2", "--slice-elements", "10000,50000", "--out", str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["slice_elements"], one["hosts"]) for one in records] == [
        (size, hosts) for size in (10000, 50000) for hosts in (1, 2, 4, 8)
    ]
    assert len(out.splitlines()) == 2 + len(records) and out.startswith("model vgg19, MB 2.9, scheme p3")
    for one in records:
        assert one["kind"] == "simulation" and one["mean_s"] >= one["bound_s"] - 0.02
        assert len(one["up"]) == one["hosts"] and one["priorities"] is True


def test_what_is_not_p3_is_simulated_once_for_all_slices(simulate):
    out = simulate(*SMALL, "--hosts", "2,4", "--scheme", "p3,layers,ddp", "--slice-elements", "10000,50000")
    assert Counter(line.split()[0] for line in out.splitlines()[2:]) == {"p3": 4, "layers": 2, "ddp": 2}


def test_clipping_is_told_and_what_it_waits_for(simulate, tmp_path):
    path = tmp_path / "out.jsonl"
    out = simulate(*SMALL, "--hosts", "2", "--scheme", "p3,layers,ddp", "--clip", "none,norm,wait", "--out", str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["scheme"], one["clip"]) for one in records] == [
        *((scheme, clip) for scheme in ("p3", "layers") for clip in ("none", "norm", "wait")), ("ddp", "none")
    ]  # fmt: skip
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [sum(clip in row for row in rows) for clip in ("none", "norm", "wait")] == [2, 2, 2]
    assert [dict(one["waits"]).keys() & {"the norm", "all values"} for one in records[:3]] == [
        set(), {"the norm"}, {"all values"}
    ]  # fmt: skip
    for clip, words in (("norm", "waits for the norm"), ("wait", "waits for all values")):
        told = simulate(*SMALL, "--hosts", "2", "--clip", clip)
        assert "clipped" in told and words in told
    assert "clipped" not in simulate(*SMALL, "--hosts", "2", "--clip", "norm", "--scheme", "ddp")


def test_compression_is_told_and_swept_where_a_scheme_has_it(simulate, tmp_path):
    path = tmp_path / "out.jsonl"
    out = simulate(*SMALL, "--rate", "10mbit", "--hosts", "2", "--scheme", "p3,layers,ddp", "--compression",
                   "exact,fp16,int8-bf16",
                   "--out", str(path))  # fmt: skip
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["scheme"], one["compression"]) for one in records] == [
        ("p3", None), ("p3", "fp16"), ("p3", "int8-bf16"), ("layers", None), ("ddp", None), ("ddp", "fp16"),
    ]  # fmt: skip
    exact, half, less = (one["mean_s"] for one in records[:3])
    assert exact > half > less and records[4]["mean_s"] > records[5]["mean_s"]
    assert "compression" in out.splitlines()[1] and "int8-bf16" in out
    assert "vgg19, 2.9 MB, P3, int8: 2 hosts" in simulate(*SMALL, "--hosts", "2", "--compression", "int8")


def test_losses_are_swept_and_cost_time(simulate, tmp_path):
    path = tmp_path / "out.jsonl"
    far = ("--rate", "10mbit", "--delay", "20ms", "--loss", "0%,2%")
    out = simulate(*SMALL, *far, "--hosts", "2", "--scheme", "p3,ddp", "--out", str(path))
    without, ring, lossy = (json.loads(line) for line in path.read_text().splitlines())
    assert [one["network"]["loss"] for one in (without, lossy)] == [0, 0.02] and ring["scheme"] == "ddp"
    assert lossy["mean_s"] > 1.05 * without["mean_s"]
    assert "lost" in out.splitlines()[1] and "2%" in out


def test_groups_are_told_and_swept_where_a_scheme_has_them(simulate, tmp_path):
    path = tmp_path / "out.jsonl"
    out = simulate(*SMALL, "--hosts", "8", "--scheme", "p3,ddp", "--groups", "1,4,2x2", "--out", str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["scheme"], one["groups"]) for one in records] == [
        ("p3", [1]), ("p3", [4]), ("p3", [2, 2]), ("ddp", [])
    ]  # fmt: skip
    assert "groups" in out.splitlines()[1] and "2x2" in out
    assert "8 hosts, groups of 4, 40 Mbit/s" in simulate(*SMALL, "--hosts", "8", "--groups", "4")


def test_of_several_groups_those_that_divide_the_hosts_are_simulated(simulate, tmp_path):
    path, figure = tmp_path / "out.jsonl", tmp_path / "figure.svg"
    simulate(*SMALL, "--hosts", "3,4,8", "--groups", "1,4,2x2", "--out", str(path), "--plot", str(figure))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    every = [[1], [4], [2, 2]]
    assert [(one["hosts"], one["groups"]) for one in records] == [
        (3, [1]), *((4, groups) for groups in every), *((8, groups) for groups in every)
    ]  # fmt: skip
    drawn = figure.read_text()
    assert "P3, groups of 2x2, simulated" in drawn and "P3, simulated" in drawn


def test_settings_of_p3_and_network_are_taken_by_name(simulate, tmp_path):
    path = tmp_path / "out.jsonl"
    simulate(*SMALL, "--hosts", "3", "--rate", "40mbit:20mbit", "--down", "80mbit", "--set", "window_kib=16",
             "--set", "priorities=no", "--set", "pushes_first=yes", "--set", "queue_ms=5",
             "--out", str(path))  # fmt: skip
    (record,) = map(json.loads, path.read_text().splitlines())
    assert record["window_kib"] == 16 and record["priorities"] is False and record["pushes_first"] is True
    assert record["network"]["queue_ms"] == 5
    assert record["network"]["up_mbit"] == [40, 20, 20] and record["network"]["down_mbit"] == [80, 80, 80]


@pytest.mark.parametrize("clip", ["none", "norm", "wait"])
@pytest.mark.parametrize("scheme", ["p3", "layers", "ddp"])
def test_trace_is_one_that_the_viewer_reads(simulate, tmp_path, scheme, clip):
    path = tmp_path / "trace.json"
    simulate(*SMALL, "--hosts", "2", "--scheme", scheme, "--clip", clip, "--bucket-mb", "1", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {event["pid"] for event in events} == named
    layers = len(models.load("vgg19").layers)
    bars = [event for event in events if event["ph"] == "X"]
    if clip != "none" and scheme != "ddp":
        assert {"norm": "waits for the norm", "wait": "waits for all values"}[clip] in {one["name"] for one in bars}
    computed = Counter(event["cat"] for event in bars if event["cat"] in ("forward", "backward"))
    assert computed == {"forward": 2 * layers, "backward": 2 * layers}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in bars)
    opened = {(event["cat"], event["id"]): event["ts"] for event in events if event["ph"] == "b"}
    closed = {(event["cat"], event["id"]): event["ts"] for event in events if event["ph"] == "e"}
    assert opened and opened.keys() == closed.keys() and all(closed[key] >= opened[key] for key in opened)


def test_validation_puts_predictions_beside_what_was_measured(simulate, tmp_path):
    common = {"size": 0.03, "bytes": 17.2e6, "rate_mbit": 40, "compute_s": 4.0}
    held_out = next(row for row in validation.ROWS if row.held_out and len(row.rates_mbit) > 1)
    lines = [
        made.settings("scale", options={"iterations": 4, "warmup": 1}),
        made.run("scale", seconds=(4.18,) * 3, **common),
        made.run("scale", "p3_slicing", seconds=(5.0,) * 3, **common),
        made.run("scale", "ddp_25", seconds=(7.0,) * 3, **dict(common, slice_elements=None)),
        made.run("scale", "dist_sync", seconds=(5.4,) * 3, **common),
        made.failed("scale", "p3_sync", **dict(common, hosts=16)),
        made.run("scale", "p3_torch", seconds=(5.0,) * 3, **dict(common, clip=1.0)),
        made.run("scale", "p3_torch_int8", seconds=(4.0,) * 3, **dict(common, clip=1.0)),
        made.run("scale", "ddp_25_fp16", seconds=(5.0,) * 3, **dict(common, slice_elements=None)),
        made.run("scale", "ddp_25_powersgd", seconds=(5.0,) * 3, **dict(common, slice_elements=None)),
        made.settings("validation", options={"iterations": 3, "warmup": 2}),
        made.run("validation", seconds=(3.0,) * 3, model=held_out.model, size=0.1, hosts=held_out.hosts,
                 workers=held_out.hosts, servers=held_out.hosts, compute_s=held_out.compute_s,
                 rate_mbit=max(held_out.rates_mbit), rates_mbit=list(held_out.rates_mbit),
                 slice_elements=held_out.slice_elements),
    ]  # fmt: skip
    out = simulate("--validate", made.write(tmp_path / "results.jsonl", lines))
    table, sums = out.split("\n\n")
    rows = table.splitlines()[1:]
    stores = [next(word for word in row.split() if word.startswith(("p3_", "ddp_"))) for row in rows]
    assert stores == ["p3_slicing", "p3_sync", "ddp_25", "ddp_25_fp16", "p3_torch", "p3_torch_int8", "p3_sync"]
    assert "clipped to a norm of 1" in rows[4] and "clipped" not in "".join(rows[:4])
    errors = [float(next(word for word in row.split() if word.endswith("%"))[:-1]) for row in rows]
    assert abs(errors[1]) < 5, "close to what docs/benchmarks.md has"
    assert rows[-1].endswith("yes") and not rows[0].endswith("yes")
    mean = float(sums.split("mean error ")[1].split("%")[0])
    assert sums.startswith("all: 7 configurations") and mean == pytest.approx(sum(map(abs, errors)) / 7, abs=0.1)
    assert sums.splitlines()[2].startswith("held out: 1 configurations")


def test_figure_has_the_lines_and_the_points_of_the_same_setting(simulate, tmp_path):
    measured = made.write(tmp_path / "results.jsonl", [
        made.settings("scale"),
        made.run("scale", seconds=(0.9,) * 3, size=0.005, compute_s=0.5, rate_mbit=40),
        made.run("scale", "dist_sync", seconds=(1.9,) * 3, size=0.005, compute_s=0.5, rate_mbit=40),
    ])  # fmt: skip
    path = tmp_path / "figure.svg"
    simulate(*SMALL, "--hosts", "2,4", "--scheme", "p3,layers,ddp", "--plot", str(path), "--measured", measured)
    text = path.read_text()
    for words in ("P3, simulated", "whole layers, first come, first served", "DDP's ring", "bound of P3's slices",
                  "p3_sync, measured"):
        assert words in text
    assert "dist_sync" not in text


def test_validation_has_enough_configurations_and_half_are_held_out():
    assert len(validation.ROWS) >= 30
    assert sum(row.held_out for row in validation.ROWS) * 2 >= len(validation.ROWS)
    assert len({row[:6] for row in validation.ROWS}) == len(validation.ROWS)
    assert all(len(row.rates_mbit) in (1, row.hosts) for row in validation.ROWS)


@pytest.mark.parametrize("options, words", [
    (["--hosts", "8-2"], "'8-2' is neither a number of hosts"),
    (["--set", "egress=16"], "'egress' is none of priorities"),
    (["--set", "lossless=1"], "lossless is yes or no"),
    (["--models", "alexnet"], "'alexnet' is none of vgg19"),
    (["--straggler", "1"], "'1' has no '='"),
    (["--groups", "8x0"], "'8x0' is neither a size of groups"),
])  # fmt: skip
def test_wrong_options_are_refused(options, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *options])
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("options, words", [
    (["--hosts", "2,4", "--trace", "t.json"], "--trace takes one setting; 2 are given"),
    (["--rate", "40mbit:20mbit:10mbit"], "3 rates are given for 2 hosts"),
    (["--sparse", "nothing=0.1"], "has no layer 'nothing'"),
    (["--hosts", "6", "--groups", "4"], "groups of 4 need a multiple of 4 hosts; there are 6"),
    (["--hosts", "8", "--groups", "4", "--scheme", "ddp"], "groups of 4 are not simulated with scheme 'ddp'"),
    (["--plot", "figure.pdf"], "must end in .png or .svg"),
    (["--trace", "/nowhere/t.json"], "/nowhere/t.json: No such file"),
    (["--validate", "/nowhere/r.jsonl"], "/nowhere/r.jsonl cannot be read"),
])  # fmt: skip
def test_what_does_not_fit_together_is_an_error_that_says_so(options, words, capsys):
    assert cli.main(["simulate", *SMALL, *options]) == 1
    assert words in capsys.readouterr().err


def test_results_of_one_rate_for_each_host_are_told_apart():
    lines = [made.settings("scale"), made.run("scale"), made.run("scale", rates_mbit=[800, 400])]
    one, other = summaries.summarise(records.of_records(lines).runs)
    assert one.rates_mbit is None and other.rates_mbit == (800, 400)
    assert summaries.setting(other, ["rate"]) == "800 Mbit/s, 400 Mbit/s"
