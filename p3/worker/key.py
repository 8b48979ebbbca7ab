"""A key as one worker has declared it, and what the job has agreed on for it."""

from __future__ import annotations

import math
import operator
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from p3.codecs import LOW_RANK
from p3._core import DTYPES
from p3.plan import key_plan
from p3.plan.factor_shape import FactorShape
from p3.plan.key_plan import Axes, KeyPlan
from p3.plan.options import validate_of_key

Name = Union[str, int]  # 1 and "1" are different keys
NORM = "(norm)"  # of a key of norms, as no parameter is called
Identity = Tuple[int, Name]  # of a key in its job: its store and name


class Key(NamedTuple):
    """One tensor of the job."""

    store: int
    name: Name
    shape: Tuple[int, ...]
    dtype: str
    handle: int  # what the core calls it, here only
    sparse: bool = False  # a key of rows: its gradients touch few of them
    factors: Optional[FactorShape] = None  # of one worker; then rounds land in the weight, whose shape this is not
    axes: Axes = Axes()  # how its rounds go; before it is declared, what the script says of that
    options: Mapping[str, Any] = {}  # that it has in place of its store's, by name
    rank: int = 0  # of the two matrices that have rounds in its place (lowrank/); 0: it has rounds itself

    def __hash__(self) -> int:  # of a tuple it would need that of the codec, a dict
        return hash((self.store, self.name, self.handle))

    @property
    def landing_shape(self) -> Tuple[int, ...]:
        return self.shape if self.factors is None else (self.factors.outputs, self.factors.inputs)

    @property
    def staleness(self) -> int:
        """Rounds that the fastest worker may be ahead of the slowest."""
        return self.axes.staleness

    @property
    def compression(self) -> Optional[str]:
        """The type that applies to what is pushed."""
        return LOW_RANK.name if self.rank else self.axes.codec.get("type")

    @property
    def is_norm(self) -> bool:
        return self.axes.reduction == "norm"

    @property
    def identity(self) -> Identity:
        return self.store, self.name


class Agreed:
    """What the job has agreed on for a key, which this worker may not have declared yet."""

    def __init__(self, message: dict) -> None:
        self.plan = KeyPlan.of(message)
        self.shape = tuple(message["shape"])
        self.catches_up: bool = message["catches_up"]
        self.successor: Optional[dict] = None  # a `repartitioned` message that came before the declaration
        self.is_applied = False  # the core has the plan

    def fits(self, key: Key) -> bool:
        plan = self.plan
        agreed = (self.shape, plan.dtype, plan.row_elements > 0, plan.parts > 0, plan.axes)
        return agreed == (key.shape, key.dtype, key.sparse, key.factors is not None, key.axes)


def checked(
    label: str, store: int, name: Name, shape: Sequence[int], dtype: Any, sparse: bool, staleness: Union[int, float],
    options: Optional[Mapping[str, Any]] = None,
) -> Key:  # fmt: skip
    """The Key, still without a handle. `label`: of the worker. ValueError if there cannot be such a key."""
    name = name if isinstance(name, str) else operator.index(name)
    shape = tuple(operator.index(length) for length in shape)
    if any(length < 0 for length in shape):
        raise ValueError("%s: key %r: shape %s has a negative length" % (label, name, shape))
    if sparse and (not shape or 0 in shape[1:]):
        raise ValueError("%s: key %r: shape %s has no rows to be sparse in" % (label, name, shape))
    axes = Axes(staleness=key_plan.staleness(staleness))  # the rest follows from its options and its store's
    try:
        own = _own_options({} if options is None else options)
    except ValueError as error:
        raise ValueError("%s: key %r: %s" % (label, name, error)) from None
    return Key(store, name, shape, _dtype_name(dtype), -1, sparse, axes=axes, options=own)


def _own_options(options: Any) -> Dict[str, Dict[str, Any]]:
    """A copy, once they are found to make sense; None as a value: none."""
    if not isinstance(options, Mapping):
        raise ValueError("options is %.100r; it must be a dict, by name, as {'compression': {'type': 'int8'}}"
                         % (options,))  # fmt: skip
    own = {option: {} if value is None else value for option, value in options.items()}
    validate_of_key(own)
    return {option: dict(value) for option, value in own.items()}


# Of bfloat16, which NumPy does not know, any of that size will do.
_TYPES = {name: np.dtype("int16" if name == "bfloat16" else name) for name in DTYPES}


def require_array(label: str, key: Key, what: str, array: Any, shape: Tuple[int, ...]) -> None:
    """ValueError unless it can be the key's: the core sees bytes, and would take others for numbers that they are not.
    One axis will do for all of `shape`."""
    given = array if isinstance(array, np.ndarray) else np.asarray(array)
    wanted = _TYPES[key.dtype]
    is_of_type = given.dtype is wanted or given.dtype == wanted
    if given.shape == shape and is_of_type:
        return
    if key.dtype == "bfloat16":
        is_of_type = given.itemsize == wanted.itemsize
    is_of_shape = given.ndim == 1 or _without_ones(given.shape) == _without_ones(shape)
    if not (is_of_type and is_of_shape and given.size == math.prod(shape)):
        raise ValueError("%s: key %r: the %s has shape %s and type %s; it must have %s and %s"
                         % (label, key.name, what, given.shape, given.dtype, shape, key.dtype))  # fmt: skip


def _without_ones(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def require_same(label: str, key: Key, declared: Key) -> None:
    """ValueError if a key is declared again as another one."""
    if declared.sparse != key.sparse:
        kinds = ("sparse", "dense") if key.sparse else ("dense", "sparse")
        raise ValueError("%s: key %r was declared %s; it cannot become %s" % (label, key.name, *kinds))
    if declared.staleness != key.staleness:
        raise ValueError("%s: key %r was declared with another staleness; that cannot change" % (label, key.name))
    if declared.options != key.options:
        raise ValueError("%s: key %r was declared with the options %s; they cannot become %s"
                         % (label, key.name, key.options, declared.options))  # fmt: skip
    if (declared.shape, declared.dtype, declared.factors) != (key.shape, key.dtype, key.factors):
        raise ValueError(
            "%s: key %r was declared with shape %s and type %s; it cannot become %s and %s"
            % (label, key.name, key.shape, key.dtype, declared.shape, declared.dtype)
        )


def _dtype_name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    if name not in DTYPES:
        raise ValueError("type %s cannot be synchronised; P3 knows %s" % (name, ", ".join(DTYPES)))
    return name
