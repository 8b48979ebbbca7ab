"""A store of P3's, and what MXNet makes in one process of the gradients of all workers.

Not MXNet's store `local`, which has a type of key for all, turns row_sparse and crashes when row_sparse gradients are
pushed to it in other ways than its own tests do: its updater is what counts, on plain dense weights.

A spec has `keys` (name, shape, dtype; kind: dense, table: with row_sparse gradients at times, sparse: a row_sparse
weight), `contexts`: devices of each worker, `reduction` and `compression`.
"""

import pickle

import mxnet as mx
import numpy as np
from optimizer_cases import runnable
from store_programs import values
from store_programs.states import (
    ON_WORKERS, Saved, compare_files, kind_of, load_refusal, make_optimizer, tune, updates_rows_alone,
)  # fmt: skip

class Updater:
    """MXNet's, with its states made ready for what MXNet's own code fails on, and its errors kept."""

    def __init__(self, optimizer):
        self.itself, self.error = mx.optimizer.get_updater(optimizer), None

    def __call__(self, key, gradient, weight):
        itself = self.itself
        try:
            if key not in itself.states:
                itself.states[key] = itself.optimizer.create_state_multi_precision(key, weight)
            itself.states[key] = runnable(itself.optimizer, weight, itself.states[key])
            itself.states_synced[key] = True
            itself(key, gradient, weight)
        except Exception as error:  # MXNet would print it and go on
            self.error = error


class StorePair:
    def __init__(self, spec, rank, workers, slots, machine):
        self.spec, self.rank, self.workers, self.slots, self._machine = spec, rank, workers, slots, machine
        self.keys = spec["keys"]
        self.seen = []  # (name, got, expected) of what the last operation has read
        self.kv = mx.kv.create("p3_sync")
        if spec["reduction"]:
            self.kv.set_reduction(spec["reduction"])
        if spec["compression"]:
            self.kv.set_gradient_compression({"type": spec["compression"]})
        # The reference
        self.weights = {}  # position -> dense array
        self.updater = None
        self.optimizer = None  # its spec
        self.on_servers = False
        self.known, self.pushed = set(), set()  # positions of keys
        self.rows = set()  # keys of which only rows travel
        self.outs = {}  # position -> P3's arrays, one for each device

    # What P3 must refuse

    def refusal(self, operation):
        do = operation["do"]
        check = getattr(self, "_refuses_" + do, None)
        if check is not None:
            return check(operation)
        touched = {"look": [], "pull": self._dense(operation) if do == "pull" else [],
                   "row_sparse_pull": [operation.get("key")]}[do]  # fmt: skip
        return "unknown key" if set(touched) - self.known else None

    def _refuses_init(self, operation):
        return None

    _refuses_broadcast = _refuses_init

    def _refuses_push(self, operation):
        return "unknown key" if set(operation["keys"]) - self.known else None

    _refuses_pushpull = _refuses_push

    def _refuses_set_optimizer(self, operation):
        optimizer = operation["optimizer"]
        if not self.on_servers:
            return None
        if optimizer["name"] in ON_WORKERS:
            return "on servers"
        return None if kind_of(optimizer) == kind_of(self.optimizer) else "other optimizer"

    def _refuses_tune(self, operation):
        return None

    def _refuses_save(self, operation):
        return "no optimizer" if self.optimizer is None else None

    def _refuses_load(self, operation):
        if self.optimizer is None:
            return "no optimizer"
        known = {self.keys[position]["name"]: self.keys[position] for position in self.known}
        return load_refusal(self.slots.get(operation["slot"]), self.optimizer, self.on_servers, known,
                            self.updater.itself.optimizer, self.on_servers and bool(self.rows))  # fmt: skip

    def _refuses_join(self, operation):
        return None if self.known else "no keys"

    def _refuses_wrong(self, operation):
        what, position = operation["what"], operation["key"]
        if what in ("float key", "unknown key"):
            return what
        if what in ("late reduction", "late compression"):
            option = "reduction" if what == "late reduction" else "compression"
            if self.spec[option]:
                return "settled"
            return "keys already" if self.known else None
        if what in ("missing file", "cut file"):
            return what if self.optimizer is not None else "no optimizer"
        if what == "two first values":
            return what
        if position not in self.known:
            return "unknown key"
        return what

    # P3

    def run(self, operation):
        getattr(self, "_run_" + operation["do"])(operation)

    def _run_look(self, _):
        pass

    def _run_init(self, operation):
        self.kv.init(*self._first_values(operation, self.rank))

    def _run_broadcast(self, operation):
        names, firsts = self._first_values(operation, self.rank)
        self.kv.broadcast(names, firsts, [self._outs(position) for position in operation["keys"]])

    def _first_values(self, operation, rank):
        positions, seed = operation["keys"], operation["seed"]
        return (
            [self.keys[position]["name"] for position in positions],
            [self._first_value(seed, position, rank) for position in positions],
        )

    def _first_value(self, seed, position, rank):
        spec = self.keys[position]
        seed = values.gradient_seed(seed, rank, 3, position)
        if spec["kind"] == "sparse":
            return values.row_sparse(seed, spec, range(spec["shape"][0]))
        return values.dense(seed, spec)

    def _run_push(self, operation):
        gradients = [self._gradients(operation, place, self.rank) for place in range(len(operation["keys"]))]
        names = [self.keys[position]["name"] for position in operation["keys"]]
        self.kv.push(names, gradients, priority=operation["priority"])
        if operation["scribble"]:
            for arrays in gradients:
                for array in arrays:
                    array *= 100

    def _gradients(self, operation, place, rank):
        """One for each device, of the key at that place of the operation's list."""
        spec, devices = self.keys[operation["keys"][place]], range(self.spec["contexts"])
        seeds = [values.gradient_seed(operation["seed"], rank, device, place) for device in devices]
        if not self._is_row_sparse(operation, spec):
            return [values.dense(seed, spec, device) for device, seed in enumerate(seeds)]
        shape, rows = spec["shape"], operation["rows"] or []
        return [
            values.row_sparse(seed, spec, values.rows_of(rows, shape, rank, device), device)
            for device, seed in enumerate(seeds)
        ]

    @staticmethod
    def _is_row_sparse(operation, spec):
        return spec["kind"] == "sparse" or (spec["kind"] == "table" and operation["rows"] is not None)

    def _run_pull(self, operation):
        dtype, dense = operation["dtype"], self._dense(operation)
        if not dense:
            return
        outs = [[mx.nd.zeros(tuple(self.keys[one]["shape"]), dtype=dtype or self.keys[one]["dtype"])] for one in dense]
        self.kv.pull([self.keys[one]["name"] for one in dense], outs if dtype else [self._outs(one) for one in dense])
        self._pulled = outs if dtype else [self._outs(one) for one in dense]

    def _dense(self, operation):
        return [position for position in operation["keys"] if self.keys[position]["kind"] != "sparse"]

    def _run_pushpull(self, operation):
        gradients = [self._gradients(operation, place, self.rank) for place in range(len(operation["keys"]))]
        names = [self.keys[position]["name"] for position in operation["keys"]]
        if any(self.keys[position]["kind"] == "sparse" for position in operation["keys"]):
            self.kv.push(names, gradients, priority=operation["priority"])
            self._pulled = None
            return
        rows = any(gradient[0].stype != "default" for gradient in gradients)
        in_place = operation["in_place"] and not rows
        self._pulled = gradients if in_place else [self._outs(position) for position in operation["keys"]]
        self.kv.pushpull(names, gradients, out=None if in_place else self._pulled, priority=operation["priority"])

    def _run_row_sparse_pull(self, operation):
        spec = self.keys[operation["key"]]
        rows = [row % spec["shape"][0] for row in operation["rows"]]
        self._pulled = mx.nd.sparse.zeros("row_sparse", tuple(spec["shape"]), dtype=spec["dtype"])
        self.kv.row_sparse_pull(spec["name"], out=self._pulled, row_ids=_ids(rows))

    def _run_set_optimizer(self, operation):
        self.kv.set_optimizer(make_optimizer(operation["optimizer"]))

    def _run_tune(self, operation):
        if self.optimizer is not None:
            tune(self.kv._updater.optimizer, operation, self.keys[operation["key"]]["name"])

    def _run_save(self, operation):
        self.kv.save_optimizer_states(str(self._path(operation)), dump_optimizer=operation["dump"])

    def _path(self, operation):
        return self.slots.folder / ("slot%s" % operation["slot"])

    def _run_load(self, operation):
        self.kv.load_optimizer_states(str(self._path(operation)))

    def _run_join(self, operation):
        for entry in self._machine.others(self):
            entry.prepare_join()
        self.prepare_join()
        for number in range(operation["rounds"][self.rank]):
            for push in self._rounds(operation, number):
                self._run_pushpull(push)
        self.kv.join(update=self._machine.update_while_joined)

    def prepare_join(self):
        """What lands while this worker is joined goes to the arrays of the last pull."""
        for position in self._pulled_while_joined():
            self.kv.pull(self.keys[position]["name"], self._outs(position))

    def _pulled_while_joined(self):
        return [position for position in sorted(self.known) if self.keys[position]["kind"] != "sparse"]

    def update_while_joined(self):
        pass

    def _rounds(self, operation, number):
        """Operations that push all keys that were pushed before."""
        rows = [number, number + 2]
        seed = operation["seed"] + 101 * number
        return [
            {"do": "pushpull", "keys": [position], "seed": seed, "rows": rows if position in self.rows else None,
             "priority": 0, "scribble": False, "in_place": False}
            for position in sorted(self.pushed)
        ]  # fmt: skip

    def _run_wrong(self, operation):
        if self.refusal(operation) is None:
            return  # before the first key it is no mistake
        what, kv = operation["what"], self.kv
        spec = self.keys[operation["key"]]
        name, shape, dtype = spec["name"], tuple(spec["shape"]), spec["dtype"]
        if what == "unknown key":
            kv.push("nobody knows it", mx.nd.ones(2))
        elif what == "float key":
            kv.push(1.5, mx.nd.ones(2))
        elif what == "two first values":
            kv.init(name, [mx.nd.zeros(shape, dtype=dtype)] * 2)
        elif what == "another shape":
            if operation["store"] % 2:
                kv.pull(name, mx.nd.ones((*shape, 1), dtype=dtype))
            else:
                kv.push(name, mx.nd.ones((*shape, 1), dtype=dtype))
        elif what == "another type":
            kv.push(name, mx.nd.ones(shape, dtype="float16" if dtype == "float64" else "float64"))
        elif what == "row out of range":
            out = mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype)
            kv.row_sparse_pull(name, out=out, row_ids=mx.nd.array([0, shape[0]]))
        elif what == "dense rows":
            kv.row_sparse_pull(name, out=mx.nd.zeros(shape, dtype=dtype), row_ids=mx.nd.array([0]))
        elif what == "late reduction":
            kv.set_reduction("average" if self.spec["reduction"] != "average" else "sum")
        elif what == "late compression":
            kv.set_gradient_compression({"type": "2bit"})
        elif what == "missing file":
            kv.load_optimizer_states(str(self.slots.folder / "nothing"))
        elif what == "cut file":
            path = self.slots.folder / "cut"
            path.write_bytes(pickle.dumps({3: None})[:-1])
            kv.load_optimizer_states(str(path))
        else:
            raise ValueError(what)

    def _outs(self, position):
        spec = self.keys[position]
        if position not in self.outs:
            self.outs[position] = [
                mx.nd.zeros(tuple(spec["shape"]), ctx=mx.cpu(device), dtype=spec["dtype"])
                for device in range(self.spec["contexts"])
            ]
        return self.outs[position]

    # The reference

    def follow(self, operation):
        getattr(self, "_follow_" + operation["do"])(operation)
        if self.updater is not None and self.updater.error is not None:
            raise self.updater.error

    def follow_refused(self, operation):
        pass

    def _follow_look(self, _):
        pass

    _follow_wrong = _follow_look

    def _follow_init(self, operation):
        for position in operation["keys"]:
            if position not in self.known:
                self.known.add(position)
                self.weights[position] = self._first_value(operation["seed"], position, 0).tostype("default")

    def _follow_broadcast(self, operation):
        self._follow_init(operation)
        for position in operation["keys"]:
            if self.keys[position]["kind"] != "sparse":
                self._saw(position, self._outs(position))

    def _follow_push(self, operation, ranks=None):
        """Keys that the list repeats are pushed once, with all arrays."""
        ranks = range(self.workers) if ranks is None else ranks
        for position in dict.fromkeys(operation["keys"]):
            places = [place for place, each in enumerate(operation["keys"]) if each == position]
            arrays = [
                array
                for rank in ranks
                for place in places
                for array in self._gradients(operation, place, rank)
            ]
            self._push_to_reference(operation, position, arrays, len(ranks))

    def _push_to_reference(self, operation, position, arrays, pushers):
        spec = self.keys[position]
        is_row_sparse = self._is_row_sparse(operation, spec)
        if position not in self.pushed:
            self.pushed.add(position)
            if is_row_sparse and (self.optimizer is None or updates_rows_alone(self.optimizer)):
                self.rows.add(position)
        if self.spec["reduction"] == "average":
            arrays = [array / pushers for array in arrays]
        if is_row_sparse and (self.updater is None or position not in self.rows):
            # P3 says in its log that a key which began with dense gradients, or whose optimizer needs all rows, makes
            # them dense.
            arrays = [array.tostype("default") for array in arrays]
        total = values.sum_of(arrays, spec)
        if self.updater is None:
            self.weights[position] = total
        else:
            if not self.on_servers:
                total = values.without_zero_rows(total, spec)
            self.updater(spec["name"], total, self.weights[position])

    def _follow_pull(self, operation):
        for position, arrays in zip(self._dense(operation), self._pulled if self._dense(operation) else []):
            self._saw(position, arrays)

    def _follow_pushpull(self, operation):
        self._follow_push(operation)
        if self._pulled is not None:
            for position, arrays in zip(operation["keys"], self._pulled):
                self._saw(position, arrays)

    def _follow_row_sparse_pull(self, operation):
        spec = self.keys[operation["key"]]
        rows = sorted({row % spec["shape"][0] for row in operation["rows"]})
        expected = np.zeros(spec["shape"], spec["dtype"])
        expected[rows] = self._value(operation["key"])[rows]
        name = "rows of key %r" % spec["name"]
        self.seen.append((name, self._pulled.asnumpy(), expected))
        self.seen.append(("ids of the " + name, self._pulled.indices.asnumpy(), np.array(rows, "int64")))

    def _follow_set_optimizer(self, operation):
        spec = operation["optimizer"]
        if self.optimizer is None:
            self.on_servers = spec["name"] not in ON_WORKERS and not self.pushed
        self.optimizer = spec
        self.updater = Updater(make_optimizer(spec))

    def _follow_tune(self, operation):
        if self.optimizer is not None:
            tune(self.updater.itself.optimizer, operation, self.keys[operation["key"]]["name"])

    def _follow_save(self, operation):
        itself, path = self.updater.itself, self._path(operation)
        states = dict(itself.states)
        for position in self.pushed if self.on_servers else ():  # a key that a loaded file lacked: as it will begin
            spec, weight = self.keys[position], self.weights[position]
            if spec["name"] not in states:
                fresh = itself.optimizer.create_state_multi_precision(spec["name"], weight)
                states[spec["name"]] = runnable(itself.optimizer, weight, fresh)
        optimizer = pickle.dumps(itself.optimizer) if operation["dump"] else None
        saved = Saved(path, self.optimizer, pickle.loads(pickle.dumps(states)), optimizer)
        self.slots[operation["slot"]] = saved
        self.seen += compare_files(saved)

    def _follow_load(self, operation):
        saved, itself = self.slots[operation["slot"]], self.updater.itself
        itself.states = pickle.loads(pickle.dumps(saved.states))
        itself.states_synced = dict.fromkeys(itself.states, False)
        if saved.optimizer is not None:
            itself.optimizer = pickle.loads(saved.optimizer)
            self.optimizer = saved.kind

    def _follow_join(self, operation):
        for number in range(max(operation["rounds"][: self.workers])):
            ranks = [rank for rank in range(self.workers) if operation["rounds"][rank] > number]
            for push in self._rounds(operation, number):
                self._follow_push(push, ranks)
        for position in self._pulled_while_joined():
            self._saw(position, self._outs(position))

    # What can be read

    def look(self):
        for position in sorted(self.known):
            spec = self.keys[position]
            if spec["kind"] == "sparse":
                out = mx.nd.sparse.zeros("row_sparse", tuple(spec["shape"]), dtype=spec["dtype"])
                self.kv.row_sparse_pull(spec["name"], out=out, row_ids=mx.nd.arange(spec["shape"][0]))
                outs = [out]
            else:
                outs = self._outs(position)
                self.kv.pull(spec["name"], outs)
            for out in outs:
                yield "key %r" % spec["name"], out.asnumpy(), self._value(position)

    def _value(self, position):
        return self.weights[position].asnumpy()

    def _saw(self, position, arrays):
        for array in arrays:
            got = array.asnumpy()
            expected = self._value(position).astype(got.dtype)
            self.seen.append(("key %r" % self.keys[position]["name"], got, expected))


def _ids(rows):
    with mx.util.np_shape(True):
        return mx.nd.array(rows, dtype="int64") if rows else mx.nd.zeros((0,), dtype="int64")
