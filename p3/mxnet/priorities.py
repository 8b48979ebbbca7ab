"""Which key goes first: the priorities of one store's keys.

Setting P3_PRIORITY:
  auto    the order of first use in the forward pass, as rank 0 sees it (others use their own until they hear of it);
          it follows passes that change (p3/frontend/order.py). Keys that no Gluon block uses come after, by the
          caller's priority. The caller's alone where nothing was seen.
  caller  what push and pushpull were given.
  index   the key's number, as the paper has it; keys that are strings, in the order in which they were initialised.
  off     none: slices leave in the order of their pushes. To see what priorities are worth.
Larger is sooner; equals leave in the order of their pushes.
"""

from typing import NamedTuple

from p3.frontend.order import Order
from p3.mxnet import forward_order

# Ranges that keep every engine priority within 32 bits, and keys without a position behind all that have one.
_CALLER_LIMIT = 1 << 19
_UNSEEN = -(1 << 20)
_ENGINE_STEPS = 1 << 10


class Priority(NamedTuple):
    """How soon an operation goes where some wait; larger is sooner."""

    in_queues: int  # P3's
    in_engine: int  # MXNet's; distinct per key, as it scrambles equals


class Priorities:
    """Of the keys of `store`. Threads: those of the store's caller, one at a time."""

    def __init__(self, session, store, mode):
        self._session = session
        self._mode = mode
        self._keys = []
        self._order = Order(session, store)
        self._step = 0, 0  # the first use in the last step that was looked at, and what came behind it
        self._seen = None  # forward_order.uses and order_version at the last look; None: look again
        self._parameters = {}

    def parameter_of(self, name, arrays):
        """The Parameter of the key that the caller names so, if it is known; `arrays` may be the Parameter's."""
        return self._parameters.get(name) or _owner_of(arrays)

    def add(self, key, arrays):
        """One more key of the store, with the caller's name for it in `id`."""
        key.index = len(self._keys)
        key.parameter = self.parameter_of(key.id, arrays)
        key.searched = forward_order.noted
        self._keys.append(key)
        self._seen = None

    def replace(self, key, successor):
        """Another object takes the place of `key`, under the same `id`."""
        successor.index, successor.parameter, successor.searched = key.index, key.parameter, key.searched
        self._keys[key.index] = successor

    def at_init(self, key):
        """As of(), for the key's first value."""
        return self._with_engine_priority(key, self._index_order(key))

    def know_parameters(self, parameters):
        """What an optimizer knows: {the caller's key: Parameter}."""
        self._parameters = parameters
        for key in self._keys:
            key.parameter = parameters.get(key.id, key.parameter)
        self._seen = None

    def of(self, key, caller, arrays):
        """The Priority of a read of `key`.

        `caller` is the caller's priority, `arrays` those of the call, by which a Parameter may be recognised.
        """
        caller = max(-_CALLER_LIMIT, min(int(caller), _CALLER_LIMIT - 1))
        if self._mode == "auto":
            self._find_parameter(key, arrays)
            priority = self._found(key, caller)
        else:
            priority = caller if self._mode == "caller" else self._index_order(key)
        return self._with_engine_priority(key, priority)

    def of_round(self, key, caller, arrays):
        """The same of its next round: the forward pass that its gradient is of has ended."""
        if self._mode == "auto":
            self._find_parameter(key, arrays)
            self._look()
            forward_order.end_step(key.parameter)
        return self.of(key, caller, arrays)

    def order_stats(self):
        """As Order.stats(); {} where priorities come from elsewhere."""
        return self._order.stats() if self._mode == "auto" else {}

    def _index_order(self, key):
        if self._mode == "off":
            return 0
        number = key.index if isinstance(key.id, str) else key.id
        return -max(-_CALLER_LIMIT, min(number, _CALLER_LIMIT))

    def _with_engine_priority(self, key, priority):
        return Priority(priority, priority * _ENGINE_STEPS - key.index % _ENGINE_STEPS)

    def _find_parameter(self, key, arrays):
        if key.parameter is None and key.searched != forward_order.noted:
            key.searched = forward_order.noted
            key.parameter = _owner_of(arrays)
            if key.parameter is not None:
                self._seen = None

    def _found(self, key, caller):
        place = self._order.place(key.id, _CALLER_LIMIT)
        if place < _CALLER_LIMIT:
            return -place
        return _UNSEEN + caller if self._order.names else caller

    def _look(self):
        """Follows what the step's forward pass has used, at its first push, and at others if more is known by then."""
        seen = (forward_order.uses, self._session.orders.version)
        if seen == self._seen:
            return
        self._seen = seen
        again = self._step[1] == forward_order.uses
        if not again:
            self._step = self._step[1], forward_order.uses
        used = [(forward_order.position(key.parameter), key.index, key.id) for key in self._keys if key.parameter]
        used = sorted(entry for entry in used if entry[0] is not None and entry[0] >= self._step[0])
        self._order.follow([name for _, _, name in used], again)


def _owner_of(arrays):
    owners = (forward_order.owner_of(array) for array in arrays)
    return next((owner for owner in owners if owner is not None), None)
