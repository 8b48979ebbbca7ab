"""`p3 plot`: a figure of each experiment, which hides neither failures nor what was emulated."""

import sys
import xml.etree.ElementTree as ElementTree

import lab_results as made
import pytest
from processes import PYTHONPATH, Process, clean_environment

pytest.importorskip("matplotlib", reason="p3 plot needs matplotlib: pip install matplotlib")

from p3.errors import ConfigError
from p3.measure.bench import experiments, report
from p3.measure.results import drawing, figures, records

STORES = ("dist_sync", "mxnet_p3", "p3_slicing", "p3_sync")
BLUE, GREEN = "#0072B2", "#009E73"


def lines_of(experiment):
    """What p3 bench would write: four stores, two values on the x axis."""
    variants = {
        "bandwidth": [{"rate_mbit": 200}, {"rate_mbit": 800}],
        "scale": [{"hosts": count, "workers": count, "servers": count} for count in (2, 4)],
        "slices": [{"slice_elements": 5000}, {"slice_elements": 50000}],
        "ratio": [{"compute_s": 1.4}, {"compute_s": 0.6}],
        "sweep": [{"rate_mbit": rate, "compute_s": 100 / rate, "compute_share": 0.5} for rate in (200, 800)],
        "targets": [{"model": "vgg19"}, {"model": "bert"}],
        "utilization": [{}],
        "compute": [{"computation": "real", "compute_s": None, "bound_s": None, "bound_reason": None}],
        "accuracy": [{"computation": "real", "compute_s": None, "bound_s": None, "bound_reason": None,
                      "accuracies": [0.5, 0.9], "accuracy_at_s": [1.0, 2.0]}],
        "codecs": [{"computation": "real", "compute_s": None, "bound_s": None, "bound_reason": None,
                    "losses": [3.0, 2.0], "loss_at_s": [1.0, 2.0]}],
        "learn": [{"computation": "real", "compute_s": None, "bound_s": None, "bound_reason": None}],
    }[experiment]
    lines = [made.settings(experiment)]
    lines += [made.run(experiment, store, **variant) for variant in variants for store in STORES]
    if experiment == "utilization":
        lines += [made.nic(experiment, store) for store in STORES]
    return lines


@pytest.fixture
def read(tmp_path):
    return lambda lines: records.read([made.write(tmp_path / "results.jsonl", lines)])


@pytest.fixture
def text_of(read, tmp_path):
    """text_of(lines) -> all words in the figure of the one experiment."""

    def text(lines):
        (path,) = report.save_figures(read(lines), tmp_path, ["svg"])
        elements = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
        return "\n".join("".join(element.itertext()) for element in elements)

    return text


def draw(results):
    """The figure of the one experiment."""
    return figures.draw(experiments.named(results.runs[0].experiment).figure, results)


def crosses(axes):
    return [(line.get_color(), line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "x"]


@pytest.mark.parametrize("experiment", report.with_figures())
def test_figure_tells_stores_bound_emulation_and_what_was_run(text_of, experiment):
    text = text_of(lines_of(experiment))
    for store in STORES:
        assert drawing.label(store) in text
    real = experiment in ("compute", "learn", "codecs", "accuracy")
    assert ("real computation" in text) == real
    assert ("computation is emulated" in text) == ("bound" in text) == (not real)
    assert "p3 bench " + experiment in text and "a processor" in text and "0123456789abcdef" in text


def test_same_results_give_the_same_files(read, tmp_path):
    found = read(lines_of("targets"))
    contents = []
    for folder in (tmp_path / "once", tmp_path / "again"):
        folder.mkdir()
        contents.append({path.name: path.read_bytes() for path in report.save_figures(found, folder, drawing.FORMATS)})
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == ["targets.png", "targets.svg"]
    assert contents[0]["targets.png"].startswith(b"\x89PNG")


def test_line_shows_medians_with_their_spread(read):
    runs = [made.run("bandwidth", rate_mbit=rate, seconds=(seconds,), repeat=number)
            for rate in (100, 200) for number, seconds in enumerate((2.0, 4.0, 5.0))]  # fmt: skip
    (axes,) = draw(read([made.settings("bandwidth"), *runs])).axes
    green = [one for one in axes.lines if one.get_color() == GREEN and one.get_linestyle() == "-"]
    (line,) = [one for one in green if len(one.get_xdata()) == 2]
    assert list(line.get_xdata()) == [100, 200] and list(line.get_ydata()) == [0.25, 0.25]
    (whiskers,) = axes.collections
    assert [sorted(segment[:, 1]) for segment in whiskers.get_segments()] == [[0.2, 0.5]] * 2


def test_scale_counts_the_batches_of_all_workers(read):
    runs = [made.run("scale", hosts=hosts, workers=hosts, servers=hosts, seconds=(2.0,)) for hosts in (2, 8)]
    (axes,) = draw(read([made.settings("scale"), *runs])).axes
    assert [1, 4] in [list(line.get_ydata()) for line in axes.lines]


def test_sweep_has_a_line_over_the_rates_for_each_model_and_share(read, text_of):
    lines = [
        made.run("sweep", store, (seconds,), model=model, rate_mbit=rate, compute_s=share / rate, compute_share=share,
                 bound_s=2.0, repeat=repeat)
        for repeat, slower in enumerate((0.0, 0.1, 0.4))
        for store, model, share, of_rates in (
            ("p3_sync", "vgg19", 0.25, (2.0, 2.2)), ("p3_sync", "vgg19", 1, (2.1, 2.4)),
            ("p3_sync", "resnet50", 0.25, (2.3, 2.6)), ("p3_torch", "vgg19", 0.25, (2.5, 2.0)),
        )
        for rate, seconds in zip((30, 100), (one + slower for one in of_rates))
    ]  # fmt: skip
    lines.insert(0, made.settings("sweep"))
    found = read(lines)
    ours, torchs = draw(found).axes
    assert (ours.get_title(), torchs.get_title()) == ("p3_sync\n2 hosts", "p3.torch\n2 hosts")
    drawn = {(line.get_color(), line.get_linestyle()): list(line.get_ydata())
             for line in ours.lines if list(line.get_xdata()) == [30, 100] and line.get_linestyle() != "None"}
    assert drawn == {
        (GREEN, "-"): pytest.approx([1.05, 1.15]), (GREEN, "--"): pytest.approx([1.1, 1.25]),
        (BLUE, "-"): pytest.approx([1.2, 1.35]),
    }  # fmt: skip
    assert sorted(ours.collections[0].get_segments()[0][:, 1]) == pytest.approx([1.0, 1.2])
    assert [line.get_ydata()[0] for line in ours.lines if list(line.get_xdata()) == [0, 1]] == [1, 1.08]
    assert crosses(ours) == []  # of the share that was not run
    text = text_of(lines)
    assert "computation 0.25 of communication" in text and "ResNet-50, 86 MB" in text and "Dotted: 8% above" in text


def test_point_of_the_sweep_that_failed_is_crossed_and_what_has_no_bound_is_left_out(read):
    lines = [
        made.settings("sweep"), made.run("sweep", rate_mbit=30), made.failed("sweep", "p3_sync", rate_mbit=100),
        made.run("sweep", "ddp_25_powersgd", bound_s=None),
    ]  # fmt: skip
    (axes,) = draw(read(lines)).axes
    assert crosses(axes) == [(GREEN, 100)]
    with pytest.raises(ConfigError, match="sweep: no run has a bound"):
        draw(read([lines[0], lines[-1]]))


def test_store_that_failed_or_was_not_run_is_crossed(read, text_of):
    lines = [
        made.settings("bandwidth"), made.run("bandwidth", rate_mbit=100), made.run("bandwidth", rate_mbit=200),
        made.failed("bandwidth", "dist_sync", rate_mbit=100), made.run("bandwidth", "dist_sync", rate_mbit=200),
        made.run("bandwidth", "mxnet_p3", rate_mbit=200),
    ]  # fmt: skip
    (axes,) = draw(read(lines)).axes
    assert sorted(crosses(axes)) == [(BLUE, 100), ("#E69F00", 100)]
    assert "Cross: all failed, or not run" in text_of(lines)


def test_bar_of_a_store_that_failed_says_so(text_of):
    lines = [
        made.settings("targets"), made.run("targets"), made.failed("targets", "dist_sync"),
        made.run("targets", "mxnet_p3", result="wrong"), made.run("targets", "p3_slicing", model="bert"),
    ]  # fmt: skip
    words = text_of(lines).splitlines()
    assert (words.count("failed"), words.count("wrong"), words.count("not run")) == (1, 1, 4)


def test_point_of_which_some_runs_failed_is_hollow(read):
    runs = [made.run("bandwidth"), made.failed("bandwidth", "p3_sync", repeat=1), made.run("bandwidth", "dist_sync")]
    (axes,) = draw(read([made.settings("bandwidth"), *runs])).axes
    faces = {line.get_color(): line.get_markerfacecolor() for line in axes.lines if line.get_marker() in "oD"}
    assert faces == {BLUE: BLUE, GREEN: "white"}


def test_card_that_was_not_sampled_is_no_idle_card(text_of):
    lines = [line for line in lines_of("utilization") if line["kind"] != "nic" or line["store"] != "mxnet_p3"]
    lines[1]["result"] = "wrong"  # of dist_sync, whose card then shows nothing either
    text = text_of(lines)
    assert text.count("failed, or not sampled") == 2 and text.count("sent: idle 20%") == 2


def test_figure_of_two_commits_warns(text_of):
    lines = [made.settings("targets", commit="another"), *lines_of("targets")]
    assert "NOTE: targets: results of 2 different commits" in text_of(lines)


def test_result_below_the_bound_is_told_in_the_figure(text_of):
    text = text_of([made.settings("targets"), made.run("targets", bound_s=2.0)])
    assert "NOTE: results below the bound are impossible" in text


def test_unknown_experiment_and_missing_card_are_errors(read, tmp_path):
    with pytest.raises(ConfigError, match="no figure for the experiment guess, only for targets, bandwidth"):
        report.save_figures(read([made.settings("guess"), made.run("guess")]), tmp_path, ["svg"])
    with pytest.raises(ConfigError, match="no nic line"):
        report.save_figures(read([made.settings("utilization"), made.run("utilization")]), tmp_path, ["svg"])


@pytest.fixture
def p3(tmp_path, processes):
    """p3(argument, ..., hide="") -> Finished; `hide` is a module that shall not be found."""

    def run(*arguments, hide=""):
        script = "import sys; sys.modules[%r] = None; from p3.cli import main; sys.exit(main(sys.argv[1:]))" % hide
        env = clean_environment(PYTHONPATH=PYTHONPATH)
        processes.append(Process([sys.executable, "-c", script, *arguments], env, tmp_path))
        return processes[-1].wait(60)

    return run


def test_command_prints_the_table_and_writes_where_it_is_told(p3, tmp_path):
    made.write(tmp_path / "results.jsonl", lines_of("targets"))
    ended = p3("plot", "results.jsonl", "--out", "new/figures", "--format", "svg")
    assert ended.code == 0, ended.err
    assert "\nVGG-19, 86 MB  " in ended.out and "wrote new/figures/targets.svg" in ended.err
    assert [path.name for path in (tmp_path / "new/figures").iterdir()] == ["targets.svg"]


def test_command_prints_markdown(p3, tmp_path):
    made.write(tmp_path / "results.jsonl", lines_of("targets"))
    ended = p3("plot", "results.jsonl", "--markdown", "--format", "svg")
    assert ended.code == 0 and "\n| VGG-19, 86 MB |" in ended.out, ended


def test_command_says_what_is_wrong(p3, tmp_path):
    made.write(tmp_path / "results.jsonl", lines_of("targets"))
    without = p3("plot", "results.jsonl", hide="matplotlib")
    assert without.code == 1 and "pip install matplotlib" in without.err and "Traceback" not in without.err
    missing = p3("plot", "none.jsonl")
    assert missing.code == 1 and "none.jsonl cannot be read" in missing.err
    unknown = p3("plot", "results.jsonl", "--format", "gif")
    assert unknown.code == 2 and "'gif' is not one of png, svg" in unknown.err
