"""The stores of MXNet whose workers may be rounds apart, and how many: `p3_async` and `p3_ssp`.

Bounded staleness is Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
2013: the fastest worker is at most so many rounds ahead of the slowest. What a worker receives holds all its own
pushes, and those of the others up to at least that many rounds before.
"""

import math

from p3.plan import choices, combinations, key_plan

SYNC, ASYNC, SSP = "p3_sync", "p3_async", "p3_ssp"

# Gluon looks for "async", and then insists that the store updates the weights; Module for "_sync", as batches add up.
TYPES = {SYNC: "dist_p3_sync", ASYNC: "dist_p3_async", SSP: "dist_p3_ssp_async"}


class Staleness:
    """Of one store: rounds, by key. A key that has begun keeps its own."""

    def __init__(self, kind, setting, strategy):
        """`setting`: P3_STALENESS, which p3_ssp begins with. `strategy`: called for the store's, as it is by then."""
        self._kind, self._is_said = kind, False
        self._strategy = strategy
        self._default = {SYNC: 0, ASYNC: math.inf, SSP: setting}[kind]
        self._of_keys = {}

    def __bool__(self):
        """Whether any key may have staleness."""
        strategy = self._strategy()
        planned = [cut.staleness or 0 for cut in (strategy.default, *strategy.keys.values())]
        return any(rounds > 0 for rounds in (self._default, *self._of_keys.values(), *planned))

    def of(self, key):
        """As the script says, or where that leaves it open, the strategy. ValueError if both say something else."""
        strategy = self._strategy()
        if self._kind == SYNC:
            own = strategy.of(key).staleness
            if own:
                asked = choices.STALE.said(f"{own} rounds of key {key!r}, see the strategy {strategy.path}")
                raise ValueError(f"{asked}: the rounds of p3_sync are synchronous; create {SSP} or {ASYNC} instead")
            return 0
        of_script = self._of_keys.get(key, self._default if self._is_said else None)
        rounds = strategy.rounds(key, of_script)
        return rounds if of_script is not None or strategy.of(key).staleness is not None else self._default

    def set(self, rounds, keys, begun):
        """Of these keys, or of all that have none of their own; `begun`: the keys that the store has already."""
        if self._kind == SYNC:
            raise ValueError(f"set_staleness: the rounds of p3_sync are synchronous; create {SSP} or {ASYNC} instead")
        key_plan.staleness(rounds)
        late = [key for key in begun if (key in keys if keys is not None else key not in self._of_keys)]
        if late:
            raise ValueError(f"set_staleness: key {late[0]!r} was initialised already; set staleness before")
        if keys is None:
            self._default, self._is_said = rounds, True
        else:
            self._of_keys.update(dict.fromkeys(keys, rounds))

    def require_servers(self, why_not):
        """ValueError, if there is any, as the servers do not update: `why_not`."""
        asked = choices.STALE if self else choices.SYNCHRONOUS
        combinations.require(self._kind, asked, choices.no_optimizer(why_not))

    def describe(self):
        """For the log."""
        told = [f"staleness {self._default}", *(f"{key!r}: {rounds}" for key, rounds in self._of_keys.items())]
        strategy = self._strategy()
        told += [f"and as the strategy {strategy.path} says"] * strategy.chooses
        return f"{self._kind}: each push updates the weights at once ({', '.join(told)}), so no two runs are alike"
