"""Of which fragments a model consists that takes local steps, and when each is exchanged. Pure functions and values."""

from __future__ import annotations

import operator
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence


class Schedule(NamedTuple):
    """When each fragment's weights are sent and its new global value is taken over, in steps of a worker.

    Fragment p of P is due behind step p * every / P, rounded down, and every `every` steps from there on; fragment 0
    behind step `every` first. Its new value is taken over `delay` steps later. So no two fragments are due at once, and
    a fragment's exchange is over before its next one begins.
    """

    every: int
    fragments: int
    delay: int

    @classmethod
    def checked(cls, every: Any, fragments: Any, delay: Any) -> Schedule:
        """ValueError, which names the number, if there is no such schedule."""
        every, fragments, delay = (_whole(name, given) for name, given in
                                   (("every", every), ("fragments", fragments), ("delay", delay)))  # fmt: skip
        if every < 1:
            raise ValueError("every is %d; it must be at least 1: so many steps lie between two exchanges" % every)
        if not 1 <= fragments <= every:
            raise ValueError("fragments is %d and every is %d: at most one fragment is due behind a step, so take 1 to "
                             "%d fragments, or a larger every" % (fragments, every, every))  # fmt: skip
        if not 0 <= delay < every:
            raise ValueError("delay is %d and every is %d: a fragment's exchange must be over before its next one, so "
                             "take a delay from 0 to %d, or a larger every" % (delay, every, every - 1))  # fmt: skip
        return cls(every, fragments, delay)

    def due(self, step: int) -> Optional[int]:
        """The fragment that is sent behind this step, counted from 1; None: none is."""
        if step < 1:
            return None
        place = step % self.every
        fragment = -(-place * self.fragments // self.every)  # the first that is not due earlier
        is_due = fragment < self.fragments and fragment * self.every // self.fragments == place
        return fragment if is_due else None

    def merged(self, step: int) -> Optional[int]:
        """The fragment whose new value is taken over behind this step; None: none is."""
        return self.due(step - self.delay)

    def deadline(self, step: int) -> int:
        """Behind which step it is taken over what is sent behind this one."""
        return step + self.delay


def layers_of(names: Iterable[str]) -> List[List[str]]:
    """Of weights by their names, as "encoder.0.bias": those alike up to the last dot are a layer, and one without any
    is a layer of its own. In the order of first names."""
    layers: Dict[str, List[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return list(layers.values())


def packed(sizes: Sequence[int], fragments: int, strided: bool = False) -> List[List[int]]:
    """Layers of these `sizes`, by their numbers, in so many fragments: each a stretch of neighbours, the largest as
    small as can be; or `strided`, every `fragments`-th layer. No fragment is empty: ValueError if there are too few
    layers."""
    if fragments > len(sizes):
        raise ValueError("fragments is %d, and the model has %d layers with parameters to share: take at most as many "
                         "fragments" % (fragments, len(sizes)))  # fmt: skip
    if strided:
        return [list(range(first, len(sizes), fragments)) for first in range(fragments)]
    least, most = max(sizes), sum(sizes)  # of the largest fragment
    while least < most:
        middle = (least + most) // 2
        if len(_stretches(sizes, middle, 1)) <= fragments:
            most = middle
        else:
            least = middle + 1
    return _stretches(sizes, most, fragments)


def _stretches(sizes: Sequence[int], limit: int, at_least: int) -> List[List[int]]:
    """As many layers as stay within the limit, again and again, but each stretch leaves one for each that must
    follow."""
    made: List[List[int]] = []
    total = 0
    for number, size in enumerate(sizes):
        to_follow = at_least - len(made)
        if not made or total + size > limit or len(sizes) - number <= to_follow:
            made.append([])
            total = 0
        made[-1].append(number)
        total += size
    return made


def _whole(name: str, given: Any) -> int:
    try:
        if not isinstance(given, bool):
            return operator.index(given)
    except TypeError:
        pass
    raise ValueError("%s is %.100r; it must be a whole number of steps or fragments" % (name, given))
