"""p3.factors(net): fully connected layers whose gradients leave as factors (p3/frontend/factors.py).

A layer's own operator takes the place of MXNet's. Where its gradient shall leave as factors, it writes them where MXNet
would have the gradient of the weight: the first rows x (outputs + inputs) elements of that array. So the product that
makes a gradient of them is spared here, and everything between here and the store stays as it is: Trainer, engine,
priorities. The store takes the key's rounds as those of factors (keys/factored.py).

Which it shall be is decided by the batch of the first recorded forward pass.

Threads: MXNet makes an operator on the thread that runs the forward pass, and runs it on one of its own.
"""

import functools
import logging
import math

import mxnet as mx
from p3._core import DTYPES
from p3.frontend.factors import FactoredLayer, checked
from p3.worker import session as sessions

log = logging.getLogger("p3")

_OPERATOR = "p3_factored_dense"
_layers = []  # those that operators know by number


def factors(net, batch_size=None, route="auto"):
    """Has gradients of the fully connected layers in `net` leave as sufficient factors, where that takes fewer bytes.

    `net`: a Gluon block, before its first forward pass in training; each `nn.Dense` in it is looked at by itself.
    `batch_size`: rows of a layer's input on one device (batch, times length where flatten=False); by default those of
    the first recorded forward pass. Shorter batches are padded, larger ones are an error. The same on every worker.
    `route`: "auto" takes factors where the job's busiest network card then carries fewer bytes, or the default of
    P3_STRATEGY says so; "factors" wherever they are no larger than the gradient; "dense" nowhere.

    Sums and updates are the same, but for the order in which float32 is added up. The gradient array of such a weight
    holds factors, and NaN behind them, so the script cannot read it, nor clip it by its norm. Weights that several
    layers share, other types than float32, and grad_req="add" stay dense; a log line says so. Returns `net`.
    """
    checked(batch_size, route)
    blocks, owners = {}, {}
    net.apply(blocks.setdefault)
    for block in blocks:
        for parameter in block._reg_params.values():
            owners.setdefault(parameter, []).append(block)
    session = sessions.current()
    for block in blocks:
        if type(block) is not mx.gluon.nn.Dense:
            continue
        if hasattr(block.weight, "_p3_layer"):
            raise ValueError(f"p3.factors has been called for {block.weight.name} already")
        if len(owners[block.weight]) > 1:
            log.warning("%s stays dense: several layers share it", block.weight.name)
            continue
        block.weight._p3_layer = layer = GluonLayer(block, session, batch_size, route)
        layer.follow(session.strategy(), block.weight.name)
        block.hybrid_forward = functools.partial(_forward, layer, block.hybrid_forward)
    for block in blocks:
        if isinstance(block, mx.gluon.HybridBlock):
            block._clear_cached_op()
    return net


def layer_of(parameter):
    """The GluonLayer whose weight it is, if its gradient array holds factors; else None."""
    layer = getattr(parameter, "_p3_layer", None)
    return layer if layer is not None and layer.has_factors else None


class GluonLayer(FactoredLayer):
    """One nn.Dense. Noted on its weight."""

    def __init__(self, block, session, batch_size, route):
        super().__init__(session, block.weight.name, block._units, batch_size, route)
        self.weight, self.has_bias, self.flattens = block.weight, block.bias is not None, block._flatten
        self.number = len(_layers)
        _layers.append(self)

    @property
    def devices(self):
        return len(self.weight.list_ctx())

    def begin(self, rows, inputs, is_float32):
        """Before each recorded use, on its device."""
        if self.shape is None:
            why_not = "" if is_float32 else "its type is not float32"
            if self.weight.grad_req != "write":
                why_not = f"its grad_req is {self.weight.grad_req!r}"
            self.decide(rows, inputs, self.devices, why_not)
            if self.has_factors:
                with mx.autograd.pause():
                    for gradient in self.weight.list_grad():
                        gradient[:] = math.nan  # of which no script shall take it for a gradient
        self.note_use(rows)


def _forward(layer, forward, F, x, weight, bias=None):
    if mx.util.is_np_array() or layer.route == "dense":
        return forward(F, x, weight, bias)
    arrays = (x, weight) if bias is None else (x, weight, bias)
    made = F.Custom(*arrays, op_type=_OPERATOR, layer=layer.number)
    activation = forward.__self__.act
    return made if activation is None else activation(made)


@mx.operator.register(_OPERATOR)
class _Prop(mx.operator.CustomOpProp):
    def __init__(self, layer):
        super().__init__(need_top_grad=True)
        self._layer = _layers[int(layer)]

    def list_arguments(self):
        return ["data", "weight", *["bias"] * self._layer.has_bias]

    def infer_shape(self, in_shape):
        data, units = list(in_shape[0]), self._layer.outputs
        inputs = math.prod(data[1:]) if self._layer.flattens else data[-1]
        out = [data[0], units] if self._layer.flattens else [*data[:-1], units]
        return [data, [units, inputs], [units]][: len(in_shape)], [out], []

    def create_operator(self, _ctx, in_shapes, in_dtypes):
        if mx.autograd.is_recording():
            inputs = in_shapes[1][1]
            is_float32 = all(code == DTYPES["float32"] for code in in_dtypes)
            self._layer.begin(math.prod(in_shapes[0]) // inputs, inputs, is_float32)
        return _Operator(self._layer)


class _Operator(mx.operator.CustomOp):
    def __init__(self, layer):
        super().__init__()
        self._layer = layer

    def forward(self, is_train, req, in_data, out_data, aux):
        if req[0] == "null":
            return
        settings = {"num_hidden": self._layer.outputs, "flatten": self._layer.flattens, "no_bias": len(in_data) == 2}
        self.assign(out_data[0], req[0], mx.nd.FullyConnected(*in_data, **settings))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        outputs, inputs = in_data[1].shape
        dy, x = out_grad[0].reshape((-1, outputs)), in_data[0].reshape((-1, inputs))
        if req[0] != "null":
            self.assign(in_grad[0], req[0], mx.nd.dot(dy, in_data[1]).reshape(in_data[0].shape))
        if len(in_data) > 2 and req[2] != "null":
            self.assign(in_grad[2], req[2], dy.sum(axis=0))
        if req[1] == "null":
            return
        if self._layer.has_factors:
            _write_factors(dy, x, in_grad[1], self._layer.shape)
        else:
            self.assign(in_grad[1], req[1], mx.nd.dot(dy, x, transpose_a=True))


def _write_factors(dy, x, gradient, shape):
    """As p3/factors.h has them, with rows of zeros behind a batch that is short."""
    factors = factors_in(gradient, shape)
    rows = min(len(x), shape.rows)
    mx.nd.concat(dy[:rows], x[:rows], dim=1, out=factors[:rows])
    if rows < shape.rows:
        factors[rows:] = 0


def factors_in(gradient, shape):
    """Those that the gradient array of a weight begins with: a view, rows x (outputs + inputs)."""
    return gradient.reshape((-1,))[: shape.elements].reshape((shape.rows, shape.width))
