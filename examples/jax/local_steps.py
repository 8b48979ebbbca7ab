"""Trains a perceptron on scikit-learn's handwritten digits with JAX and local steps, for workers across a slow network.

    python examples/jax/local_steps.py                    # alone, in one process
    p3 run -n 2 -s 2 python examples/jax/local_steps.py   # two workers and two servers

Every worker takes steps of its own, each one jitted function with Adam in it. Each third of the weights is exchanged
once in 12 steps, in 4 bits, and has 3 more steps to come back in.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import p3
from sklearn.datasets import load_digits

SIZES = (64, 128, 64, 10)
LAYERS = ["layer%d" % number for number in range(len(SIZES) - 1)]


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


def logits(weights, x):
    for layer in LAYERS:
        x = x @ weights[layer + ".weight"] + weights[layer + ".bias"]
        x = x if layer == LAYERS[-1] else jax.nn.relu(x)
    return x


def loss_of(weights, x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(weights, x)), labels[:, None], axis=1).mean()


@functools.partial(jax.jit, static_argnames="lr")
def train_step(weights, moments, count, x, labels, lr=0.003):
    """Adam: the new weights, its new moments, and the loss of this worker's batch."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, labels)
    means, squares = moments
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
    squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, squares, gradients)
    rate = lr * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    weights = jax.tree.map(lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-8), weights, means, squares)
    return weights, (means, squares), loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=25, help="images per step, of each worker")
    options = parser.parse_args()

    with p3.Session.open() as session:
        rank, size = session.rank, session.num_workers
        (images, labels), (test_images, test_labels) = load()
        local = p3.LocalSteps(session, first_weights(), every=12, fragments=3, delay=3, codec="int4")
        weights = local.arrays
        moments = 2 * (jax.tree.map(np.zeros_like, weights),)
        steps = len(images) // (options.batch_size * size)  # of every worker, or one would wait for the others
        for step in range(options.epochs * steps):
            epoch, at = divmod(step, steps)
            order = np.random.RandomState(epoch).permutation(len(images))[rank::size]  # the same on all workers
            batch = order[at * options.batch_size : (at + 1) * options.batch_size]
            weights, moments, loss = train_step(weights, moments, step + 1.0, images[batch], labels[batch])
            weights = local.step(weights)  # JAX's own arrays, but for what has come, which is NumPy's
            if rank == 0 and at == steps - 1:
                print("epoch %d: loss %.4f" % (epoch + 1, loss), flush=True)
        weights = local.take_global()  # all workers have the same
        right = (logits(weights, test_images).argmax(1) == test_labels).mean()
        stats = local.stats()
        print(
            "worker %d of %d: accuracy %.1f%% of %d test images; waited for %d of %d exchanges, %.2f s"
            % (rank, size, 100 * right, len(test_labels), stats["waits"], stats["merges"], stats["waited_s"])
        )


if __name__ == "__main__":
    main()
