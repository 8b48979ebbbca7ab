"""What measures p3.torch and DDP: their replays end with the right weights, and the real training learns."""

import json
import math
import re
import socket
import sys

import numpy as np
import plugin_jobs as jobs
import pytest

pytest.importorskip("torch")

from p3.measure.replay import models
from p3.measure.replay.probes import random_numbers
from p3.measure.replay.torch_compressed import CompressedTorchReplay

REPLAY = [sys.executable, "-m", "p3.replay", "--model", "resnet50", "--size", "0.02", "--compute", "0.1",
          "--iterations", "3", "--warmup", "1"]  # fmt: skip
TRAINING = [sys.executable, "-m", "p3.measure.trainings.torch_convnet", "--size", "0.2", "--iterations", "60",
            "--warmup", "0"]  # fmt: skip


def run_p3(command, store):
    return jobs.run_p3(2, 2, jobs.python("torch_module.py", *command[2:], "--store", store))


def lines_of(output):
    """The objects that the workers have printed; torchrun may join the lines of two."""
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(output, found.start())[0] for found in re.finditer(r'\{"kind"', output)]


LATE = [*REPLAY, "--release", "end"]
CLIPPED = [*REPLAY, "--clip", "1"]
CLIPPED_TRAINING = [*TRAINING, "--clip", "1"]
COMMANDS = pytest.mark.parametrize("command", [REPLAY, LATE, TRAINING], ids=["replay", "late", "training"])
WITH_CLIPPED = pytest.mark.parametrize(
    "command", [REPLAY, LATE, TRAINING, CLIPPED, CLIPPED_TRAINING],
    ids=["replay", "late", "training", "clipped", "clipped training"],
)  # fmt: skip


@WITH_CLIPPED
def test_workers_of_p3_end_right(command):
    status, output = run_p3(command, "p3_torch")
    assert status == 0, output
    lines = lines_of(output)
    assert [line["result"] for line in lines if line["kind"] == "result"] == ["right", "right"], output
    assert len({line.get("digest") for line in lines if line["kind"] == "result"}) == 1
    assert {line["versions"]["torch"] for line in lines if line["kind"] == "header"}


@COMMANDS
def test_workers_of_p3_that_are_steps_apart_end_right(command):
    status, output = run_p3(command, "p3_torch:4")
    assert status == 0, output
    assert [line["result"] for line in lines_of(output) if line["kind"] == "result"] == ["right", "right"], output


def run_ddp(command, store):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    return jobs.run([*torchrun, *command[1:], "--store", store], 100)


@pytest.mark.parametrize("command", [REPLAY, LATE], ids=["replay", "late"])
def test_workers_alone_have_their_own_gradients_in_their_weights(command):
    for rank in "01":
        status, output = jobs.run([*command, "--store", "alone"], 100, RANK=rank, WORLD_SIZE="2")
        assert status == 0, output
        (header,) = (line for line in lines_of(output) if line["kind"] == "header")
        assert (header["rank"], header["workers"]) == (int(rank), 2)


@WITH_CLIPPED
def test_workers_of_ddp_end_right(command):
    status, output = run_ddp(command, "ddp:1")
    assert status == 0, output
    assert [line["result"] for line in lines_of(output) if line["kind"] == "result"] == ["right", "right"], output


def assert_right_and_alike(status, output):
    assert status == 0, output
    results = [line for line in lines_of(output) if line["kind"] == "result"]
    assert [line["result"] for line in results] == ["right", "right"], output
    assert len({line["digest"] for line in results}) == 1


@pytest.mark.parametrize("command, codec", [
    (REPLAY, "fp16"), (REPLAY, "int8-bf16"), (REPLAY, "1bit"), (REPLAY, "topk:0.05"), (CLIPPED, "int8"),
    (CLIPPED, "topk:0.05"), (TRAINING, "int4"), (REPLAY, "lowrank:2"), (CLIPPED, "lowrank"), (TRAINING, "lowrank"),
], ids=["fp16", "int8-bf16", "1bit", "topk", "clipped int8", "clipped topk", "training", "low rank", "clipped low rank",
        "training low rank"])  # fmt: skip
def test_workers_of_p3_that_compress_both_ways_end_near_and_alike(command, codec):
    assert_right_and_alike(*run_p3(command, "p3_torch+" + codec))


@pytest.mark.parametrize("command, store", [
    (REPLAY, "ddp:1+fp16"), (CLIPPED, "ddp:1+fp16"), (REPLAY, "ddp:25+powersgd:2"), (TRAINING, "ddp:25+powersgd"),
], ids=["fp16", "clipped", "powersgd", "training"])  # fmt: skip
def test_workers_of_ddp_with_a_hook_end_near_and_alike(command, store):
    assert_right_and_alike(*run_ddp(command, store))


def test_a_hook_that_gloo_cannot_do_is_an_error_that_says_so():
    for store, words in (("ddp:1+powersgd", "PowerSGD on Gloo hangs with several buckets"),
                         ("ddp:25+bf16", "DDP refuses bf16_compress_hook without NCCL")):
        status, output = jobs.run([*TRAINING, "--store", store], 100)
        assert status != 0 and words in output


def test_a_compressed_weight_that_lacks_a_round_is_wrong():
    model = models.load("resnet50", 0.02)
    replay = CompressedTorchReplay.__new__(CompressedTorchReplay)
    replay._pool, replay.iterations, replay.num_workers = random_numbers(), 3, 2
    replay.elements = tuple(tensor.elements for tensor in model.tensors)
    key = max(range(len(replay.elements)), key=replay.elements.__getitem__)
    rounds = [replay._sum_of(key, iteration) for iteration in range(3)]
    spread = math.sqrt(3 * 2)
    for is_fine, value, is_right in (
        (True, -sum(rounds), True), (True, -sum(rounds) * 1.01, True), (True, -sum(rounds[:2]), False),
        (False, -rounds[0], True), (False, sum(rounds), False), (False, rounds[0] * np.nan, False),
    ):  # fmt: skip
        replay._is_fine = is_fine
        assert replay._is_near(key, value, [1.0] * 3, spread) == is_right
