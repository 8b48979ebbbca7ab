"""Mutated control messages: whatever a peer sends, only ProtocolError, DisagreementError or RendezvousError comes out.

    PYTHONPATH=. python tests/fuzz/control.py --seconds 600 --seed 7

Messages of every kind, made from `messages.FIELDS` with values that a job could mean, are changed as JSON and as bytes
and go through messages.decode(), and from there into an Agreement that lives until it refuses, or into a Rendezvous.
What those answer must be fit to send. A finding prints the seed and the messages that led to it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any, List

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.cluster.rendezvous import Rendezvous
from p3.errors import DisagreementError, ProtocolError, RendezvousError
from p3.plan.strategy import Cut, Strategy

WORKERS = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
SERVERS = [Node("server", rank, "s%d" % rank) for rank in range(2)]
PLACED = Strategy(Cut((1, 0)), {"w": Cut(slice=4)})

# What a field may hold so that others match it; and what none should.
LIKELY = {
    "role": ["worker", "server", "scheduler"], "rank": [None, 0, 1, 2], "protocol": [messages.PROTOCOL_VERSION],
    "counts": [{"DMLC_NUM_WORKER": 3, "DMLC_NUM_SERVER": 2}], "settings": [{"P3_SLICE_ELEMENTS": 10}],
    "store": [0, 1], "name": ["w", 1, "1", "optimizer", "compression", "strategy"],
    "shape": [[2, 3], [], [0], [100, 4]], "dtype": ["float32", "float16"], "sparse": [False, True], "staleness": [0, 3],
    "defaults": [[], ["compression"], ["strategy"]],
    "options": [{}, {"compression": {"type": "int8"}}], "value": [
        {}, {"type": "2bit", "threshold": 0.5}, {"sha256": PLACED.sha256, "text": PLACED.text(), "path": "s.json"},
    ],
    "number": [1, 2, 3], "partitions": [1, 2, 7],
    "gathered": [False, True], "norm": [False, True], "parts": [0, 3], "round": [1, 2, 3],
    "bytes": [0, 9], "sha256": ["0f" * 32], "text": ["", "no room"], "problem": ["", "altered"], "ends": [False, True],
    "wire_key": [0, 1, 2, 3], "worker": [0, 1, 2], "counters": [{"rounds": 1}], "names": [["w", 1]],
}
ODD: List[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 10**400, 0.5, 1e308, "", "w", "\ud800", "\0", "x" * 5000, [], [[]],
    [2**62, 2**62], [1] * 100, [None], {}, {"a": []}, {"\udfff": 1}, {"kind": "bye"},
]  # fmt: skip


def seed_message(rng: random.Random) -> dict:
    kind = rng.choice(sorted(messages.FIELDS))
    message = {"kind": kind}
    for field, fits in messages.FIELDS[kind].items():
        fitting = [value for value in [*LIKELY.get(field, []), *ODD] if fits(value)]
        likely = [value for value in LIKELY.get(field, []) if fits(value)]
        message[field] = rng.choice(likely if likely and rng.random() < 0.9 else fitting or ["none fits"])
    return message


def mutate(rng: random.Random, message: dict) -> bytes:
    message = dict(message)
    while rng.random() < 0.3:
        action, field = rng.randrange(4), rng.choice(sorted(message))
        if action == 0:
            del message[field]
        elif action == 1:
            message[rng.choice(["x", "kind", "rank", "\ud800"])] = rng.choice(ODD)
        else:
            message[field] = rng.choice(ODD)
        if not message:
            break
    body = bytearray(json.dumps(message).encode())
    while body and rng.random() < 0.2:
        action, at = rng.randrange(5), rng.randrange(len(body))
        if action == 0:
            body[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del body[at : at + rng.randrange(1, 9)]
        elif action == 2:
            body[at:at] = rng.choice([b"\xff", b"[" * 2000, b"9" * 6000, b"NaN", b"-", b"1e999", b'"', b"{", b"\0"])
        elif action == 3:
            body[at : at + 1] = bytes([rng.randrange(256)])
        else:
            body = body[:at]
    return bytes(body)


class Campaign:
    """Counts what came out: `refused` by the format, `disagreed` by a state machine, `taken`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.inputs = self.refused = self.disagreed = self.taken = 0
        self._rng = random.Random(seed)
        self._restart()

    def _restart(self) -> None:
        self._agreement = Agreement(WORKERS, SERVERS, slice_elements=10)
        self._rendezvous = Rendezvous("10.0.0.1", len(WORKERS), len(SERVERS))
        self._history: List[bytes] = []

    def run(self, inputs: int) -> None:
        for _ in range(inputs):
            body = mutate(self._rng, seed_message(self._rng))
            self._history = self._history[-200:] + [body]
            self.inputs += 1
            try:
                self._receive(body)
            except Exception as error:
                shown = "\n".join(map(repr, self._history))
                raise AssertionError("input %d of seed %d:\n%s" % (self.inputs, self.seed, shown)) from error

    def _receive(self, body: bytes) -> None:
        try:
            messages.body_bytes(len(body).to_bytes(4, "little"), self._rng.choice([64, 4096, messages.MAX_BYTES]))
            message = messages.decode(body)
        except ProtocolError:
            self.refused += 1
            return
        try:
            if message["kind"] == "join":
                self._rendezvous.join(message)
                self._rendezvous.missing()
                if self._rendezvous.complete():
                    self._rendezvous.assign()
                    self._restart()
            else:
                for _, answer in self._agreement.receive(self._rng.choice(WORKERS + SERVERS), message):
                    messages.encode(answer)
            self.taken += 1
        except (ProtocolError, DisagreementError, RendezvousError) as error:
            messages.encode({"kind": "abort", "text": messages.sendable(str(error))})
            self.disagreed += 1
            if self._rng.random() < 0.2:  # a job ends with the first; to go on reaches further
                self._restart()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    campaign = Campaign(options.seed)
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        campaign.run(1000)
    print(
        "%d inputs: %d were no messages, %d were refused, %d were taken"
        % (campaign.inputs, campaign.refused, campaign.disagreed, campaign.taken)
    )


if __name__ == "__main__":
    main()
