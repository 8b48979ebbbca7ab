"""The lab's models: shapes are the real ones, and scaling keeps what the schedule depends on."""

import pytest

from p3.measure.replay import models, zoo


@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_stored_layers_are_those_of_the_model_zoo(name):
    assert models._derived(name) == zoo.derive(name), "run: python -m p3.measure.replay.zoo"


@pytest.mark.parametrize("name, parameters", [
    ("vgg19", 143_667_240),  # Simonyan and Zisserman: 144 million
    ("resnet50", 25_575_912),  # He et al.: 25.6 million with Gluon's biases
    ("inception_v3", 23_834_568),  # Szegedy et al.: 23.8 million without the auxiliary classifier
    ("sockeye", 18_245_632),
    ("bert", 109_482_240),  # Devlin et al.: 110 million
])  # fmt: skip
def test_whole_models_have_the_published_parameters(name, parameters):
    assert sum(tensor.elements for tensor in models.load(name, 1).tensors) == parameters


def test_forward_work_of_vgg19_is_the_published_count():
    # 19.6 billion multiply-adds for an image.
    assert sum(layer["flops"] for layer in models._derived("vgg19")) / 2 == pytest.approx(19.6e9, rel=0.01)


@pytest.mark.parametrize("name", models.NAMES)
def test_times_add_up_and_backward_takes_twice_as_long(name):
    layers = models.load(name).layers
    assert sum(layer.forward + layer.backward for layer in layers) == pytest.approx(1)
    assert all(layer.backward == pytest.approx(2 * layer.forward) and layer.forward > 0 for layer in layers)


@pytest.mark.parametrize("name", models.NAMES)
def test_names_of_tensors_are_unique(name):
    names = [tensor.name for tensor in models.load(name).tensors]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name, megabytes", [
    ("vgg19", 86), ("resnet50", 84), ("inception_v3", 86), ("sockeye", 73), ("bert", 88),
])  # fmt: skip
def test_default_sizes_are_those_of_the_lab(name, megabytes):
    assert round(models.load(name).bytes / 1e6) == megabytes


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("size", [0.15, 0.5, 2])
def test_scaling_keeps_each_heavy_layers_share(name, size):
    whole, scaled = models.load(name, 1), models.load(name, size)
    assert scaled.bytes == pytest.approx(size * whole.bytes, rel=0.01)
    for before, after in zip(whole.layers, scaled.layers):
        assert (before.forward, before.name) == (after.forward, after.name)
        if before.bytes > 0.01 * whole.bytes:
            assert after.bytes == pytest.approx(size * before.bytes, rel=0.02)


def test_first_layer_of_sockeye_is_the_heaviest_and_of_vgg19_one_near_the_end():
    sockeye, vgg19 = models.load("sockeye").layers, models.load("vgg19").layers
    assert max(sockeye, key=lambda layer: layer.bytes) is sockeye[0]
    assert max(vgg19, key=lambda layer: layer.bytes) is vgg19[-3]


def test_no_tensor_vanishes():
    assert min(tensor.elements for tensor in models.load("vgg19", 1e-9).tensors) >= 1


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_size_that_is_no_fraction_is_refused(size):
    with pytest.raises(ValueError, match="size is .*; it must be a positive fraction"):
        models.load("vgg19", size)


def test_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'vgg16'; there are vgg19, resnet50"):
        models.load("vgg16")
