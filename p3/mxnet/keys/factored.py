"""The key of a weight whose gradients leave as factors (factored_layers.py)."""

import mxnet as mx

from p3.mxnet.arguments import classic
from p3.mxnet.factored_layers import factors_in
from p3.mxnet.keys.dense import DenseKey


class FactoredKey(DenseKey):
    """Its rounds land in the landing array of the dense key that brings the weight's values, and that has no rounds."""

    route = "factors"

    def __init__(self, engine, declared, dense, layer):
        super().__init__(engine, dense.id, declared, landing=dense.landing)
        self._dense, self._layer = dense, layer
        self.weight, self.outs, self.priority = dense.weight, dense.outs, dense.priority
        self.leaves_whole = True
        self.operations.init(0, self.priority)

    def init(self, value, priority):
        self._dense.init(value, priority)

    def gradient(self, values):
        """The factors of this worker's devices, one after the other, on the first of them."""
        self._layer.require_one_use(self._layer.devices)
        factors = [factors_in(classic(value), self._layer.shape) for value in values]
        if len(factors) == 1:
            return factors[0]
        return mx.nd.concat(*(one.as_in_context(factors[0].context) for one in factors), dim=0)
