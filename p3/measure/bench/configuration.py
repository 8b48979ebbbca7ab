"""What is the same for all stores that are compared, and how each of their runs is made."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple, Union

from p3.measure.bench.paths import ALL, Path
from p3.measure.lab.shaping import Shaping
from p3.measure.trainings import mxnet_convnet


class Configuration(NamedTuple):
    experiment: str
    model: str
    size: float
    compute_s: Optional[float]  # emulated; or of a real iteration, None where that was not measured
    rate_mbit: Optional[float]
    delay_ms: float
    hosts: int
    slice_elements: Union[int, str]  # as P3_SLICE_ELEMENTS
    label: str = ""  # what sets it apart, in words, besides the model
    goal_loss: Optional[float] = None  # that a training shall reach
    rates_mbit: Optional[Tuple[float, ...]] = None  # of each host, where they differ; then rate_mbit is the greatest
    path_name: Optional[str] = None  # of ALL in paths.py
    release: str = "layer"  # when gradients become ready: of models.RELEASES
    batch: Optional[int] = None  # of real fully connected layers
    computation: str = "emulated"  # or real
    clip: Optional[float] = None  # the global norm to which gradients are clipped
    compute_share: Optional[float] = None  # compute_s, of what the bound's communication takes; None: not chosen so
    strategy: Optional[str] = None  # how it was made: "none", or of p3/measure/planning; None: not asked
    strategy_text: str = ""  # of its file; "": there is none
    predicted_s: Optional[float] = None  # by the simulator
    from_mbit: Optional[float] = None  # the links' rate until it changes to rate_mbit; None: it does not change
    packet_loss: float = 0.0  # share of the packets
    shaper: Optional[str] = None  # and congestion control, of the lab's; None: the path's
    congestion: Optional[str] = None
    device: str = "cpu"  # that computes for real, as torch calls it; hosts of a lab share it
    batch_size: Optional[int] = None  # samples of each worker's; None: the training's own

    @property
    def path(self) -> Path:
        return Path() if self.path_name is None else ALL[self.path_name]

    @property
    def shaping(self) -> Shaping:
        chosen = {"shaper": self.shaper, "congestion": self.congestion}
        return self.path.shaping._replace(**{name: value for name, value in chosen.items() if value is not None})

    @property
    def workers(self) -> int:
        return self.hosts * self.path.workers_per_host

    @property
    def is_emulated(self) -> bool:
        return self.computation == "emulated"

    @property
    def title(self) -> str:
        return f"{self.model} {self.label}".strip()

    def identity(self) -> Dict:
        """Fields of its records. What older records lack is left out where it is as it was then."""
        fields = {
            "experiment": self.experiment,
            "model": self.model,
            "size": self.size,
            "computation": self.computation,
            "compute_s": self.compute_s,
            "rate_mbit": self.rate_mbit,
            "rates_mbit": self.rates_mbit and list(self.rates_mbit),
            "delay_ms": self.delay_ms,
            "hosts": self.hosts,
            "workers": self.workers,
            "servers": self.hosts,
            "slice_elements": self.slice_elements,
            "label": self.label,
        }
        later = {"goal_loss": self.goal_loss, "path": self.path_name, "batch": self.batch, "clip": self.clip,
                 "compute_share": self.compute_share, "strategy": self.strategy,
                 "strategy_text": self.strategy_text or None, "predicted_s": self.predicted_s,
                 "from_mbit": self.from_mbit, "packet_loss": self.packet_loss or None, "shaper": self.shaper,
                 "congestion": self.congestion, "device": None if self.device == "cpu" else self.device,
                 "batch_size": self.batch_size,
                 "release": None if self.release == "layer" else self.release}  # fmt: skip
        return {**fields, **{name: value for name, value in later.items() if value is not None}}


class Course(NamedTuple):
    """How each run is made."""

    iterations: int
    warmup: int
    jitter: float
    optimizer: str
    omp_threads: int
    timeout_s: Optional[float]
    # Of real trainings.
    pause_s: float = 0.0  # of a worker in each step, in the mean
    learning_rate: float = mxnet_convnet.LEARNING_RATE
    momentum: float = mxnet_convnet.MOMENTUM


def rate_text(rate_mbit: Optional[float]) -> str:
    return "no limit" if rate_mbit is None else f"{rate_mbit:g} Mbit/s"
