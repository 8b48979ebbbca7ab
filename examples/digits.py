"""The data of several examples: scikit-learn's handwritten digits, which need no download."""

import numpy as np
from sklearn.datasets import load_digits


def load():
    """(images, labels) of 1,500 digits for training, and of the other 297 for testing; images are 1 x 8 x 8."""
    digits = load_digits()
    images = digits.images[:, np.newaxis].astype("float32") / 16
    labels = digits.target.astype("float32")
    order = np.random.RandomState(1).permutation(len(images))
    return [(images[part], labels[part]) for part in (order[:1500], order[1500:])]
