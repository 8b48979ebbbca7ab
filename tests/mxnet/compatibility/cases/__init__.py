"""The cases by topic, in the order of the tables."""

from compatibility.cases import methods, training, interfaces, optimizers, failures  # noqa: F401
from compatibility.registry import CASES  # noqa: F401
