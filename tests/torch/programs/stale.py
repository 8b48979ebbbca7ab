"""Programs with `staleness=`: the workers take turns, so that what each reads is known.

Each gradient, divided by the number of workers, updates the weights at once. A worker trains on the weights that its
own last push was answered with; in plain torch that is a list of weights for each worker, and one that is the servers'.
"""

from __future__ import annotations

from programs.arena import Arena

OPERATIONS = ("distribute", "train", "evaluate", "look", "set", "scheduler", "schedule", "save", "synchronize")
WAY = "sabcehmd"  # all layers: for a parameter without a gradient, a worker waits until all have come as far


class StaleArena(Arena):
    def run(self, operation):
        """All workers end it together: else what one reads of the servers, the first value for one, may hold what a
        faster one has pushed since."""
        read = super().run(operation)
        self._meet()
        return read

    def distribute(self):
        super().distribute()
        self._servers = self._values()
        self._views = [self._servers] * self.workers

    def train(self, seed, **_ignored):
        if not self.is_distributed:
            return super().train([WAY], seed)
        for worker in range(self.workers):
            if self.p3 is None:
                self._push(seed, worker)
            elif worker == self.rank:
                super().train([WAY] * self.workers, seed)
                self.synchronize()
            self._meet()
        self._take(self._views[self.rank])

    def _push(self, seed, worker):
        self._take(self._views[worker])
        self._zero("none")
        self._backward(self._loss([WAY] * self.workers, seed, worker) / self.workers, worker)
        self._take(self._servers)
        for optimizer in self.optimizers:
            optimizer.step()
        self.spent = self.optimizers
        self._servers = self._views[worker] = self._values()

    def everything(self):
        """A step without gradients is answered when all workers have come as far: with one value."""
        self._take(self._servers)
        return super().everything()

    def _values(self):
        return [tensor.detach().clone() for tensor in self.kept]

    def _take(self, values):
        if self.p3 is None:
            for tensor, value in zip(self.kept, values):
                tensor.data.copy_(value)

    def _meet(self):
        """Nobody reads what others are changing."""
        if self._has_p3():
            self.p3.barrier()
