"""A simulated job whose network does nothing but carry slices, the most urgent first; tests compare the bound with it.

Most urgent is the oldest round, then the first layer. Without the round, the pushes of a worker that is a little ahead
overtake the last values that the others still wait for, and workers drift apart by a whole backward pass.

With clipping a worker's first layer that has slices waits for the norm: it is known on every host when all slices of a
round have been summed, and a delay has passed. Then the pushes of a round are more urgent than its values.

Each direction of each NIC carries one frame at a time, whole, at its rate; servers and workers take no time but the
model's. So it leaves out all that makes a real job slower, and is as fast as slices of this size allow.
"""

import heapq
from itertools import count
from types import SimpleNamespace

from p3.measure.replay.models import FLOAT32_BYTES


class _Link:
    """One direction of a NIC."""

    def __init__(self, simulation, mbit):
        self._simulation = simulation
        self._bytes_per_s = mbit * 1e6 / 8
        self._waiting = []
        self._is_busy = False

    def send(self, urgency, wire_bytes, then):
        heapq.heappush(self._waiting, (urgency, next(self._simulation.numbers), wire_bytes, then))
        self._start()

    def _start(self):
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        _, _, wire_bytes, then = heapq.heappop(self._waiting)
        self._simulation.after(wire_bytes / self._bytes_per_s, lambda: self._finish(then))

    def _finish(self, then):
        self._is_busy = False
        then()
        self._start()


class _Simulation:
    def __init__(self, model, compute_s, cluster, slice_size, overhead, delay_s, release, clips):
        self._release, self._clips = release, clips
        self.now, self.numbers, self._events = 0.0, count(), []
        self._model, self._compute_s, self._cluster, self._delay_s = model, compute_s, cluster, delay_s
        self._up = [_Link(self, mbit) for mbit in cluster.up_mbit]
        self._down = [_Link(self, mbit) for mbit in cluster.down_mbit]
        self._slices = [[] for _ in model.layers]
        numbers = count()
        for number, (layer, slices) in enumerate(zip(model.layers, self._slices)):
            for tensor in layer.tensors:
                whole = slice_size.of(tensor.elements)
                for offset in range(0, tensor.elements, whole):
                    elements = min(whole, tensor.elements - offset)
                    home = cluster.servers[next(numbers) % len(cluster.servers)]
                    wire_bytes = overhead.on_wire(elements * FLOAT32_BYTES)
                    slices.append(SimpleNamespace(layer=number, home=home, wire_bytes=wire_bytes, pushes=0, round=0))
        self._missing = [[0] * len(model.layers) for _ in cluster.workers]
        self._waits_for = [None] * len(cluster.workers)
        self._first = next((number for number, slices in enumerate(self._slices) if slices), None)
        self._summed = 0  # slices of a round
        self._norms = [0] * len(cluster.workers)  # of rounds, that are known
        self.ends = [[] for _ in cluster.workers]

    def run(self, iterations):
        for worker in range(len(self.ends)):
            self._forward(worker, 0)
        while min(map(len, self.ends)) < iterations:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def after(self, seconds, action):
        heapq.heappush(self._events, (self.now + seconds, next(self.numbers), action))

    def _forward(self, worker, layer):
        if layer == len(self._model.layers):
            self._backward(worker, layer - 1)
        elif self._missing[worker][layer] or self._lacks_norm(worker, layer):
            self._waits_for[worker] = layer
        else:
            self._waits_for[worker] = None
            seconds = self._model.layers[layer].forward * self._compute_s
            self.after(seconds, lambda: self._forward(worker, layer + 1))

    def _lacks_norm(self, worker, layer):
        return self._clips and layer == self._first and self._norms[worker] < len(self.ends[worker])

    def _backward(self, worker, layer):
        seconds = self._model.layers[layer].backward * self._compute_s
        self.after(seconds, lambda: self._backward_done(worker, layer))

    def _backward_done(self, worker, layer):
        if self._release == "layer":
            self._gradient_is_ready(worker, layer)
        if layer:
            self._backward(worker, layer - 1)
            return
        if self._release == "end":
            for each in range(len(self._slices)):
                self._gradient_is_ready(worker, each)
        self.ends[worker].append(self.now)
        self._forward(worker, 0)

    def _gradient_is_ready(self, worker, layer):
        self._missing[worker][layer] = len(self._slices[layer])
        for one in self._slices[layer]:
            source, round_ = self._cluster.workers[worker], len(self.ends[worker])
            self._send(source, one.home, (round_, False, one.layer), one, lambda one=one: self._pushed(one))

    def _pushed(self, one):
        one.pushes += 1
        if one.pushes < len(self.ends):
            return
        one.pushes = 0
        for worker, host in enumerate(self._cluster.workers):
            urgency = (one.round, self._clips, one.layer)
            self._send(one.home, host, urgency, one, lambda worker=worker: self._landed(worker, one.layer))
        one.round += 1
        self._summed += 1
        if self._summed == sum(map(len, self._slices)):
            self._summed = 0
            self.after(self._delay_s, self._norm_is_known)

    def _norm_is_known(self):
        for worker in range(len(self._norms)):
            self._norms[worker] += 1
            if self._waits_for[worker] == self._first:
                self._forward(worker, self._first)

    def _landed(self, worker, layer):
        self._missing[worker][layer] -= 1
        if self._waits_for[worker] == layer:
            self._forward(worker, layer)

    def _send(self, source, target, urgency, one, then):
        if source == target:
            then()
            return
        up, down = self._up[source], self._down[target]

        def arrive():
            down.send(urgency, one.wire_bytes, then)

        up.send(urgency, one.wire_bytes, (lambda: self.after(self._delay_s, arrive)) if self._delay_s else arrive)


def ends_of_iterations(
    model, compute_s, cluster, iterations, slice_size, overhead, delay_s=0.0, release="layer", clips=False
):
    """When the last worker has ended each iteration. All start at 0, with their weights."""
    simulation = _Simulation(model, compute_s, cluster, slice_size, overhead, delay_s, release, clips)
    simulation.run(iterations)
    return [max(ends[number] for ends in simulation.ends) for number in range(iterations)]
