"""`p3 bench learn`: real training with DDP and with P3 learns the same, step by step, and says when."""

import json
import os
import sys

import plugin_jobs
import pytest
from lab_traces import needs_lab
from processes import PYTHONPATH

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch

from p3 import cli
from p3.measure.results import curves
from p3.measure.results import records as written
from p3.measure.trainings import lessons

SIZE, STEPS = 0.02, 14
FOLLOWED = 4  # steps of all lessons, of which one computes much
CLIP = 0.5  # which all these gradients exceed


def losses_on_the_joined_batch(name, max_norm=None):
    """Of one process that trains plainly."""
    lesson = lessons.LESSONS[name]
    data = lesson.data()
    torch.manual_seed(1)
    net = lesson.make_net(SIZE)
    optimizer, losses = lesson.make_optimizer(net), []
    for number in range(FOLLOWED):
        inputs, targets = map(torch.cat, zip(*(lesson.batch(data, number, rank, 0) for rank in range(2))))
        optimizer.zero_grad()
        loss, _ = lesson.loss(net, inputs, targets)
        losses.append(loss.item())
        loss.backward()
        if max_norm is not None:
            assert torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm) > max_norm
        optimizer.step()
    return losses


@pytest.mark.parametrize("name, clip", [(name, None) for name in lessons.LESSONS] + [("gpt", CLIP), ("convnet", CLIP)])
def test_workers_of_p3_follow_one_process_on_the_joined_batch(name, clip):
    command = [sys.executable, "-m", "p3.measure.trainings.torch_lesson", "--store", "p3_torch", "--model", name,
               "--size", str(SIZE), "--warmup", "0", "--iterations", str(FOLLOWED)]  # fmt: skip
    command += [] if clip is None else ["--clip", str(clip)]
    status, output = plugin_jobs.run_p3(2, 2, command, PYTHONPATH=PYTHONPATH)  # scikit-learn needs SciPy
    assert status == 0, output
    decoder = json.JSONDecoder()
    lines = [decoder.raw_decode("{" + part)[0] for part in output.split("{")[1:] if part.startswith('"kind": "iter')]
    of_workers = [[line["loss"] for line in lines if line["iteration"] == step] for step in range(FOLLOWED)]
    assert [len(one) for one in of_workers] == [2] * FOLLOWED
    assert [sum(one) / 2 for one in of_workers] == pytest.approx(losses_on_the_joined_batch(name, clip), rel=1e-3)


def test_workers_with_local_steps_end_with_the_same_weights():
    command = [sys.executable, "-m", "p3.measure.trainings.torch_lesson", "--store", "p3_local:4+int4", "--warmup", "0",
               "--model", "gpt", "--size", str(SIZE), "--iterations", "9", "--clip", str(CLIP)]  # fmt: skip
    status, output = plugin_jobs.run_p3(2, 2, command, PYTHONPATH=PYTHONPATH)
    assert status == 0, output
    lines = [json.loads(line[line.index("{"):]) for line in output.splitlines() if '] {"kind"' in line]
    digests = [line["digest"] for line in lines if line["kind"] == "result"]
    assert len(digests) == 2 and digests[0] == digests[1]
    own = [[line["loss"] for line in lines if line.get("iteration") == step] for step in (0, 8)]
    assert sum(own[1]) < sum(own[0]) and own[1][0] != own[1][1]


@needs_lab
@pytest.mark.timeout(300)
def test_what_local_steps_cost_in_learning_is_told_for_each_number_of_workers(tmp_path, forked_imports, capsys):
    out = str(tmp_path / "local.jsonl")
    options = ["--stores", "p3_torch,p3_local_4:0.5_int8", "--size", str(SIZE), "--iterations", "9", "--repeats", "1"]
    assert cli.main(["bench", "local_steps", *options, "--hosts", "1,2", "--out", out]) == 0, capsys.readouterr().err
    records = {(one["store"], one["hosts"]): one for one in map(json.loads, list(open(out))[1:])}
    assert all(one["result"] == "right" and one["clip"] == 1.0 for one in records.values()), records
    exact, local = (records[store, 2] for store in ("p3_torch", "p3_local_4:0.5_int8"))
    assert local["heldout_loss"] != exact["heldout_loss"] and len(local["losses"]) == 9
    assert exact["card_bytes"] == exact["bytes"]  # half of them to the other host's server, half to its worker
    assert 0.25 < local["card_bytes"] * 4 / exact["card_bytes"] < 0.26  # int8, and its scales
    assert records["p3_torch", 1]["card_bytes"] is None
    table = capsys.readouterr().out
    assert "int8" in table and "loss, 2" in table and "+" in table


@needs_lab
@pytest.mark.timeout(300)
def test_what_compression_costs_in_learning_is_told_for_each_seed(tmp_path, forked_imports, capsys):
    out = str(tmp_path / "codecs.jsonl")
    options = ["--models", "gpt", "--stores", "p3_torch,p3_torch_int8,ddp_25_powersgd", "--size", str(SIZE),
               "--warmup", "1", "--iterations", str(STEPS - 1), "--repeats", "2"]  # fmt: skip
    assert cli.main(["bench", "codecs", *options, "--out", out]) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in open(out)][1:]
    assert all(0 <= one["heldout_accuracy"] <= 1 and one["heldout_loss"] < one["losses"][0] for one in records)
    assert all(0 <= min(one["batch_accuracies"]) < one["batch_accuracies"][-1] for one in records)
    assert [(one["store"], one["repeat"], one["result"], one["clip"]) for one in records] == [
        (store, repeat, "right", 1.0)
        for repeat, order in enumerate([["p3_torch", "p3_torch_int8", "ddp_25_powersgd"],
                                        ["p3_torch_int8", "ddp_25_powersgd", "p3_torch"]])
        for store in order
    ]  # fmt: skip
    losses = {(one["store"], one["repeat"]): one["losses"] for one in records}
    for seed in range(2):
        exact, int8 = losses["p3_torch", seed], losses["p3_torch_int8", seed]
        assert exact[0] == int8[0] == losses["ddp_25_powersgd", seed][0], "first weights and batches are the same"
        assert exact[1:] != int8[1:] == pytest.approx(exact[1:], rel=0.02)
    assert losses["p3_torch", 0][0] != losses["p3_torch", 1][0], "and others with another seed"
    printed = capsys.readouterr().out
    assert "loss after 14" in " ".join(printed.split()) and "against" in printed and "has not learnt" not in printed


@needs_lab
def test_rows_travel_as_they_are_where_all_else_is_compressed(tmp_path, forked_imports, capsys):
    out = str(tmp_path / "codecs.jsonl")
    options = ["--models", "words", "--stores", "p3_torch,p3_torch_int8,ddp_25,ddp_25_fp16", "--size", str(SIZE),
               "--warmup", "1", "--iterations", "9", "--repeats", "1"]  # fmt: skip
    assert cli.main(["bench", "codecs", *options, "--out", out]) == 0, capsys.readouterr().err
    exact, int8, ddp, hook = (json.loads(line) for line in list(open(out))[1:])
    assert {one["result"] for one in (exact, int8, ddp, hook)} == {"right"}
    assert ddp["losses"] == pytest.approx(exact["losses"], rel=1e-3)
    for one in (int8, hook):
        assert exact["losses"][1:] != one["losses"][1:] == pytest.approx(exact["losses"][1:], rel=0.02)


@needs_lab
@pytest.mark.timeout(300)
@pytest.mark.parametrize("clip", [None, CLIP], ids=["plain", "clipped"])
def test_ddp_and_p3_learn_the_same_at_a_rate_that_was_chosen(tmp_path, request, capsys, clip):
    request.getfixturevalue("quick_imports" if clip is None else "forked_imports")
    out = str(tmp_path / "learn.jsonl")
    options = ["--models", "gpt", "--stores", "ddp_1,p3_torch", "--size", str(SIZE), "--warmup", "1",
               "--iterations", str(STEPS - 1), "--loss", "5", "--repeats", "1"]  # fmt: skip
    options += [] if clip is None else ["--clip", str(clip)]
    assert cli.main(["bench", "learn", *options, "--out", out]) == 0, capsys.readouterr().err
    settings, *records = map(json.loads, open(out))
    assert settings["machine"]["cores"] and settings["commit"]
    assert [(record["store"], record["result"], record["computation"]) for record in records] == [
        ("ddp_1", "right", "real"), ("p3_torch", "right", "real"),
    ]  # fmt: skip
    assert [record.get("clip") for record in records] == [clip, clip]
    ddp, ours = records
    assert ddp["rate_mbit"] == pytest.approx(ddp["bytes"] * 8 / 1e6 / ddp["compute_s"], rel=0.01)
    assert ddp["bytes"] == lessons.model_bytes("gpt", SIZE)
    assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-3) and len(ours["losses"]) == STEPS
    assert curves.smooth(ours["losses"])[-1] < 0.95 * ours["losses"][0]
    for record in records:
        assert record["loss_at_s"] == sorted(record["loss_at_s"]) and record["loss_at_s"][0] > 0
        assert (0 if clip is None else -1) < record["cpu_s"] < os.cpu_count() * max(record["iteration_s"])
    drawn = curves.curves(written.read([out]).runs)
    assert [one.configuration.store for one in drawn] == ["ddp_1", "p3_torch"]
    assert all(one.goal_s and one.goal_s[0] in one.at_s for one in drawn)
    printed = capsys.readouterr().out
    assert "GPT at" in printed and ("clipped to a norm of 0.5" in printed) == (clip is not None)
