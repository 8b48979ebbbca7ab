"""Trains a perceptron on scikit-learn's handwritten digits with JAX, on any number of workers.

    python examples/jax/digits.py                    # alone, in one process
    p3 run -n 2 -s 2 python examples/jax/digits.py   # two workers and two servers

JAX compiles each layer as a separate function. So a layer runs as soon as its own new weights have arrived, and its
gradient leaves as soon as it is computed: the first layer's comes last, and overtakes all others that still wait.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import p3
from p3.frontend.snapshots import resume, take
from p3.frontend.weights import Weights
from sklearn.datasets import load_digits

SIZES = (64, 128, 64, 10)
LAYERS = ["layer%d" % number for number in range(len(SIZES) - 1)]
SGD = {"name": "torch_sgd", "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False,
       "multi_precision": False}  # fmt: skip


def load():
    """(images, labels) of 1,500 digits for training, and of the other 297 for testing; images have 64 pixels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(1).permutation(len(images))
    images, labels = images.astype(np.float32)[order] / 16, labels[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def first_weights():
    random = np.random.RandomState(1)
    first = {}
    for layer, inputs, outputs in zip(LAYERS, SIZES, SIZES[1:]):
        first[layer + ".weight"] = random.normal(0, (2 / inputs) ** 0.5, (inputs, outputs)).astype(np.float32)
        first[layer + ".bias"] = np.zeros(outputs, np.float32)
    return first


def dense(weight, bias, x):
    return x @ weight + bias


def hidden(weight, bias, x):
    return jax.nn.relu(dense(weight, bias, x))


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


# A layer's output, and the way back: from its gradient to those of the layer's arguments.
forward = {layer: jax.jit(lambda *given, layer=dense if layer == LAYERS[-1] else hidden: jax.vjp(layer, *given))
           for layer in LAYERS}  # fmt: skip
backward = jax.jit(lambda back, gradient: back(gradient))
loss_and_gradient = jax.jit(jax.value_and_grad(cross_entropy))


def train_step(weights, x, labels, lr):
    """The loss of this worker's part of the batch."""
    ways_back = []
    for layer in LAYERS:
        weight, bias = (jnp.array(weights[layer + part]) for part in (".weight", ".bias"))  # copies, owned by JAX
        x, back = forward[layer](weight, bias, x)
        ways_back.append(back)
    loss, gradient = loss_and_gradient(x, labels)
    for layer, back in zip(reversed(LAYERS), reversed(ways_back)):
        of_weight, of_bias, gradient = backward(back, gradient)
        weights.push(layer + ".weight", np.from_dlpack(of_weight), lr)  # the same memory; waits until it is computed
        weights.push(layer + ".bias", np.from_dlpack(of_bias), lr)
    weights.end_step(lr)
    return loss


def predict(weights, x):
    for layer in LAYERS:
        x, _ = forward[layer](weights[layer + ".weight"], weights[layer + ".bias"], x)
    return x.argmax(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, of all workers together")
    parser.add_argument("--save", help="file that rank 0 writes the weights to, in NumPy's .npz")
    options = parser.parse_args()

    with p3.Session.open() as session:
        rank, size = session.rank, session.num_workers
        (images, labels), (test_images, test_labels) = load()
        done, _ = resume(session)  # P3_SNAPSHOT_DIR
        weights = Weights(session, first_weights(), SGD)
        share = max(1, options.batch_size // size)
        steps = len(images) // (share * size)
        for step in range(done, options.epochs * steps):
            epoch, at = divmod(step, steps)
            order = np.random.RandomState(epoch).permutation(len(images))  # the same on all workers
            batch = order[at * share * size : (at + 1) * share * size][rank::size]
            loss = train_step(weights, images[batch], labels[batch], lr=0.05)
            take(session, step + 1, None)
            if rank == 0 and at == steps - 1:
                print("epoch %d: loss %.4f" % (epoch + 1, loss), flush=True)
        right = (predict(weights, test_images) == test_labels).mean()
        print("worker %d of %d: accuracy %.1f%% of %d test images" % (rank, size, 100 * right, len(test_labels)))
        if options.save and rank == 0:
            np.savez(options.save, **{name: weights[name] for name in first_weights()})


if __name__ == "__main__":
    main()
