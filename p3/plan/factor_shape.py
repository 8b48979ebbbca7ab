"""The sufficient factors of a weight's gradient, as they cross the network; when they do: p3/frontend/factors.py."""

from __future__ import annotations

from typing import NamedTuple


class FactorShape(NamedTuple):
    """Of one worker's factors: K rows, each of M gradients of outputs, then N inputs."""

    rows: int
    outputs: int
    inputs: int

    @property
    def width(self) -> int:
        return self.outputs + self.inputs

    @property
    def elements(self) -> int:
        return self.rows * self.width

    @property
    def fits_gradient(self) -> bool:
        """Whether the factors have room in an array of the gradient, where they travel from the layer to the core."""
        return self.elements <= self.outputs * self.inputs


def key_of(weight: str) -> str:
    """The name of the key that brings the factors of the weight of that name."""
    return "%s (factors)" % weight
