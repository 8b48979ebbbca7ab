"""The optimizer's state of a store's keys, between the servers and MXNet's own form of it.

Waits for the network, at most P3_WAIT_TIMEOUT_S. What is fetched is consistent: a key's state changes only in a round,
and no round completes without this worker.
"""

import numpy as np

from p3._core import DTYPES, MASTER, state_parts
from p3.mxnet import optimizer_states
from p3.mxnet.optimizer_descriptions import describe


class ServerStates:
    def __init__(self, session, optimizer):
        self._session = session
        self._optimizer = optimizer
        self._description = describe(optimizer)

    def fetch(self, entries):
        """{key: state as MXNet's Updater would hold it} of these keys of a store."""
        under_way = []
        for entry in entries:
            key = entry.declared
            entry.wait()
            arrays = {part: np.empty(key.shape, _state_type(key)) for part in self._parts(key)}
            operations = [entry.fetch_part(self._session, part, array) for part, array in arrays.items()]
            under_way.append((entry, arrays, operations))
        states = {}
        for entry, arrays, operations in under_way:
            self._session.wait(operations)
            master = arrays.pop(MASTER, None)
            states[entry.id] = optimizer_states.to_mxnet(
                self._optimizer, entry.id, entry.template, list(arrays.values()), master
            )
        return states

    def store(self, entries, states):
        """Gives the servers `states`, {key: (arrays, master) as optimizer_states.from_mxnet makes them}. On rank 0."""
        operations = []
        for name, (arrays, master) in states.items():
            entry = entries[name]
            entry.wait()
            contents = dict(enumerate(arrays, 1))
            if master is not None:
                contents[MASTER] = master
            for part, content in contents.items():
                content = np.ascontiguousarray(content)
                operations.append(entry.store_part(self._session, part, content))
        self._session.wait(operations)

    def _parts(self, key):
        return [part for part in state_parts(self._description, DTYPES[key.dtype]) if part > 0]


def _state_type(key):
    return "float32" if key.dtype == "float16" else key.dtype
