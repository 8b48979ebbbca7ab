"""`p3 bench`: every experiment runs, what it writes is complete, and one store's failure is the others' no concern."""

import importlib.util
import itertools
import json
import operator
import os
import signal
import subprocess
import sys
import time

import lab_results as made
import pytest
from lab_traces import needs_lab, needs_relay
from processes import PYTHONPATH, Process, clean_environment

from p3 import cli
from p3.measure.bench import campaign, experiments, limits, measured, report, runs
from p3.measure.bench.changes import BEFORE, LEAST, SETTLING
from p3.measure.bench.command import fill_in_rate, leave_out_what_cannot_clip
from p3.measure.bench.configuration import Course
from p3.measure.bench.paths import PATHS, TOLERANCES, Path
from p3.measure.jobs import job as jobs
from p3.measure.jobs import nic, stores
from p3.measure.lab import hosts
from p3.measure.lab.shaping import Shaping
from p3.measure.planning.names import by_number
from p3.measure.replay import bound, models
from p3.measure.results import records as written
from p3.measure.results import summaries
from p3.measure.trainings import mxnet_convnet, resnets
from p3.placement import PACKET_BYTES
from p3.plan.strategy import Cut, Strategy
from p3.settings import Settings

TINY = ["--size", "0.01", "--iterations", "2", "--warmup", "1", "--repeats", "1"]
EMULATED = [*TINY, "--models", "sockeye", "--rate", "400mbit"]
FIELDS = {
    "kind", "experiment", "label", "store", "model", "size", "bytes", "computation", "compute_s", "rate_mbit",
    "rates_mbit", "delay_ms", "hosts", "workers", "servers", "slice_elements", "repeat", "iteration_s", "median_s",
    "bound_s", "bound_reason", "stall_s", "worst_layer", "cpu_s", "result", "error",
}  # fmt: skip


@pytest.fixture
def started(monkeypatch, forked_imports):
    """For a test of what processes use: none is forked."""
    monkeypatch.delenv("P3S_FORK_SERVERS")


@pytest.fixture
def bench(tmp_path, forked_imports):
    """bench(EXPERIMENT, option, ...) -> (exit status, the settings written, the other records)."""

    def run(*arguments):
        out = tmp_path / "results.jsonl"
        status = cli.main(["bench", *arguments, "--out", str(out)])
        settings, *records = map(json.loads, out.read_text().splitlines())
        assert settings["kind"] == "settings" and settings["experiment"] == arguments[0]
        return status, settings, records

    return run


def runs_of(records, further=()):
    found = [record for record in records if record["kind"] == "run"]
    assert all(set(record) == FIELDS.union(further) for record in found)
    return found


def assert_right(record, iterations=2):
    assert (record["result"], record["error"]) == ("right", None)
    assert len(record["iteration_s"]) == iterations and min(record["iteration_s"]) > 0
    assert min(record["iteration_s"]) <= record["median_s"] <= max(record["iteration_s"])


@needs_lab
def test_all_stores_are_compared_with_the_bound_and_plot_prints_the_same(started, bench, capsys, tmp_path):
    tiny = [*EMULATED, "--iterations", "8"]  # of which at least one takes a tick of processor time
    status, settings, records = bench("bandwidth", *tiny, "--compute", "0.02", "--hosts", "1")
    assert status == 0, records
    assert [record["store"] for record in runs_of(records)] == list(stores.names("main"))
    for record in records:
        assert_right(record, iterations=8)
        assert (record["computation"], record["compute_s"], record["rate_mbit"]) == ("emulated", 0.02, 400)
        assert 0 < record["cpu_s"] < os.cpu_count() * max(record["iteration_s"])
        assert record["bytes"] == models.load("sockeye", 0.01).bytes
        assert record["bound_s"] >= 0.02 and record["bound_reason"]
        assert record["slice_elements"] == ("auto" if record["store"].startswith("p3") else None)
    assert settings["versions"]["mxnet"] == "1.9.1" and settings["options"]["repeats"] == 1
    printed = capsys.readouterr().out
    assert "Computation is emulated" in printed and "paper's" in printed
    if importlib.util.find_spec("matplotlib"):
        assert cli.main(["plot", str(tmp_path / "results.jsonl"), "--out", str(tmp_path), "--format", "svg"]) == 0
        assert capsys.readouterr().out == printed


@needs_lab
def test_workers_that_are_rounds_apart_are_compared_by_their_pace(bench):
    stores = ["p3_sync", "dist_async", "p3_ssp_4"]  # one of each kind
    if importlib.util.find_spec("torch") is not None:
        stores.append("p3_torch_4")
    status, _, records = bench(
        "staleness", *EMULATED, "--compute", "0.02", "--hosts", "2", "--stores", ",".join(stores)
    )
    assert status == 0, records
    assert [(one["rates_mbit"], one["store"]) for one in runs_of(records)] == [
        (rates, store) for rates in (None, [400, 200]) for store in stores
    ]
    for record in records:
        assert_right(record)  # each worker's pace


@needs_lab
def test_compressed_stores_are_compared_by_what_crosses_the_cards(started, bench, capsys):
    status, _, records = bench("dgc", *EMULATED, "--iterations", "8", "--compute", "0.1", "--hosts", "2")
    assert status == 0, records
    found = runs_of(records, ["card_bytes", "worker_peak_bytes", "server_peak_bytes"])
    assert [one["store"] for one in found] == ["p3_sync", *stores.of_codecs(), *stores.names("dgc")]
    plain, *encoded = found[:-2]
    sparse = found[-2:]
    for record in found:
        assert_right(record, iterations=8)
        cards = [card for card in records if card["kind"] == "nic" and card["store"] == record["store"]]
        counted = sum(sum(card["bytes_out"]) for card in cards) / 2 / len(record["iteration_s"])
        headers = PACKET_BYTES * sum(sum(card["packets_out"]) for card in cards) / 2 / len(record["iteration_s"])
        assert min(record["worker_peak_bytes"], record["server_peak_bytes"]) > 10e6  # Python alone
        # What is under way when they begin and when they end is up to one iteration's; heartbeats count, too.
        assert len(cards) == 2
        assert 7 / 8 * record["card_bytes"] < counted - headers < 9 / 8 * record["card_bytes"] + 20_000
    assert plain["card_bytes"] > plain["bytes"] and counted < plain["bytes"] / 4
    assert [one["bound_s"] < plain["bound_s"] for one in sparse] == [True, True]
    assert [one["card_bytes"] < plain["card_bytes"] / 10 for one in sparse] == [True, True]
    shares = {one["store"]: one["card_bytes"] / plain["card_bytes"] for one in encoded}
    expected = {
        "p3_fp16": 3 / 4, "p3_2bit": 17 / 32, "p3_1bit": 33 / 64, "p3_bf16": 3 / 4, "p3_int8": 5 / 8, "p3_int4": 9 / 16,
        "p3_topk": 1 / 2,
    }  # fmt: skip
    assert shares == pytest.approx(expected, rel=0.02)
    printed = capsys.readouterr().out
    assert "P3's frames alone" in printed and "idle share" not in printed


@needs_lab
@pytest.mark.torch
def test_compressed_stores_of_torch_and_ddps_hook_send_what_their_formulas_say(bench, capsys):
    names = ["p3_torch", "p3_torch_int8-bf16", "p3_torch_fp16", "ddp_1_fp16"]
    options = ["--models", "sockeye", "--rate", "400mbit", "--compute", "0.1", "--hosts", "2", "--size", "0.1",
               "--iterations", "6", "--warmup", "1", "--repeats", "1"]  # fmt: skip
    status, _, records = bench("dgc", *options, "--stores", ",".join(names))
    assert status == 0, records
    found = runs_of(records, ["card_bytes", "worker_peak_bytes", "server_peak_bytes"])
    assert [one["store"] for one in found] == names
    for record in found:
        assert_right(record, iterations=6)
        cards = [card for card in records if card["kind"] == "nic" and card["store"] == record["store"]]
        counted = sum(sum(card["bytes_out"]) for card in cards) / 2 / len(record["iteration_s"])
        # What is under way when they begin is a part, the greater the fewer they are; not so in
        # tests/mxnet/test_traffic.py.
        assert counted == pytest.approx(record["card_bytes"], rel=0.3), record["store"]
    plain = found[0]["card_bytes"]
    shares = [one["card_bytes"] / plain for one in found]
    assert shares == pytest.approx([1, (1 / 4 + 1 / 2) / 2, 1 / 2, 1 / 2], rel=0.02)
    assert [one["bound_s"] < found[0]["bound_s"] for one in found] == [False, True, True, True]


@needs_lab
def test_factors_are_compared_with_dense_gradients_by_what_crosses_the_cards(bench, capsys):
    options = ["--rate", "100mbit", "--size", "0.002", "--iterations", "2", "--warmup", "1", "--repeats", "1"]
    status, _, records = bench("factors", *options, "--compute", "0.1", "--hosts", "2", "--batch", "4,500")
    assert status == 0, records
    found = runs_of(records, ["card_bytes", "batch", "worker_peak_bytes", "server_peak_bytes"])
    assert [(one["store"], one["batch"]) for one in found] == [
        (store, batch) for batch in (4, 500) for store in stores.names("factored")
    ]
    for record in found:
        assert_right(record)
    few, many = [one["card_bytes"] for one in found[:3]], [one["card_bytes"] for one in found[3:]]
    assert few[1] == few[2] < few[0] / 4  # the rule takes factors, which are few bytes
    assert many[2] <= min(many[:2]) * 1.01  # and the fewer of both for each layer
    assert "batches of 4" in capsys.readouterr().out


@needs_lab
def test_utilization_counts_the_bytes_of_every_card_and_a_failing_store_is_no_concern_of_others(
    bench, monkeypatch, capsys
):
    # Fails sooner than MXNet's own would.
    broken = stores.STORES["dist_sync"]._replace(kvstore="p3_sync", environment={"P3_PRIORITY": "none"})
    monkeypatch.setitem(stores.STORES, "dist_sync", broken)
    status, _, records = bench("utilization", *EMULATED, "--stores", "dist_sync,p3_sync", "--compute", "0.02")
    assert status == 1
    failed, right, *cards = records
    assert runs_of(records) == [failed, right]
    assert failed["result"] == "failed" and failed["median_s"] is None and failed["iteration_s"] == []
    assert "ended with status 1" in failed["error"] and "P3_PRIORITY='none': it must be one of" in failed["error"]
    assert_right(right)
    assert right["bound_s"] > 0.02 and "must be pushed" in right["bound_reason"]
    assert [(card["kind"], card["host"]) for card in cards] == [("nic", 0), ("nic", 1)]
    for card in cards:
        # Of each iteration half of the pushes and half of the broadcasts cross each card, each way.
        for way in ("bytes_in", "bytes_out"):
            assert sum(card[way]) > right["bytes"]
            assert len(card[way]) == pytest.approx(sum(right["iteration_s"]) / card["interval_s"], abs=20)
    printed = capsys.readouterr().out
    assert "1 of 1 runs failed: dist_sync:" in printed and "idle share of network cards" in printed


@needs_lab
def test_changes_counts_what_ends_well_behind_the_change(bench, capsys):
    options = [*EMULATED, "--rate", "40mbit", "--factors", "0.5", "--hosts", "2", "--stores", "p3_sync,dist_sync"]
    status, _, records = bench("changes", *options, "--compute", "0.02", "--iterations", str(LEAST + 2))
    assert status == 0, records
    (before,) = configurations("targets", *EMULATED, "--regimes", "slow", "--rate", "40mbit", "--compute", "0.02")
    for record in runs_of(records, ["from_mbit", "before_s", "settling_s"]):
        assert_right(record, iterations=3)
        assert (record["from_mbit"], record["rate_mbit"]) == (40, 20)
        assert (len(record["before_s"]), len(record["settling_s"])) == (BEFORE, SETTLING)
        assert record["median_s"] > record["bound_s"] > 1.5 * limits.goal(before).seconds
        assert min(record["before_s"]) < record["bound_s"], "the links were fast again, for the second store, too"
    assert "40 Mbit/s, then 20 Mbit/s" in capsys.readouterr().out


@needs_lab
def test_sweep_computes_for_a_share_of_the_bounds_communication_at_every_rate(bench, capsys, tmp_path):
    options = [*EMULATED, "--rate", "50mbit,200mbit", "--shares", "0.5,1", "--hosts", "2", "--stores", "p3_sync"]
    status, _, records = bench("sweep", *options)
    assert status == 0, records
    found = runs_of(records, ["compute_share"])
    assert [(one["compute_share"], one["rate_mbit"]) for one in found] == [(0.5, 50), (0.5, 200), (1, 50), (1, 200)]
    for record in found:
        assert_right(record)
        # Not that it takes longer than the bound: of few iterations one may begin late, and then it is a short one.
        assert record["median_s"] > 0 and record["bound_s"] >= record["compute_s"] > 0
    printed = capsys.readouterr().out
    assert "computation 0.5 of communication" in printed and "above the bound: " in printed and " of 4\n" in printed
    if importlib.util.find_spec("matplotlib"):
        assert cli.main(["plot", str(tmp_path / "results.jsonl"), "--out", str(tmp_path), "--format", "svg"]) == 0
        assert capsys.readouterr().out == printed and (tmp_path / "sweep.svg").exists()


@needs_lab
def test_compute_trains_and_emulates_nothing(bench, capsys):
    options = ["--iterations", "2", "--warmup", "10", "--repeats", "1", "--size", "0.01", "--hosts", "2"]
    options += ["--pause", "0.01", "--loss", "3"]
    status, _, records = bench("compute", *options, "--stores", "p3_sync,dist_async,p3_ssp_1")
    assert status == 0, records
    for record in runs_of(records, ["losses", "loss_at_s", "goal_loss"]):
        assert_right(record)
        assert len(record["losses"]) == 12 and record["losses"][-1] < record["losses"][0]
        assert record["loss_at_s"] == sorted(record["loss_at_s"])
        assert record["bytes"] == mxnet_convnet.model_bytes(0.01)  # of the net that was trained, and of one that fails
        assert record["computation"] == "real" and record["compute_s"] is record["bound_s"] is None
    printed = capsys.readouterr().out
    assert "Nothing is emulated" in printed and "compute: loss at the end" in printed
    assert "compute: to a loss of 3: convnet" in printed and "not reached" not in printed


@needs_lab
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn: pip install scikit-learn")
def test_accuracy_is_that_of_every_epoch_and_stores_of_the_same_mathematics_begin_alike(bench, capsys, tmp_path):
    options = ["--epochs", "3", "--repeats", "1", "--hosts", "2", "--depth", "8", "--rate", "200mbit"]
    status, _, records = bench("accuracy", *options, "--stores", "dist_sync,p3_sync,p3_dgc_0.001")
    assert status == 0, records
    found = runs_of(records, ["losses", "loss_at_s", "accuracies", "accuracy_at_s"])
    steps = resnets.steps_of_an_epoch(2)
    for record in found:
        assert (record["result"], record["error"]) == ("right", None)
        assert record["bytes"] == resnets.model_bytes(8)  # as the net that was trained has them
        assert len(record["losses"]) == steps and len(record["iteration_s"]) == 2 * steps  # without the first epoch
        assert len(record["accuracies"]) == 3 and 0.2 < record["accuracies"][-1] <= 1
        assert record["accuracy_at_s"] == sorted(record["accuracy_at_s"])
        assert record["accuracy_at_s"][0] > record["loss_at_s"][-1]
    mxnets, ours, sparse = (record["losses"] for record in found)
    assert ours == pytest.approx(mxnets, rel=1e-3) and ours[0] == sparse[0] and ours != pytest.approx(sparse, rel=1e-3)
    printed = capsys.readouterr().out
    assert "against" in printed and "0.004 below P3" in printed
    if importlib.util.find_spec("matplotlib"):
        assert cli.main(["plot", str(tmp_path / "results.jsonl"), "--out", str(tmp_path), "--format", "svg"]) == 0
        assert "CIFAR-10" in (tmp_path / "accuracy.svg").read_text()


@needs_lab
def test_hanging_job_meets_its_deadline_and_leaves_nothing(bench, capsys):
    options = ["--stores", "p3_sync", "--hosts", "1", "--ratios", "0.01", "--timeout", "1"]
    status, _, records = bench("ratio", *TINY, "--models", "sockeye", "--rate", "1mbit", *options)
    (record,) = runs_of(records)
    assert record["compute_s"] == pytest.approx(models.load("sockeye", 0.01).bytes * 8 / 1e6 / 0.01)
    assert status == 1 and record["result"] == "failed" and "the workers did not end in 1 s" in record["error"]


@pytest.mark.parametrize(
    "may_hang, has_results, result", [(True, True, "right"), (False, True, "failed"), (True, False, "failed")]
)
def test_results_count_where_only_the_end_of_a_store_of_others_hangs(
    monkeypatch, capsys, may_hang, has_results, result
):
    lines = lines_of(0, [1.0], [0.0, 0.0], "x")
    lines[0]["workers"] = 1
    lines = lines[: None if has_results else -1]
    program = "import time\n" + "".join(f"print({json.dumps(one)!r})\n" for one in lines)
    store = stores.STORES["alone"]._replace(may_hang_at_end=may_hang)

    def made(store, configuration, course, site, folder, repeat):
        command = [sys.executable, "-c", program + "time.sleep(1000)"]
        job = jobs.Job(store, site.hosts, command, root=site.root, port=1, folder=folder, omp_threads=1)
        monkeypatch.setattr(job, "start", lambda: (start(job), wait_until(lambda: job.lines("worker 0") == lines)))
        return job

    start = jobs.Job.start  # and the job's time begins when it has told what it has
    monkeypatch.setattr(runs, "_job", made)
    here = jobs.LocalHost("127.0.0.1")
    configuration = configurations("bandwidth", "--models", "sockeye", *TINY)[0]
    course = Course(1, 0, 0.0, "none", omp_threads=1, timeout_s=2)
    (record,) = runs.run(store, configuration, course, runs.Site([here], here, iter([1])), 0)
    assert record["result"] == result
    told = capsys.readouterr().err if result == "right" else record["error"]
    assert "alone: the workers did not end in 2 s" in told


def wait_until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_lab
def test_ctrl_c_keeps_what_has_ended_and_leaves_nothing(tmp_path, processes):
    out = tmp_path / "results.jsonl"
    arguments = ["bench", "slices", *EMULATED, "--slices", "9000", "--compute", "1000", "--out", str(out)]
    process = Process([sys.executable, "-m", "p3", *arguments], clean_environment(), tmp_path)
    processes.append(process)
    wait_until(lambda: list(hosts.RUN.glob("tmp-%d-*/lab/0/net" % process.popen.pid)))
    (name,) = [path.name for path in hosts.RUN.glob("tmp-%d-*" % process.popen.pid)]
    wait_until(lambda: [one for one in hosts.status() if one.name == name and one.processes and all(one.processes)])
    left = [pid for one in hosts.status() if one.name == name for pids in one.processes for pid in pids]
    process.signal(signal.SIGINT)
    finished = process.wait(30)
    assert finished.code == 130 and "interrupted" in finished.err, finished
    assert json.loads(out.read_text())["kind"] == "settings"
    assert not (hosts.RUN / name).exists()
    assert left and not any((hosts.Path("/proc") / str(pid) / "exe").exists() for pid in left)


def test_real_hosts_over_ssh(bench, tmp_path, monkeypatch, sshd, capsys):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost\n127.0.0.2\n")
    monkeypatch.setenv("P3_SSH", sshd)
    monkeypatch.setenv("DMLC_NODE_HOST", "127.0.0.1")
    options = [*TINY, "--models", "sockeye", "--compute", "0.02", "--hostfile", str(hostfile)]
    status, settings, records = bench("utilization", *options, "--stores", "p3_sync")
    assert status == 0, records
    assert not settings["options"]["throttled"]
    assert [one["kind"] for one in records] == ["run", "nic", "nic"]
    (record,) = runs_of(records)
    assert_right(record)
    assert record["rate_mbit"] > 0 and record["bound_s"] > 0
    assert record["cpu_s"] is None  # nobody counts it behind ssh
    assert "measured from localhost to 127.0.0.2" in capsys.readouterr().err


def test_no_secret_is_on_a_command_line_to_another_host(monkeypatch):
    from p3.measure.jobs.ssh_host import SshHost
    monkeypatch.setenv("P3_SECRET", "swordfish-swordfish")
    host = SshHost("far", "10.0.0.5", Settings())
    line = " ".join(host.supervised([sys.executable, "-c", "import mxnet"], {"DMLC_ROLE": "server"}))
    assert "swordfish" not in line and "DMLC_ROLE=server" in line
    assert "{0} -m p3.measure.jobs.ssh_host {0} -c".format(sys.executable) in line


# Without running anything


def options_of(*arguments):
    options = cli.parser().parse_args(["bench", *arguments])
    fill_in_rate(options)
    return options


def configurations(*arguments):
    return experiments.named(arguments[0]).configurations(options_of(*arguments))


def test_targets_are_all_models_in_both_regimes():
    made = configurations("targets")
    assert [(one.model, one.rate_mbit, one.compute_s) for one in made] == [
        (model, *regime) for regime in ((200, 4.0), (800, 1.0)) for model in models.NAMES
    ]
    assert all(one.size == models.LAB_SIZES[one.model] for one in made)


def test_scale_shrinks_what_one_machine_cannot_carry():
    made = configurations("scale", "--models", "vgg19")
    assert [one.hosts for one in made] == [2, 4, 8, 16]
    assert {(one.rate_mbit, one.compute_s) for one in made} == {(40, 4.0)}
    assert made[0].size == pytest.approx(models.LAB_SIZES["vgg19"] / 5)


def test_ratio_chooses_the_computation():
    (made,) = configurations("ratio", "--models", "bert", "--ratios", "1.4", "--rate", "100mbit")
    assert models.load("bert").bytes * 8 / 100e6 / made.compute_s == pytest.approx(1.4)


@pytest.mark.parametrize("further, clips", [([], False), (["--clip", "1"], True)])
def test_sweep_computes_for_shares_of_the_bound_without_computation(further, clips):
    arguments = ["--models", "vgg19,bert", "--rate", "30mbit,1gbit", "--shares", "0.25,1", "--size", "0.02", *further]
    made = configurations("sweep", *arguments)
    assert [(one.model, one.compute_share, one.rate_mbit, one.hosts) for one in made] == [
        (*point, 4) for point in itertools.product(("vgg19", "bert"), (0.25, 1), (30, 1000))
    ]
    for one in made:
        communication = bound.bound(
            models.load(one.model, 0.02), 0.0, bound.one_of_each(4, one.rate_mbit), "auto", clips=clips
        )
        assert one.compute_s == pytest.approx(one.compute_share * communication.seconds, rel=1e-3)
        assert one.identity()["compute_share"] == one.compute_share
    assert "compute_share" not in configurations("targets")[0].identity()


def test_late_gradients_have_a_bound_of_their_own_and_are_told(tmp_path):
    arguments = ["targets", "--models", "vgg19", "--regimes", "slow"]
    (plain,), (late,) = configurations(*arguments), configurations(*arguments, "--release", "end")
    assert "release" not in plain.identity() and late.identity()["release"] == "end"
    assert limits.goal(late).seconds > 1.3 * limits.goal(plain).seconds
    course = Course(1, 1, 0.0, "none", 1, None)
    for store in ("p3_sync", "dist_sync", "p3_torch"):
        command = experiments.named("targets").computation.command(stores.STORES[store], late, course, 0)
        assert command[command.index("--release") + 1] == "end"


def test_keys_that_a_strategy_puts_on_one_server_count_in_the_bound():
    (plain,) = configurations("targets", "--models", "vgg19", "--regimes", "slow", "--hosts", "4")
    model = models.load("vgg19")
    by_name = Strategy(keys={tensor.name: Cut((0,)) for tensor in model.tensors})
    alone = plain._replace(strategy="server 0 alone", strategy_text=by_number(by_name, model).text())
    assert limits.goal(alone) == bound.bound(model, 4.0, bound.one_of_each(4, 200), "auto", strategy=by_name)
    assert limits.goal(alone).seconds > 1.5 * limits.goal(plain).seconds


def test_clipping_has_a_bound_of_its_own_is_told_to_the_workers_and_sets_records_apart():
    arguments = ["targets", "--models", "vgg19", "--regimes", "slow", "--hosts", "4"]
    (plain,), (clipped,) = configurations(*arguments), configurations(*arguments, "--clip", "1.5")
    assert "clip" not in plain.identity() and clipped.identity()["clip"] == 1.5
    model = models.load("vgg19")
    expected = bound.bound(model, 4.0, bound.one_of_each(4, 200), "auto", clips=True)
    assert limits.goal(clipped) == expected
    course = Course(1, 1, 0.0, "none", 1, None)
    for name, options in (("targets", []), ("compute", ["--loss", "1"]), ("learn", ["--models", "gpt"])):
        (first, *_) = configurations(name, *options, "--clip", "1.5")
        for store in ("ddp_5", "p3_torch"):
            command = experiments.named(name).computation.command(stores.STORES[store], first, course, 0)
            assert command[command.index("--clip") + 1] == "1.5"
    runs = [made.run("targets"), made.run("targets", clip=1.5), made.run("targets", clip=1.0)]
    found = written.of_records([made.settings("targets"), *runs])
    assert len(summaries.summarise(found.runs)) == 3
    titles = [table.title for table in report.tables(found)]
    assert len(titles) == 3 and titles[1].endswith("clipped to a norm of 1.5")


def test_stores_that_cannot_clip_are_left_out_by_name(capsys):
    options = options_of("targets", "--clip", "1", "--stores", "dist_sync,ddp_5,p3_torch_4,p3_torch")
    leave_out_what_cannot_clip(options)
    assert options.stores == ["ddp_5", "p3_torch"]
    assert "left out, as they cannot clip here: dist_sync, p3_torch_4" in capsys.readouterr().err
    assert cli.main(["bench", "targets", "--clip", "1"]) == 1
    told = capsys.readouterr().err
    assert "dist_sync, mxnet_p3, p3_sync cannot clip here" in told and "ddp_1, ddp_5, ddp_25, p3_torch" in told


def test_links_may_have_rates_of_their_own(capsys):
    (made,) = configurations("targets", "--models", "bert", "--regimes", "slow", "--rates", "20mbit,40mbit")
    assert (made.rates_mbit, made.rate_mbit) == ((20, 40), 40)
    assert made.identity()["rates_mbit"] == [20, 40]
    assert cli.main(["bench", "targets", "--hosts", "3", "--rates", "20mbit,40mbit"]) == 1
    assert "has 2 rates; it needs one for each of the --hosts" in capsys.readouterr().err


def test_links_may_be_long_lossy_and_smooth(capsys):
    one = ("targets", "--models", "bert", "--regimes", "slow")
    (made,) = configurations(*one, "--delay", "50ms", "--packet-loss", "0.5%")
    assert (made.delay_ms, made.packet_loss, made.shaping) == (50, 0.005, Shaping())
    assert made.identity()["packet_loss"] == 0.005 and "shaper" not in made.identity()
    (made,) = configurations(*one, "--shaper", "smooth")
    assert made.shaping == Shaping("smooth") and made.identity()["shaper"] == "smooth"
    assert cli.main(["bench", "targets", "--hostfile", "hosts", "--shaper", "smooth"]) == 1
    assert "are of a lab's links" in capsys.readouterr().err


def test_distance_is_all_delays_with_all_losses_and_congestion_controls():
    made = configurations("distance", "--delays", "5ms,20ms", "--packet-losses", "0%,1%", "--congestions", "bbr,reno")
    assert [(one.delay_ms, one.packet_loss, one.shaping.congestion) for one in made] == list(
        itertools.product((5, 20), (0, 0.01), ("bbr", "reno"))
    )
    near, far = (limits.goal(one).seconds for one in (made[0], made[-1]))
    assert far == pytest.approx(near + 0.015)  # the bound knows the delay


@needs_relay
def test_distance_compares_with_the_bound_with_delay(bench, capsys):
    few = ["--delays", "5ms", "--packet-losses", "0%", "--congestions", "cubic"]
    status, _, records = bench("distance", *TINY, "--models", "sockeye", "--compute", "0.02", "--rate", "400mbit", *few)
    assert status == 0, records
    (record,) = runs_of(records, ["congestion"])
    assert_right(record)
    assert (record["delay_ms"], record["congestion"]) == (5, "cubic")
    assert "5 ms delay, cubic" in capsys.readouterr().out


def test_validation_can_leave_out_what_must_not_be_looked_at():
    every, some = configurations("validation"), configurations("validation", "--without-held-out")
    assert len(every) >= 30 and set(some) < set(every)
    assert {one.label.endswith(", held out") for one in set(every) - set(some)} == {True}
    assert not any("held out" in one.label for one in some)


def test_every_experiment_has_configurations():
    for experiment in experiments.EXPERIMENTS:
        few = ["--links", "slow", "--models", "resnet50", "--strategies", "4"] if experiment.name == "verdict" else []
        made = configurations(experiment.name, *few)  # that one simulates each strategy
        assert made and len({(one.model, one.label) for one in made}) == len(made)
    assert options_of("staleness").stores == ["dist_sync", "p3_sync", *stores.names("apart")]


@pytest.mark.parametrize("arguments, words", [
    (["targets", "--stores", "dist_device_sync"], "'dist_device_sync' is none of dist_sync"),
    (["targets", "--models", "vgg19,vgg19"], "names one twice"),
    (["targets", "--repeats", "0"], "'0' is not a number from 1 to"),
    (["slices", "--rate", "800bps"], "write bit, kbit"),
    (["learn", "--models", "vgg19"], "'vgg19' is none of gpt, convnet"),
    (["learn", "--stores", "p3_sync"], "'p3_sync' is none of ddp_1"),
    (["learn", "--stores", "p3_torch_exact"], "'p3_torch_exact' compresses nothing: that is p3_torch"),
    (["accuracy", "--depth", "9"], "invalid choice: 9"),
    (["accuracy", "--epochs", "1"], "'1' is not a number from 2 to"),
    (["accuracy", "--stores", "p3_async"], "'p3_async' is none of dist_sync"),
    (["compute", "--stores", "p3_dgc_0.01"], "'p3_dgc_0.01' is none of"),
    (["ratio", "--release", "late"], "invalid choice: 'late'"),
    (["sweep", "--compute", "1"], "unrecognized arguments: --compute"),
    (["sweep", "--hosts", "2", "--rates", "20mbit,40mbit"], "unrecognized arguments: --rates"),
    (["sweep", "--shares", "1/4"], "'1/4' is not a number from"),
    (["targets", "--clip", "0"], "'0' is not a number from"),
    (["accuracy", "--clip", "1"], "unrecognized arguments: --clip"),
])  # fmt: skip
def test_wrong_options_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", [
    (["targets", "--hosts", "2,4"], "p3 bench targets takes one --hosts"),
    (["dgc", "--optimizer", "none"], "needs a --rate, and --optimizer sgd"),
    (["accuracy", "--hosts", "40"], "too few pictures for 40 --hosts"),
    (["utilization", "--hosts", "1"], "p3 bench utilization needs at least 2 --hosts"),
    (["sweep", "--hosts", "1"], "p3 bench sweep needs at least 2 --hosts"),
    (["changes", "--iterations", "16"], "p3 bench changes needs at least 17 --iterations"),
    (["targets", "--hostfile", "/nowhere"], "--hostfile /nowhere cannot be read"),
])  # fmt: skip
def test_what_an_experiment_cannot_do_is_refused(arguments, words, capsys):
    assert cli.main(["bench", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_stores_take_turns_in_an_order_that_rotates():
    class Here:
        def __init__(self, configuration):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    made = configurations("targets", "--models", "vgg19,bert", "--regimes", "slow")
    turns = [
        (repeat, configuration.model, store.name)
        for store, configuration, repeat, _ in campaign._turns(made, ["dist_sync", "p3_sync"], 2, Here)
    ]
    assert turns == [
        (repeat, model, store)
        for repeat, order in enumerate((["dist_sync", "p3_sync"], ["p3_sync", "dist_sync"]))
        for model in ("vgg19", "bert")
        for store in order
    ]


def lines_of(rank, seconds, stalls, digest, result="right"):
    return [
        {"kind": "header", "rank": rank, "workers": 2, "bytes": 40, "layers": [["a", 30], ["b", 10]]},
        {"kind": "iteration", "warmup": True, "start": 0.0, "seconds": 99.0, "stall_s": 9.0, "stalls": [9.0, 0.0]},
        *({"kind": "iteration", "warmup": False, "start": 0.0, "seconds": one, "stall_s": sum(stalls), "stalls": stalls}
          for one in seconds),
        {"kind": "result", "result": result, "digest": digest},
    ]  # fmt: skip


def test_iteration_is_as_long_as_its_slowest_workers_and_warm_up_does_not_count():
    found = measured.summary([lines_of(0, [1.0, 5.0], [0.1, 0.3], "x"), lines_of(1, [2.0, 3.0], [0.2, 0.3], "x")])
    assert found == {
        "bytes": 40, "iteration_s": [2.0, 5.0], "median_s": 3.5, "stall_s": 0.5, "worst_layer": "b", "result": "right",
    }  # fmt: skip


@pytest.mark.parametrize("digest, result", [("y", "right"), ("x", "wrong")])
def test_run_is_wrong_if_one_worker_is_or_if_workers_differ(digest, result):
    found = measured.summary([lines_of(0, [1.0], [0, 0], "x"), lines_of(1, [1.0], [0, 0], digest, result)])
    assert found["result"] == "wrong"


def test_workers_that_trained_alone_are_wrong():
    found = measured.summary([lines_of(0, [1.0], [0, 0], "x")])
    assert found["result"] == "wrong"


def test_bytes_of_an_interval_are_between_the_samples_next_to_its_edges():
    samples = {
        "times": [0.0, 1.0, 2.5], "bytes_in": [100, 200, 500], "bytes_out": [0, 0, 3], "packets_out": [7, 9, 12]
    }  # fmt: skip
    found = nic.per_interval(samples, 0.5, 2.6, 1.0)
    assert found == {"bytes_in": [150, 200], "bytes_out": [1, 2], "packets_out": [2, 2]}


@pytest.mark.parametrize("one_clock, spans", [(True, [(1, 4), (1, 4)]), (False, [(1, 3), (2, 4)])])
def test_cards_are_counted_over_one_span_where_hosts_have_one_clock(one_clock, spans):
    def lines(*starts):
        return [{"kind": "iteration", "warmup": start < 1, "start": start, "seconds": 0.5} for start in starts]

    samples = {"times": [0.0, 5.0], "bytes_in": [0, 500], "bytes_out": [0, 5000], "packets_out": [0, 50]}
    found = list(measured.cards([lines(0.0, 1.0, 2.5), lines(0.0, 2.0, 3.5)], [samples] * 2, one_clock))
    assert [card["host"] for card in found] == [0, 1]
    for card, (begin, end) in zip(found, spans):
        assert card["bytes_in"] == [1] * ((end - begin) * 100) and card["bytes_out"] == [10] * ((end - begin) * 100)


def test_sampler_of_a_card_has_one_thread():
    """SIGTERM, by which it ends, must not reach one that does not block it, as those of NumPy."""
    program = "import os, p3.measure.jobs.nic; print(len(os.listdir('/proc/self/task')))"
    environment = clean_environment(PYTHONPATH=PYTHONPATH)
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, timeout=60) == b"1\n"


def test_ports_of_this_machine_are_free_and_differ():
    assert len(set(itertools.islice(campaign._free_ports(), 5))) == 5


def test_jobs_that_go_on_without_others_differ_from_the_plain_one_in_settings_alone():
    plain, *others = configurations("fault_tolerance")
    assert [one.path_name for one in (plain, *others)] == list(TOLERANCES)
    assert plain.path == Path()
    for one in others:
        assert one.path == Path(environment=one.path.environment) != Path()
        assert one._replace(path_name=plain.path_name, label=plain.label) == plain
        Settings.from_env(one.path.environment)


def test_paths_differ_from_the_plain_one_in_one_thing_each():
    plain, *others = configurations("paths")
    assert [one.path_name for one in (plain, *others)] == list(PATHS)
    assert plain.path == Path() and plain.workers == plain.hosts == 4
    for one in others:
        assert sum(map(operator.ne, one.path, Path())) == 1, one
        assert one._replace(path_name=plain.path_name, label=plain.label) == plain
        assert one.identity()["workers"] == 4 * one.path.workers_per_host
