"""What crosses each host's network card, against Parallax (EuroSys'19), table 3: with N hosts and a value of w bytes,
4 w (N-1)/N for dense keys, 4 alpha w (N-1)/N for rows that are pushed and fetched, and 2 (alpha + U) w (N-1)/N where
every worker holds the whole value and alpha of it is pushed and U updated. In and out, worker and server together."""

import math
import statistics
import sys

import pytest
from lab_traces import needs_lab
from processes import ROOT

from p3.measure import compressions
from p3.measure.jobs.job import Job
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import lab
from p3.measure.replay import bound, models

SCRIPT = ROOT / "tests" / "jobs" / "traffic.py"
ROUNDS = 4
ROW_BYTES = 4 * 64  # as the script has them
ID_BYTES = 4  # of a row, at most: a gap, and the frames' own headers
PACKET_BYTES = 66  # of Ethernet, IP and TCP with time stamps, as a card counts a packet
ENOUGH_BYTES = 4e6
DEADLINE_S = 60


def cards(tmp_path, hosts, kind, alpha, workers=None, compression="exact", rounds=ROUNDS, **environment):
    """What each worker has counted, on its host."""
    command = [sys.executable, str(SCRIPT), kind, str(alpha), str(rounds), compression]
    with lab(hosts) as made, Job(
        STORES["p3_sync"], made, command, root=made[0], port=9100, folder=tmp_path, omp_threads=1,
        workers=workers, servers=hosts, environment=environment,
    ) as job:  # fmt: skip
        job.start()
        job.wait(DEADLINE_S)
        return [job.lines(f"worker {number}")[-1] for number in range(hosts)]


@needs_lab
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("kind, alpha", [("dense", 1), ("rows", 0.1), ("whole", 0.1)])
def test_bytes_on_the_cards_are_those_of_the_paper(tmp_path, hosts, kind, alpha):
    counted = cards(tmp_path, hosts, kind, alpha)
    w = ROUNDS * counted[0]["value"]
    rows = w // ROW_BYTES
    pushed = statistics.mean(one["pushed"] for one in counted)
    union = counted[0]["union"]
    elsewhere = (hosts - 1) / hosts
    of_paper, ids = {
        "dense": (4 * w, 0),
        "rows": (4 * w * pushed / rows, 4 * pushed),  # up and asked for, by this worker and of this server
        "whole": (2 * w * (pushed + union) / rows, 2 * (pushed + union)),
    }[kind]
    measured = statistics.mean(one["card"] for one in counted)
    print(f"{measured / (of_paper * elsewhere):.3f} of the paper's")
    assert 0.99 * of_paper * elsewhere <= measured <= (1.05 * of_paper + ID_BYTES * ids) * elsewhere


@needs_lab
@pytest.mark.parametrize("compression", [
    "exact", "fp16", "bf16", "int8", "int4", "2bit:0.5", "1bit", "topk", "lowrank:2", "dgc:0.001", "fp16-int8",
    "exact-bf16",
])  # fmt: skip
def test_bytes_on_the_cards_are_those_of_the_codecs_formulas_both_ways(tmp_path, compression):
    """Of P3's frames, so long that heartbeats and barriers, some kB, are no share of them. Headers of packets are taken
    away, and with them acknowledgements: a card counts segments that leave as one as one packet."""
    shape = (20_000, ROW_BYTES // 4)
    model = models.Model("w", 1.0, (models.Layer("w", (models.Tensor("w", shape),), 1 / 3, 2 / 3),))
    sent = bound.card_bytes(model, bound.one_of_each(2, 100.0), compression=compressions.parse(compression))
    rounds = max(ROUNDS, math.ceil(ENOUGH_BYTES / (2 * sent)))
    counted = cards(tmp_path, 2, "dense", 1, compression=compression, rounds=rounds)
    assert counted[0]["value"] == 4 * math.prod(shape)
    measured = statistics.mean(one["card"] - PACKET_BYTES * one["packets"] for one in counted)
    frames = 2 * rounds * sent
    print(f"{measured / frames:.4f} of the frames")
    assert 0.999 * frames <= measured <= 1.01 * frames


@needs_lab
def test_a_machines_workers_use_the_network_once(tmp_path):
    """Four workers on each of two hosts: with local aggregation their card carries what one worker's would."""
    total = {}
    for setting in "01":
        folder = tmp_path / setting
        folder.mkdir()
        counted = cards(folder, 2, "dense", 1, workers=8, P3_LOCAL_AGGREGATION=setting)
        total[setting] = statistics.mean(one["card"] for one in counted)
    of_paper = ROUNDS * counted[0]["value"] * 4 / 2
    assert 0.99 * of_paper <= total["1"] <= 1.05 * of_paper
    assert total["0"] == pytest.approx(4 * total["1"], rel=0.05)
