"""Derives the layers of Gluon's models for models.json. Needs MXNet; downloads nothing and computes no forward pass.

    python -m p3.measure.replay.zoo        writes p3/measure/replay/models.json anew

A layer begins at each operator that has trainable parameters; the operators without any that follow belong to it. The
order is that of MXNet's graph: the order in which a forward pass queues the operators.
"""

import json
from math import prod

from p3.measure.replay.models import JSON_PATH

# Gluon's constructor and the input that the model is made for, without the batch.
MODELS = {
    "resnet50": ("resnet50_v1", (3, 224, 224)),
    "inception_v3": ("inception_v3", (3, 299, 299)),
    "vgg19": ("vgg19", (3, 224, 224)),
}

# Their outputs lie where their inputs do.
MOVES_NOTHING = {"Flatten", "Reshape"}


def derive(name):
    """The model's layers in forward order, as models.json has them; work is that of one sample, forward."""
    import mxnet as mx
    from mxnet.gluon.model_zoo import vision

    constructor, sample = MODELS[name]
    net = getattr(vision, constructor)(prefix="net_")  # so that names do not depend on what was built before
    trained = {parameter.name for parameter in net.collect_params().values() if parameter.grad_req != "null"}
    symbol = net(mx.sym.var("data"))
    internals = symbol.get_internals()
    _, shapes, _ = internals.infer_shape(data=(1, *sample))
    shape_of = dict(zip(internals.list_outputs(), shapes))
    nodes = json.loads(symbol.tojson())["nodes"]

    layers = []
    for node in nodes:
        if node["op"] == "null":
            continue
        inputs = [nodes[index] for index, *_ in node["inputs"]]
        tensors = [(one["name"], shape_of[one["name"]]) for one in inputs if one["name"] in trained]
        output = shape_of[node["name"] + "_output"]
        if tensors:
            layers.append({"name": _layer_name(tensors[0][0]), "tensors": [], "flops": 0, "elements": 0})
        layer = layers[-1]
        layer["tensors"] += [[_without_prefix(tensor), list(shape)] for tensor, shape in tensors]
        layer["flops"] += _flops(node["op"], tensors, output)
        if node["op"] not in MOVES_NOTHING:
            arrays = [shape_of[_output_name(one)] for one in inputs if one["op"] != "null" or one["name"] == "data"]
            layer["elements"] += sum(map(prod, arrays)) + prod(output)
    return layers


def _flops(op, tensors, output):
    """Of one sample. Two, a product and a sum, for each use of a weight; what else there is shows in the elements."""
    if op not in ("Convolution", "FullyConnected"):
        return 0
    return 2 * prod(tensors[0][1]) * prod(output[2:])


def _output_name(node):
    return node["name"] if node["op"] == "null" else node["name"] + "_output"


def _without_prefix(name):
    return name[len("net_"):]


def _layer_name(tensor):
    return _without_prefix(tensor).rpartition("_")[0]


def main():
    # A layer on each line, so that a change can be read.
    models = []
    for name in MODELS:
        lines = ",\n".join("  " + json.dumps(layer) for layer in derive(name))
        models.append(f'"{name}": [\n{lines}\n]')
    JSON_PATH.write_text("{\n" + ",\n".join(models) + "\n}\n")


if __name__ == "__main__":
    main()
