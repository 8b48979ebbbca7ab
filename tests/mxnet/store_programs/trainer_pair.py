"""A Trainer with a store of P3's, and MXNet's own Trainer without a store, on the joined batch, in one process.

A spec has `parameters` (shape, dtype, grad_req, lr_mult, wd_mult; kind: dense, table: an Embedding's with row_sparse
gradients, sparse: with a row_sparse weight), `contexts`, `reduction`, `compression`, `optimizer`, `update_on_kvstore`,
and whether `first_weights_differ` between workers: those of rank 0 count from the first step.

The loss is linear, so that each gradient is what the program says: the sum of the exact numbers of all workers.
"""

import pickle

import mxnet as mx
import numpy as np
from mxnet import gluon
from optimizer_cases import runnable
from store_programs import values
from store_programs.states import ON_WORKERS, Saved, compare_files, load_refusal, make_optimizer, tune


class Net(gluon.Block):
    def __init__(self, specs, devices, is_reference, first):
        super().__init__(prefix="net_")
        self.specs, self.devices = specs, devices
        for number, spec in enumerate(specs):
            of_rows = spec["kind"] != "dense"
            # On the reference's side all weights are dense: MXNet trains no row_sparse one without a store.
            sparse = spec["kind"] == "sparse" and not is_reference
            parameter = self.params.get(
                "p%d" % number, shape=tuple(spec["shape"]), dtype=spec["dtype"], grad_req=spec["grad_req"],
                lr_mult=spec["lr_mult"], wd_mult=spec["wd_mult"], stype="row_sparse" if sparse else "default",
                grad_stype="row_sparse" if of_rows else "default", init=mx.init.Zero(), allow_deferred_init=True,
            )  # fmt: skip
            setattr(self, "p%d" % number, parameter)
        self.initialize(ctx=devices)
        self.all = [getattr(self, "p%d" % number) for number in range(len(specs))]
        for parameter, value in zip(self.all, first):
            value = mx.nd.array(value, dtype=value.dtype)
            parameter.set_data(value.tostype("row_sparse") if parameter._stype == "row_sparse" else value)

    def loss(self, operation, rank, device, on):
        """Of that device of that worker; with the weights on the device `on`."""
        total = 0
        for number, (parameter, spec) in enumerate(zip(self.all, self.specs)):
            seed = values.gradient_seed(operation["seed"], rank, device, number)
            if spec["kind"] == "dense":
                x = mx.nd.array(values.values(seed, spec["shape"], spec["dtype"]), ctx=on, dtype=spec["dtype"])
                total = (parameter.data(on) * x).sum().astype("float64") + total
                continue
            rows = values.rows_of(operation["rows"], spec["shape"], rank, device)
            ids = mx.nd.array(rows, ctx=on)
            weight = parameter.row_sparse_data(ids) if parameter._stype == "row_sparse" else parameter.data(on)
            embedded = mx.nd.Embedding(
                ids, weight, input_dim=spec["shape"][0], output_dim=spec["shape"][1], sparse_grad=True
            )
            x = mx.nd.array(values.values(seed, [len(rows), spec["shape"][1]]), ctx=on)
            total = (embedded * x).sum().astype("float64") + total
        return total


class TrainerPair:
    def __init__(self, spec, rank, workers, slots, machine):
        self.spec, self.rank, self.workers, self.slots, self._machine = spec, rank, workers, slots, machine
        self.parameters, self.seen = spec["parameters"], []
        self._pushed = set()  # positions of parameters
        self.on_store = spec["update_on_kvstore"] is not False
        self.on_servers = self.on_store and spec["optimizer"]["name"] not in ON_WORKERS
        self.optimizer = spec["optimizer"]
        self.has_sparse = any(parameter["kind"] == "sparse" for parameter in self.parameters)
        firsts = [[self._value(7, number, of) for number in range(len(self.parameters))] for of in (rank, 0)]
        self.net = Net(self.parameters, [mx.cpu(i) for i in range(spec["contexts"])], False,
                       firsts[0 if spec["first_weights_differ"] else 1])  # fmt: skip
        self.kv = mx.kv.create("p3_sync")
        if spec["reduction"]:
            self.kv.set_reduction(spec["reduction"])
        if spec["compression"]:
            self.kv.set_gradient_compression({"type": spec["compression"]})
        self.trainer = gluon.Trainer(
            self.net.collect_params(), make_optimizer(spec["optimizer"]), kvstore=self.kv,
            update_on_kvstore=spec["update_on_kvstore"],
        )  # fmt: skip
        # The reference: with the weights of rank 0
        self.reference = Net(self.parameters, [mx.cpu()], True, firsts[1])
        self.updating = gluon.Trainer(
            self.reference.collect_params(), make_optimizer(spec["optimizer"]), kvstore=None
        )
        self.is_initialised, self._is_reset = False, False  # the Trainer's store
        self.own = {}  # position -> what this worker has, and others may not, in place of rank 0's until the next step
        if spec["first_weights_differ"]:
            self.own = dict(enumerate(firsts[0]))
        self.files = {}  # slot -> values of all parameters, saved

    def _value(self, seed, position, rank):
        spec = self.parameters[position]
        return values.values(values.gradient_seed(seed, rank, 3, position), spec["shape"], spec["dtype"])

    # What P3 must refuse

    def refusal(self, operation):
        do = operation["do"]
        refusal = "on the store" if do == "split" and self.on_store else None
        if do == "load":
            refusal = self._load_refusal(operation)
        if (
            do in ("step", "split", "save", "join")
            or (do == "load" and self._loads)
            or (do == "row_sparse_data" and self._reads_rows(operation))
        ):  # also where it is refused
            self.is_initialised = True
            self.own.clear()
            self._begin_masters_anew()
        return refusal

    def _begin_masters_anew(self):
        """The store takes all values anew after set_data, float32 master copies included. MXNet without a store would
        go on from the copies of the values before."""
        if not self._is_reset or not self.on_servers:
            return
        self._is_reset, updater = False, self.updating._updaters[0]
        for position, state in updater.states.items():
            weight = self.reference.all[position].data()
            if weight.dtype == np.float16:
                last = isinstance(updater.optimizer, (mx.optimizer.SGD, mx.optimizer.NAG))
                master = state[-1 if last else 0] if isinstance(state, (list, tuple)) else state
                master[:] = weight.astype("float32")

    def _has_rows(self):
        return any(self.parameters[position]["kind"] != "dense" for position in self._pushed)

    def _load_refusal(self, operation):
        saved = self.slots.get(operation["slot"])
        refusal = load_refusal(saved, self.optimizer, self.on_servers, dict(enumerate(self.parameters)),
                               self.updating._optimizer, self.on_servers and self._has_rows())  # fmt: skip
        # MXNet's own load_states takes what it gets, or fails in its own ways
        self._loads = self.on_store or refusal is None
        return refusal if self.on_store else None

    # P3

    def run(self, operation):
        getattr(self, "_run_" + operation["do"])(operation)

    def _run_step(self, operation):
        self._backward(operation)
        self.trainer.step(operation["batch"])
        self._zero(self.net, operation)

    def _backward(self, operation):
        for _ in range(operation["passes"]):
            with mx.autograd.record():
                losses = [self.net.loss(operation, self.rank, number, on) for number, on in enumerate(self.net.devices)]
            mx.autograd.backward(losses)

    def _zero(self, net, operation):
        if operation["zero"] or not self.on_store:  # where they would add to the sums of all workers
            net.collect_params().zero_grad()

    def _run_split(self, operation):
        self._backward(operation)
        self.trainer.allreduce_grads()
        self._sums = [[array.asnumpy() for array in parameter.list_grad()] for parameter in self.net.all]
        for parameter in self.net.all:
            for gradient in parameter.list_grad():
                gradient *= operation["scale"]
        self.trainer.update(operation["batch"])
        self._zero(self.net, operation)

    def _run_tune(self, operation):
        self._tune(self.trainer, self.net, operation)

    @staticmethod
    def _tune(trainer, net, operation):
        if operation["field"] in ("lr_mult", "wd_mult"):
            setattr(net.all[operation["key"]], operation["field"], operation["value"])
        else:
            tune(trainer._optimizer, operation, None)

    def _run_set_data(self, operation):
        if self.has_sparse:  # MXNet's Trainer would give the store the table's first value again
            return
        value = self._new_value(operation, self.rank)
        self.net.all[operation["key"]].set_data(mx.nd.array(value, dtype=value.dtype))

    def _new_value(self, operation, rank):
        differs = operation["differs"] and (self.on_store or not self.is_initialised)  # or each would go its own way
        return self._value(operation["seed"], operation["key"], rank if differs else 0)

    def _run_save(self, operation):
        self.trainer.save_states(self._path(operation))

    def _path(self, operation):
        return str(self.slots.folder / ("slot%s" % operation["slot"]))

    def _run_load(self, operation):
        if self._loads:
            self.trainer.load_states(self._path(operation))

    def _run_save_parameters(self, operation):
        if not self.has_sparse:
            self.net.save_parameters(self._parameters_path(operation))

    def _parameters_path(self, operation):
        return str(self.slots.folder / ("parameters%s-%d" % (operation["slot"], id(self))))

    def _run_load_parameters(self, operation):
        if self._can_load(operation):
            self.net.load_parameters(self._parameters_path(operation), ctx=self.net.devices)

    def _can_load(self, operation):
        """A file of values that differ between workers must not be loaded where no store makes them alike again."""
        saved = self.files.get(operation["slot"])
        return saved is not None and (
            self.on_store or not self.is_initialised or all(own is None for _, own in saved)
        )

    def _reads_rows(self, operation):
        return self.parameters[operation["key"]]["kind"] == "sparse"

    def _run_row_sparse_data(self, operation):
        if self._reads_rows(operation):
            rows = [row % self.parameters[operation["key"]]["shape"][0] for row in operation["rows"]]
            self._rows = rows, self.net.all[operation["key"]].row_sparse_data(mx.nd.array(rows)).asnumpy()

    def _run_join(self, operation):
        for pair in self._machine.others(self):
            pair.prepare_join()
        self._run_step(self._round(operation, 50))  # which every worker must have taken
        for number in range(operation["rounds"][self.rank]):
            self._run_step(self._round(operation, number))
        self._joined_batch = operation["batch"]
        self.kv.join(update=self._machine.update_while_joined)
        self.net.collect_params().zero_grad()

    def prepare_join(self):
        pass

    def update_while_joined(self):
        self.trainer.update(self._joined_batch)

    @staticmethod
    def _round(operation, number):
        return {**operation, "do": "step", "seed": operation["seed"] + 101 * number, "zero": True}

    # The reference

    def follow(self, operation):
        getattr(self, "_follow_" + operation["do"])(operation)

    def follow_refused(self, operation):
        if operation["do"] == "split":
            self._follow_backward(operation)

    def _follow_step(self, operation, ranks=None):
        ranks = self._follow_backward(operation, ranks)
        gradients = [parameter.grad() for parameter in self.reference.all]
        kept = [gradient.copy() for gradient in gradients]
        self.updating.step(self._batch(operation, ranks))
        self._pushed |= self.updating._updaters[0].states.keys()
        for gradient, before in zip(gradients, kept):
            before.copyto(gradient)  # some of MXNet's optimizers scale it in place, and the next is added to it
        self._zero(self.reference, operation)

    def _batch(self, operation, ranks):
        return operation["batch"] * (len(ranks) if self.spec["reduction"] == "average" else 1)

    def _follow_backward(self, operation, ranks=None):
        ranks = list(range(self.workers) if ranks is None else ranks)
        for _ in range(operation["passes"]):
            with mx.autograd.record():
                total = sum(
                    self.reference.loss(operation, rank, device, mx.cpu())
                    for rank in ranks
                    for device in range(self.spec["contexts"])
                )
            mx.autograd.backward([total])
        for parameter, spec in zip(self.reference.all, self.parameters):
            parameter.data()._fresh_grad = True
            if not self.on_servers and spec["kind"] != "dense":
                values.without_zero_rows(parameter.grad(), spec).copyto(parameter.grad())
        return ranks

    def _follow_split(self, operation):
        ranks = self._follow_backward(operation)
        parts = len(ranks) if self.spec["reduction"] == "average" else 1
        for number, (parameter, arrays) in enumerate(zip(self.reference.all, self._sums)):
            for array in arrays:
                self.seen.append(("gradient %d" % number, array, parameter.grad().asnumpy() / array.dtype.type(parts)))
            gradient = parameter.grad()
            gradient *= operation["scale"]
        self.updating.update(self._batch(operation, ranks))
        self._zero(self.reference, operation)

    def _follow_tune(self, operation):
        self._tune(self.updating, self.reference, operation)

    def _follow_set_data(self, operation):
        if self.has_sparse:
            return
        self._set(operation["key"], self._new_value(operation, 0), self._new_value(operation, self.rank))

    def _set(self, position, value, own):
        """`own`: None where all workers have the value."""
        self.reference.all[position].set_data(mx.nd.array(value, dtype=value.dtype))
        self._is_reset = self.is_initialised
        self.own.pop(position, None)
        if own is not None:
            self.own[position] = own

    def _follow_save(self, operation):
        updater = self.updating._updaters[0]
        states = dict(updater.states)
        for position in self._pushed - states.keys() if self.on_servers else ():  # what a loaded file lacked, begins so
            weight = self.reference.all[position].data()
            states[position] = updater.optimizer.create_state_multi_precision(position, weight)
        for position, state in states.items():
            states[position] = runnable(updater.optimizer, self.reference.all[position].data(), state)
        saved = Saved(self._path(operation), self.optimizer, pickle.loads(pickle.dumps(states)),
                      pickle.dumps(updater.optimizer))  # fmt: skip
        self.slots[operation["slot"]] = saved
        self.seen += compare_files(saved)

    def _follow_load(self, operation):
        if not self._loads:
            return
        saved, updater = self.slots[operation["slot"]], self.updating._updaters[0]
        updater.states = pickle.loads(pickle.dumps(saved.states))
        updater.states_synced = dict.fromkeys(updater.states, False)
        if saved.optimizer is not None:
            updater.optimizer = self.updating._optimizer = pickle.loads(saved.optimizer)
            self.updating._optimizer.param_dict = dict(enumerate(self.updating._params))
            self.optimizer = saved.kind

    def _follow_save_parameters(self, operation):
        if not self.has_sparse:
            now = [parameter.data().asnumpy() for parameter in self.reference.all]
            self.files[operation["slot"]] = [(value, self.own.get(number)) for number, value in enumerate(now)]

    def _follow_load_parameters(self, operation):
        for position, (value, own) in enumerate(self.files[operation["slot"]] if self._can_load(operation) else []):
            self._set(position, value, own)

    def _follow_row_sparse_data(self, operation):
        if self._reads_rows(operation):
            rows, got = self._rows
            weight = self.reference.all[operation["key"]].data().asnumpy()
            expected = np.zeros_like(weight)
            expected[rows] = weight[rows]
            self.seen.append(("rows of parameter %d" % operation["key"], got, expected))

    def _follow_join(self, operation):
        self._follow_step(self._round(operation, 50))
        for number in range(max(operation["rounds"][: self.workers])):
            ranks = [rank for rank in range(self.workers) if operation["rounds"][rank] > number]
            self._follow_step(self._round(operation, number), ranks)

    # What can be read

    def look(self):
        for position, (parameter, spec) in enumerate(zip(self.net.all, self.parameters)):
            expected = self.reference.all[position].data().asnumpy()
            if spec["kind"] != "sparse":
                for array in parameter.list_data():
                    is_own = position in self.own
                    name = "%sparameter %d" % ("own " if is_own else "", position)
                    yield name, array.asnumpy(), self.own[position] if is_own else expected
            elif self.is_initialised:  # the first read makes the Trainer initialise its store
                rows = mx.nd.arange(spec["shape"][0])
                yield "parameter %d" % position, parameter.row_sparse_data(rows).asnumpy(), expected
