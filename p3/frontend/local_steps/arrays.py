"""Local steps for scripts that hold their weights as NumPy arrays, or as others that NumPy can read, as JAX's.

    steps = p3.LocalSteps(session, first, every=30, fragments=6, delay=2, codec="int4")  # first: {name: array}
    arrays = steps.arrays                    # rank 0's first ones, on all workers
    for x, y in batches:                     # as many on each worker
        arrays = inner_step(arrays, x, y)    # the script's own
        arrays = steps.step(arrays)
    arrays = steps.take_global()             # all workers have the same
"""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from p3.frontend.local_steps.options import Options
from p3.frontend.local_steps.trainer import LocalTrainer
from p3.frontend.local_steps.value import merged
from p3.plan import choices
from p3.plan.strategy import Given
from p3.settings import Settings
from p3.worker.session import Session

Arrays = Dict[str, Any]

# Of a global value, by that of the weight: a step may be less than a weight of half precision can show.
_GLOBAL_TYPES = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


class LocalSteps(LocalTrainer):
    """Of weights by their names. What they are exchanged for are new NumPy arrays, which the script owns, of the
    weight's shape and type; the others it gets back as it gave them. No array of the script is written to, or read
    behind a call, but for a snapshot's.

    Threads: the script's, one at a time. Errors: those of Session; ValueError for arrays that do not fit.
    """

    kind = "p3.LocalSteps"  # what a snapshot has of it suits no other kind

    def __init__(
        self, session: Session, arrays: Mapping[str, Any], *, every: int, fragments: int = 1, delay: int = 0,
        alpha: Optional[float] = None, codec: Any = None, outer: Optional[Mapping[str, Any]] = None,
        strided: bool = False, strategy: Given = None, quorum: Optional[int] = None, grace: Optional[float] = None,
        **others: Any,
    ) -> None:  # fmt: skip
        """On every worker at the same point, before its first step. Returns when all have rank 0's `arrays`, or if the
        job has resumed (snapshots.resume) each its own: see `arrays`.

        Names, shapes and types are the same on every worker; types: float32, float64, float16, bfloat16. Names that
        are alike up to their last dot, as "encoder.0.bias", are of one layer. The options are those of
        p3.torch.LocalSteps (docs/local-steps.md), and the same on every worker: ValueError where they are not.
        """
        options = Options.checked(every, fragments, delay, alpha, codec, outer, strided, strategy, quorum, grace)
        settings = Settings.from_env(os.environ)
        options.require_together(settings, others, {"staleness": choices.STALE})
        self._arrays = dict(arrays)
        self._kinds = {name: _kind(one) for name, one in arrays.items()}
        self._shared = [name for name, (shape, _) in self._kinds.items() if 0 not in shape]
        super().__init__(session, self._shared, options, settings)
        resumed = self.begin()
        if resumed is not None:
            with self.beginning():
                for name in self._shared:
                    self._take(name, resumed["weights"][name])

    @property
    def arrays(self) -> Arrays:
        """This worker's weights behind the last call."""
        return dict(self._arrays)

    def weigh(self, samples: Any) -> None:
        """The script's step under way trains on so many samples or tokens. This worker's differences weigh as much in
        the mean as all of them since the fragment's last exchange. Once before each step(), on every worker; see
        p3.torch.LocalSteps. Returns at once."""
        super().weigh(samples)

    def step(self, arrays: Mapping[str, Any]) -> Arrays:
        """Behind each step of the script's own, which has made these `arrays`; with what has come merged into them.
        Waits only for the values whose deadline this is."""
        self._give(arrays)
        self.after_step()
        return self.arrays

    def take_global(self) -> Arrays:
        """The global weights, which are this worker's from here on: on every worker, as at the end of a training. Waits
        for what is under way. What a worker has learned since a fragment's last exchange is not in them."""
        super().take_global()
        return self.arrays

    def global_weights(self) -> Arrays:
        """A copy of the global weights, the same bits on all workers: to evaluate, or to save. Any worker may call it
        alone. Waits for what is under way."""
        values = self.values()
        return {name: self._copy(name, values[name]) if name in values else self._arrays[name] for name in self._arrays}

    def broadcast(self, arrays: Mapping[str, Any]) -> Arrays:
        """Rank 0's `arrays` become all workers' weights, and the global ones: on every worker at the same point, as
        behind the load of a pretrained model. Momentum stays."""
        self._give(arrays)
        super().broadcast()
        return self.arrays

    def state_dict(self) -> Dict[str, Any]:
        """The position in the schedule, global weights and outer momentum: numbers, strings and NumPy arrays, without
        the local weights. Any worker may call it alone. Waits for what is under way, and for the servers."""
        return self.outer_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what state_dict() gave, each worker its own: on every worker at the same point. The next step()
        brings the local weights that the script has saved. ValueError if it does not fit, and then on all workers."""
        self.load_outer_state(state)

    def own_state(self) -> Dict[str, Any]:
        return {**super().own_state(), "weights": {name: self.local(name) for name in self._shared}}

    # Local weights

    def shape_and_type(self, name: str) -> Tuple[Tuple[int, ...], str]:
        shape, dtype = self._kinds[name]
        if dtype.name not in _GLOBAL_TYPES:
            raise ValueError("LocalSteps: %s has the type %s; weights of %s can be trained so, so leave it out"
                             % (name, dtype.name, ", ".join(_GLOBAL_TYPES)))  # fmt: skip
        return shape, _GLOBAL_TYPES[dtype.name]

    def local(self, name: str) -> np.ndarray:
        return np.asarray(_read(self._arrays[name]), self.shape_and_type(name)[1], order="C")

    def rounded(self, name: str, value: np.ndarray) -> Optional[np.ndarray]:
        own, of_all = self._kinds[name][1].name, self.shape_and_type(name)[1]
        return None if own == of_all else np.asarray(self._copy(name, value), of_all)

    def merge(self, name: str, value: np.ndarray, alpha: float) -> None:
        if alpha < 1:
            self._take(name, value if alpha == 0 else merged(self.local(name), value, alpha))

    def _take(self, name: str, value: Any) -> None:
        self._arrays[name] = self._copy(name, value)

    def _copy(self, name: str, value: Any) -> np.ndarray:
        shape, dtype = self._kinds[name]
        return np.array(value, dtype).reshape(shape)

    def _give(self, arrays: Mapping[str, Any]) -> None:
        odd = sorted(arrays.keys() ^ self._kinds.keys())
        if odd:
            raise ValueError("LocalSteps: %s is in one only of what it was made of and what it is given: give it all "
                             "weights in each step" % odd[0])  # fmt: skip
        for name, kind in self._kinds.items():
            now = _kind(arrays[name])
            if now != kind:
                raise ValueError("LocalSteps: %s has the shape %s and the type %s, and had %s and %s when LocalSteps "
                                 "was made" % (name, *now, *kind))  # fmt: skip
        self._arrays = {name: arrays[name] for name in self._kinds}


def _kind(array: Any) -> Tuple[Tuple[int, ...], np.dtype]:
    """Shape and type. Does not wait until it is computed, if it has NumPy's type, as JAX's have."""
    known = array if isinstance(getattr(array, "dtype", None), np.dtype) else _read(array)
    return tuple(known.shape), known.dtype


def _read(array: Any) -> np.ndarray:
    """Without a copy, where it is in CPU memory. Waits until it is computed."""
    is_foreign = hasattr(array, "__dlpack__") and not hasattr(array, "__array__")
    return np.from_dlpack(array) if is_foreign else np.asarray(array)
