"""What measures p3.torch and DDP: their replays end with the right weights, and the real training learns."""

import json
import re
import socket
import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("torch")

REPLAY = [sys.executable, "-m", "p3.replay", "--model", "resnet50", "--size", "0.02", "--compute", "0.1",
          "--iterations", "3", "--warmup", "1"]  # fmt: skip
TRAINING = [sys.executable, "-m", "p3.measure.trainings.torch_convnet", "--size", "0.2", "--iterations", "60",
            "--warmup", "0"]  # fmt: skip


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
    status, output = jobs.run_p3(2, 2, [*command, "--store", "p3_torch"])
    assert status == 0, output
    lines = lines_of(output)
    assert [line["result"] for line in lines if line["kind"] == "result"] == ["right", "right"], output
    assert len({line.get("digest") for line in lines if line["kind"] == "result"}) == 1
    assert {line["versions"]["torch"] for line in lines if line["kind"] == "header"}


@COMMANDS
def test_workers_of_p3_that_are_steps_apart_end_right(command):
    status, output = jobs.run_p3(2, 2, [*command, "--store", "p3_torch:4"])
    assert status == 0, output
    assert [line["result"] for line in lines_of(output) if line["kind"] == "result"] == ["right", "right"], output


@WITH_CLIPPED
def test_workers_of_ddp_end_right(command):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    status, output = jobs.run([*torchrun, *command[1:], "--store", "ddp:1"], 100)
    assert status == 0, output
    assert [line["result"] for line in lines_of(output) if line["kind"] == "result"] == ["right", "right"], output
