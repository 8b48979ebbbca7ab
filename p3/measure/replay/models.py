"""The models that the lab replays: real shapes in forward order, and each layer's share of the computation.

ResNet-50 (v1), Inception V3 and VGG-19 are Gluon's, as zoo.py has derived them into models.json. The other two are
defined here: a recurrent encoder-decoder in the manner of Sockeye, whose first layer is the heaviest, and BERT-base.

A layer's time is that of its floating-point operations and its memory traffic on one GPU of the paper's cluster, one
after the other. Only the proportions are used: a replay is told how many seconds an iteration computes. The backward
pass takes twice as long as the forward pass in every layer: it makes a gradient for the input and one for the weights.
"""

import json
from math import prod
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

JSON_PATH = Path(__file__).with_name("models.json")
FLOAT32_BYTES = 4

# NVIDIA's figures for the Quadro P4000.
FLOPS_PER_S = 5.3e12
MEMORY_BYTES_PER_S = 243e9

# Fractions of each model that are 73 to 88 MB: what 200 Mbit/s carries in some 4 s.
LAB_SIZES = {"vgg19": 0.15, "resnet50": 0.82, "inception_v3": 0.9, "sockeye": 1.0, "bert": 0.2}
NAMES = tuple(LAB_SIZES)

# When a backward pass hands out gradients: after each layer those of that layer, or all when it has ended, as of graphs
# that are batched lazily (DyNet, Cavs).
RELEASES = ("layer", "end")

_SAMPLES = {"sockeye": 64}  # of a batch
_DEFAULT_SAMPLES = 32


class Tensor(NamedTuple):
    name: str
    shape: Tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * FLOAT32_BYTES


class Layer(NamedTuple):
    """`forward` and `backward` are fractions of an iteration's computation; over all layers they add up to 1."""

    name: str
    tensors: Tuple[Tensor, ...]
    forward: float
    backward: float

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


class Model(NamedTuple):
    """Layers in forward order. `size` is the fraction of the real model's parameters."""

    name: str
    size: float
    layers: Tuple[Layer, ...]

    @property
    def tensors(self) -> List[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)


def load(name: str, size: Optional[float] = None) -> Model:
    """The model with about `size` of its parameters, by default LAB_SIZES[name]. Raises ValueError.

    Every tensor keeps its share of the bytes: its first dimension is scaled. The layers' times stay those of the real
    model.
    """
    if name not in NAMES:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(NAMES)}")
    size = LAB_SIZES[name] if size is None else size
    if not 0 < size < float("inf"):
        raise ValueError(f"size is {size}; it must be a positive fraction of the model")
    layers = {"sockeye": _sockeye, "bert": _bert}[name]() if name in ("sockeye", "bert") else _derived(name)
    samples = _SAMPLES.get(name, _DEFAULT_SAMPLES)
    seconds = [_seconds(layer, samples) for layer in layers]
    total = 3 * sum(seconds)
    return Model(name, size, tuple(
        Layer(
            layer["name"],
            tuple(Tensor(tensor, _scaled(shape, size)) for tensor, shape in layer["tensors"]),
            forward=one / total,
            backward=2 * one / total,
        )
        for layer, one in zip(layers, seconds)
    ))


def _scaled(shape, size):
    return (max(1, round(shape[0] * size)), *shape[1:])


def _seconds(layer, samples):
    """Of the forward pass. Weights are read once for the whole batch, activations for each sample."""
    weights = sum(prod(shape) for _, shape in layer["tensors"])
    moved_bytes = FLOAT32_BYTES * (layer["elements"] * samples + weights)
    return layer["flops"] * samples / FLOPS_PER_S + moved_bytes / MEMORY_BYTES_PER_S


def _derived(name) -> List[Dict]:
    return json.loads(JSON_PATH.read_text())[name]


# Models by definition, in the form of models.json: flops and elements are those of one sample, forward.


def _sockeye(words=30, source_words=10000, target_words=5120, width=512) -> List[Dict]:
    """A bidirectional and a plain LSTM read the source; one LSTM with attention and input feeding writes the target."""
    half = width // 2
    attention = _layer(
        "attention",
        [("query_weight", (width, width)), ("source_weight", (width, width)), ("score_weight", (1, width))],
        # Each of the words looks at all the words: an additive score and a weighted sum.
        flops=2 * words * (2 * width * width) + 2 * words * words * (2 * width),
        elements=2 * words * words * width,
    )
    return [
        _embedding("source_embedding", source_words, width, words),
        _lstm("encoder_forward", width, half, words),
        _lstm("encoder_backward", width, half, words),
        _lstm("encoder_top", width, width, words),
        _embedding("target_embedding", target_words, width, words),
        _lstm("decoder", 2 * width, width, words),
        attention,
        _dense("hidden", 2 * width, width, words),
        _dense("output", width, target_words, words),
    ]


def _bert(tokens=128, vocabulary=30522, positions=512, width=768, inner=3072, blocks=12) -> List[Dict]:
    """BERT-base with its pooler, without a head."""
    embedding = _layer(
        "embedding",
        [("word_weight", (vocabulary, width)), ("position_weight", (positions, width)), ("type_weight", (2, width))],
        flops=0,
        elements=6 * tokens * width,
    )
    layers = [embedding, _norm("embedding_norm", width, tokens)]
    for block in range(blocks):
        name = f"block{block}_"
        layers += [
            _dense(name + "query", width, width, tokens),
            _dense(name + "key", width, width, tokens),
            _dense(name + "value", width, width, tokens),
        ]
        # Scores and weighted sum, of every token with every other, before what comes of them is projected.
        projection = _dense(name + "attention_output", width, width, tokens)
        projection["flops"] += 2 * 2 * tokens * tokens * width
        projection["elements"] += 4 * 12 * tokens * tokens
        layers += [
            projection,
            _norm(name + "attention_norm", width, tokens),
            _dense(name + "inner", width, inner, tokens),
            _dense(name + "output", inner, width, tokens),
            _norm(name + "output_norm", width, tokens),
        ]
    return layers + [_dense("pooler", width, width, 1)]


def _layer(name, tensors, flops, elements):
    return {
        "name": name,
        "tensors": [(f"{name}_{tensor}", shape) for tensor, shape in tensors],
        "flops": flops,
        "elements": elements,
    }


def _embedding(name, words, width, used):
    return _layer(name, [("weight", (words, width))], flops=0, elements=2 * used * width)


def _dense(name, inputs, outputs, uses):
    tensors = [("weight", (outputs, inputs)), ("bias", (outputs,))]
    return _layer(name, tensors, flops=2 * inputs * outputs * uses, elements=(inputs + outputs) * uses)


def _lstm(name, inputs, units, steps):
    gates = 4 * units
    tensors = [
        ("i2h_weight", (gates, inputs)),
        ("h2h_weight", (gates, units)),
        ("i2h_bias", (gates,)),
        ("h2h_bias", (gates,)),
    ]
    flops = 2 * gates * (inputs + units) * steps
    return _layer(name, tensors, flops=flops, elements=(inputs + 2 * gates + 4 * units) * steps)


def _norm(name, width, tokens):
    return _layer(name, [("gamma", (width,)), ("beta", (width,))], flops=0, elements=2 * width * tokens)
