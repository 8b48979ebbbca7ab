"""What `p3 plan --allow-lossy` adds: how fast compressed gradients would be, the codec that the strategy then has, and
if all are too slow, which local steps would hide their exchanges.

Too slow is a network with which the best of these takes more than TOO_SLOW times the computation. Then a step of
LocalSteps takes the computation alone, if a fragment's exchange is over within its delay, and before the next one's
begins. How long the whole model's exchange takes, the simulator says of an iteration without computation; of that a
fragment takes its share of the bytes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterator, NamedTuple, Optional

from p3.codecs import Ways
from p3.frontend.local_steps.fragments import packed
from p3.measure.compressions import Compression
from p3.measure.planning.search import Tried
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Setting
from p3.plan.strategy import Strategy

TOO_SLOW = 1.5  # times the computation
CODECS = ("int8", "int4", "1bit")  # both ways: those that send all of a gradient in each step, by what they lose
WORTH = 1.05  # times the shortest iteration: what loses less may take as long
EVERY = (2, 5, 10, 30, 100)
LOCAL_CODEC = "int4"  # Streaming DiLoCo's bits
_MOST_FRAGMENTS = 6
_STEPS_OF_A_FRAGMENT = 2  # between two, at least


class LocalSteps(NamedTuple):
    """Of p3.torch.LocalSteps, and what they would take."""

    every: int
    fragments: int
    delay: int
    codec: str
    seconds: float  # of a step
    exchange_s: float  # of the whole model
    fragment_s: float  # of the largest fragment
    hides: bool  # no step waits for an exchange

    def __str__(self) -> str:
        return (f"p3.torch.LocalSteps(optimizer, model, every={self.every}, fragments={self.fragments}, "
                f'delay={self.delay}, codec="{self.codec}")')  # fmt: skip


class Lossy(NamedTuple):
    compute_s: float  # of the slowest worker
    whole_s: float  # of an iteration, with gradients as they are
    compressed_s: Dict[str, float]  # of an iteration, by codec
    proposal: Optional[LocalSteps]  # None: something is fast enough without

    def told(self) -> Dict[str, Any]:
        """As JSON has it."""
        steps = None if self.proposal is None else {**self.proposal._asdict(), "call": str(self.proposal)}
        return {"compressed_s": self.compressed_s, "codec": self.codec, "local_steps": steps}

    @property
    def codec(self) -> Optional[str]:
        """The one that loses least among those that are about as fast as the fastest. None: gradients as they are."""
        by_loss = {None: self.whole_s, **self.compressed_s}
        most_s = WORTH * min(by_loss.values())
        return next(name for name, seconds in by_loss.items() if seconds <= most_s)

    def of(self, found: Strategy) -> Strategy:
        """With that codec for all keys."""
        if self.codec is None:
            return found
        return found._replace(default=found.default._replace(codec=Ways.of(self.codec)), allow_lossy=True)


def lossy(setting: Setting, best: Tried) -> Lossy:
    """`best`: what was found without."""
    compute_s = setting.compute_s * max([1.0, *setting.stragglers.values()])
    planned = dataclasses.replace(setting, strategy=best.strategy)
    compressed_s = {name: predict(dataclasses.replace(planned, compression=Compression(name, name), clip="none")).mean_s
                    for name in CODECS}  # fmt: skip
    is_too_slow = min([best.seconds, *compressed_s.values()]) > TOO_SLOW * compute_s > 0
    return Lossy(compute_s, best.seconds, compressed_s, local_steps(planned, compute_s) if is_too_slow else None)


def local_steps(setting: Setting, compute_s: float) -> LocalSteps:
    """Those with the smallest `every` with which exchanges hide, in as many fragments as then are possible, and with
    the shortest delay for these; or with the largest `every`, if they never hide."""
    sizes = [layer.bytes for layer in setting.model.layers if layer.bytes > 0]
    exchange_s = exchange(setting)
    for every in EVERY:
        most = max(1, min(every // _STEPS_OF_A_FRAGMENT, _MOST_FRAGMENTS, len(sizes)))
        for fragments in range(most, 0, -1):
            largest = max(sum(sizes[number] for number in one) for one in packed(sizes, fragments))
            fragment_s = exchange_s * largest / sum(sizes)
            delay = min(math.ceil(fragment_s / compute_s), every // fragments, every - 1)
            hides = fragment_s <= delay * compute_s
            seconds = compute_s if hides else fragment_s / delay
            made = LocalSteps(every, fragments, delay, LOCAL_CODEC, seconds, exchange_s, fragment_s, hides)
            if hides:
                return made
    return made  # with one fragment, whose exchange is as long as that of all


def exchange(setting: Setting) -> float:
    """Seconds in which the whole model crosses the network both ways with LOCAL_CODEC, embeddings included."""
    alone = dataclasses.replace(setting, compute_s=0.0, compression=Compression(LOCAL_CODEC, LOCAL_CODEC), sparse={},
                                clip="none")  # fmt: skip
    return predict(alone).mean_s


def lines(found: Lossy) -> Iterator[str]:
    each = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.compressed_s.items())
    yield f"with compressed gradients, both ways: {each}; which loses what, docs/compression.md says"
    if found.codec is not None:
        yield f"the strategy has {found.codec}, which loses least of those within {WORTH - 1:.0%} of the fastest"
    one = found.proposal
    if one is None:
        return
    yield (f"All take more than {TOO_SLOW:g} times the computation of {found.compute_s:.3f} s. Local steps are "
           "another way of training: each")  # fmt: skip
    yield "worker trains by itself, and weights are averaged now and then (docs/local-steps.md)"
    yield f"  {one}"
    end = "while training goes on" if one.hides else "and is waited for"
    yield (f"  {one.seconds:.3f} s for a step; all weights are exchanged in {one.exchange_s:.3f} s, the largest "
           f"fragment in {one.fragment_s:.3f} s, {end}")  # fmt: skip
