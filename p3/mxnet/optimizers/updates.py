"""Who updates the weights of a store."""

import mxnet as mx

from p3.mxnet.optimizers.descriptions import LiveFields, looks_across_keys, round_scalars


class Updates:
    """The servers; or this worker, in a copy of its own; or nobody here, and the script gets the sums."""

    def __init__(self):
        self.updater = None
        self.on_servers = False  # by the updater's optimizer
        self._live_fields = None  # of that

    @property
    def optimizer(self):
        return getattr(self.updater, "optimizer", None)

    @property
    def here(self):
        return self.updater is not None and not self.on_servers

    @property
    def in_order(self):
        """Whether it matters in which order this worker updates the keys."""
        return self.here and looks_across_keys(self.optimizer)

    @property
    def hands_out_sums(self):
        return self.updater is None

    def leave_to_servers(self, optimizer):
        self._live_fields = LiveFields(optimizer)
        self.on_servers, self.updater = True, mx.optimizer.get_updater(optimizer)

    def scalars(self, entry):
        """What the servers need for the next update of the key. Counts it."""
        declared = entry.declared
        scalars = round_scalars(self.optimizer, entry.id, servers_count=declared.staleness > 0)
        return (*scalars, self._live_fields.of(self.optimizer, declared))

    def make(self, entry):
        """Behind its push, whose sum need not have landed yet: this worker's own, if it updates."""
        if self.here:
            self.updater(entry.id, entry.sum_for_updater(), entry.weight)

    def follow(self, entry):
        """The same behind a round that this worker has skipped."""
        if self.on_servers:
            round_scalars(self.optimizer, entry.id)  # counts the update here as elsewhere
        elif self.hands_out_sums and entry.parameter is not None:
            for array in entry.parameter.list_data():
                array._fresh_grad = True  # or Trainer.update would take the sum for a stale gradient
        self.make(entry)
