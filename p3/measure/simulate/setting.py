"""What is simulated: a model, the hosts, the network, and how P3 sends. Plain values; predict.py runs them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import islice
from typing import List, Mapping, Optional, Tuple, Union

from p3.plan import key_plan
from p3.plan.factor_shape import FactorShape, key_of
from p3.plan.strategy import FACTORS, Cut, Strategy, Turns
from p3.measure import compressions
from p3.measure.compressions import Compression
from p3.measure.lab.shaping import BURST_BYTES, QUEUE_MS
from p3.measure.replay import gpu_clock, models
from p3.measure.replay import groups as trees
from p3.measure.replay.bound import Cluster, Overhead

# "layers": the usual way of a parameter server, over the same servers: whole layers, first come, first served.
SCHEMES = ("p3", "layers", "ddp")
CONGESTION = ("none", "cubic", "bbr")
# By the global norm: not; by the servers' parts of the norm; or after a wait for all values (simulator/job.h).
CLIPPING = ("none", "norm", "wait")

# As dist_sync has it: a larger tensor is cut once, evenly between the servers; any other is on one of them.
_BIG_ELEMENTS = 1_000_000

# The same as the replay's: the most urgent slices are those that the forward pass uses first.
_OVERHEAD = Overhead()
_NORM_BYTES = 16  # a server's part of it
_OF_ALL = -1  # in the place of the worker whose part a slice is (simulator/job.h)
_MBIT = 1e6 / 8


@dataclass(frozen=True)
class Network:
    """The links of the lab (p3/measure/lab/network.py), and TCP over them. Of each host, each way, in Mbit/s."""

    up_mbit: Tuple[float, ...]
    down_mbit: Tuple[float, ...]
    delay_ms: float = 0.05  # one way, of an idle lab
    loss: float = 0.0  # share of the packets
    burst_kib: float = BURST_BYTES / 1024
    queue_ms: float = QUEUE_MS  # besides the burst
    lossless: bool = False  # queues of any length
    congestion: str = "cubic"
    ack_bytes: float = float(_OVERHEAD.packet_bytes)
    segment_kib: float = 8.0  # that links pass as one, at most; finer ones are not needed

    @property
    def hosts(self) -> int:
        return len(self.up_mbit)


def links(hosts: int, *rates_mbit: float, **more) -> Network:
    """One rate for all, or one for each host; both ways."""
    rates = tuple(rates_mbit) * hosts if len(rates_mbit) == 1 else tuple(rates_mbit)
    if len(rates) != hosts:
        raise ValueError(f"{len(rates)} rates for {hosts} hosts: give one, or one for each")
    return Network(rates, rates, **more)


@dataclass(frozen=True)
class Setting:
    """One job. `servers` None: one on each host; they and the workers stand on the hosts in turn, or as they are
    `placed`. `slice_elements`: as P3_SLICE_ELEMENTS."""

    model: models.Model
    compute_s: float
    network: Network
    scheme: str = "p3"
    priorities: bool = True  # of P3: no, and frames leave in the order they came
    pushes_first: Optional[bool] = None  # a host's values yield to its pushes of the same round; None: as P3 does it
    window_kib: float = 0.0  # that a connection may have under way; 0: as P3 chooses
    workers_per_host: int = 1
    servers: Optional[int] = None
    placed: Optional[Tuple[Tuple[int, ...], Tuple[int, ...]]] = None  # the hosts of all workers, and of all servers
    slice_elements: Union[int, str] = "auto"
    strategy: Strategy = Strategy()  # of P3, by the names of the model's tensors; its slices go before slice_elements
    local_aggregation: bool = True
    groups: Tuple[int, ...] = ()  # of hosts with shared leaders, as replay/groups.py has them
    sparse: Mapping[str, float] = dataclasses.field(default_factory=dict)  # layer -> share of it that a step touches
    batch: Optional[int] = None  # rows of a worker's, of which weights with the strategy's route "factors" have so many
    compression: Optional[Compression] = None  # of P3, where the strategy has none; or of DDP's hook that halves bytes
    clip: str = "none"  # of CLIPPING
    release: str = "layer"  # of gradients: each layer's when its backward step ends, or all at the "end" of the pass
    jitter: float = 0.0
    seed: int = 1
    stragglers: Mapping[int, float] = dataclasses.field(default_factory=dict)  # worker -> factor of its computation
    bucket_mb: float = 25.0  # of scheme ddp
    iterations: int = 5
    warmup: int = 2
    traced_iterations: int = 0
    traces_links: bool = False  # what passes the links in these iterations, too

    @property
    def yields(self) -> bool:
        """Whether a host's values wait for its pushes: P3's do where the servers tell the norm of what is pushed."""
        return self.clip == "norm" if self.pushes_first is None else self.pushes_first

    @property
    def workers(self) -> List[int]:
        """The host of each."""
        if self.placed is not None:
            return list(self.placed[0])
        return [number % self.network.hosts for number in range(self.network.hosts * self.workers_per_host)]

    @property
    def server_hosts(self) -> List[int]:
        if self.placed is not None:
            return list(self.placed[1])
        count = self.network.hosts if self.servers is None else self.servers
        return [number % self.network.hosts for number in range(count)]

    @property
    def slice_size(self) -> key_plan.SliceSize:
        return key_plan.SliceSize(self.slice_elements, len(self.server_hosts))

    def factors_of(self, tensor: models.Tensor) -> Optional[FactorShape]:
        """Of one worker, where that weight has an entry with this route."""
        return FactorShape(self.batch, *tensor.shape) if self.strategy.sends_factors(tensor.name) else None

    @property
    def has_factors(self) -> bool:
        return any(self.factors_of(tensor) for layer in self.model.layers for tensor in layer.tensors)

    def compression_of(self, tensor: str) -> Optional[Compression]:
        return compressions.of_key(self.strategy, tensor, self.compression)

    @property
    def adds_up(self) -> bool:
        """Whether the workers of a host push as one."""
        return self.local_aggregation and compressions.adds_up_on_machine(self.compression)

    @property
    def bucket_bytes(self) -> float:
        """What travels of one of DDP's."""
        return self.bucket_mb * (1 << 20) * self.sent_share

    @property
    def sent_share(self) -> float:
        """Of DDP's gradients."""
        return 1.0 if self.compression is None else 0.5

    def cluster(self) -> Cluster:
        """For the bound."""
        workers = sorted(set(self.workers)) if self.adds_up else self.workers
        return Cluster(self.network.up_mbit, self.network.down_mbit, workers, self.server_hosts)


def job(setting: Setting) -> dict:
    """As _simulator.pyx takes it. Raises ValueError for what makes no sense."""
    _check(setting)
    network = setting.network
    return {
        "hosts": [(_link(network, up), _link(network, down)) for up, down in zip(network.up_mbit, network.down_mbit)],
        "workers": setting.workers,
        "servers": setting.server_hosts,
        "local_aggregation": setting.adds_up,
        "leaders": _leaders(setting),
        "layers": [
            {"forward_s": layer.forward * setting.compute_s, "backward_s": layer.backward * setting.compute_s}
            for layer in setting.model.layers
        ],
        "releases_at_end": setting.release == "end",
        "slices": _slices(setting),
        "clipping": setting.clip,
        "norm_bytes": _NORM_BYTES + _OVERHEAD.slice_bytes,
        "factors": [_factors(setting, worker) for worker in range(len(setting.workers))],
        "warmup": setting.warmup,
        "traced_iterations": setting.traced_iterations,
        "traces_links": setting.traces_links,
        "transport": {
            "segment_bytes": network.segment_kib * 1024,
            "packet_payload_bytes": _OVERHEAD.packet_payload_bytes,
            "packet_header_bytes": _OVERHEAD.packet_bytes,
            "delay_s": network.delay_ms / 1e3,
            "ack_bytes": network.ack_bytes,
            "congestion": network.congestion,
            "loss": network.loss,
            "seed": setting.seed,
        },
        "priorities": setting.priorities and setting.scheme != "layers",
        "pushes_first": setting.yields and setting.scheme != "layers",
        "window_bytes": setting.window_kib * 1024,
    }


def _leaders(setting: Setting) -> List[List[int]]:
    """Of each server, those of all hosts; none where all push to the servers."""
    if not setting.groups:
        return []
    hosts = setting.network.hosts
    by_home = {home: trees.leaders(setting.groups, hosts, home) for home in set(setting.server_hosts)}
    return [by_home[home] for home in setting.server_hosts]


def _link(network: Network, rate_mbit: float) -> Tuple[float, float, float]:
    """Rate, burst and queue."""
    burst = network.burst_kib * 1024
    queue = 0.0 if network.lossless else burst + rate_mbit * _MBIT * network.queue_ms / 1e3
    return rate_mbit * _MBIT, burst, queue


def _slices(setting: Setting) -> List[dict]:
    """In turn to the servers, in forward order. Of a sparse layer the rows that a step touches."""
    made: List[dict] = []
    servers, workers, key = len(setting.server_hosts), len(setting.workers), 0

    turns = Turns(servers)

    def add(layer: int, cut: Cut, push_bytes: float, value_bytes: float, part_of: int = _OF_ALL) -> None:
        made.append({
            "layer": layer, "key": key, "server": turns.next(cut), "part_of": part_of,
            "push_bytes": push_bytes + _OVERHEAD.slice_bytes, "value_bytes": value_bytes + _OVERHEAD.slice_bytes,
        })  # fmt: skip

    for number, layer in enumerate(setting.model.layers):
        alpha = setting.sparse.get(layer.name)
        for tensor in layer.tensors:
            cut, its = setting.strategy.of(tensor.name), setting.compression_of(tensor.name)
            factors = setting.factors_of(tensor)
            if factors is not None:
                cut = setting.strategy.of(key_of(tensor.name))
                most = key_plan.even_slices(factors.elements, setting.slice_size.of(factors.elements))
                for worker in range(workers):
                    for begin in range(0, factors.elements, most):
                        part_bytes = min(most, factors.elements - begin) * models.FLOAT32_BYTES
                        add(number, cut, part_bytes, part_bytes, worker)
            elif alpha is None:
                for shape in compressions.in_place_of(tensor.shape, its):
                    elements = math.prod(shape)
                    most = _elements_of_a_part(setting, tensor.name, elements)
                    for begin in range(0, elements, most):
                        add(number, cut, *_bytes_of(setting, its, shape, min(most, elements - begin)))
            else:
                # A partition for each turn of the servers, if not told. Rows of several workers overlap by chance.
                union, parts = 1 - (1 - alpha) ** workers, cut.partitions or len(turns.servers(cut))
                for _ in range(parts):
                    add(number, cut, alpha * tensor.bytes / parts, union * tensor.bytes / parts)
            key += 1
    return made


def _bytes_of(
    setting: Setting, compression: Optional[Compression], shape: Tuple[int, ...], elements: int
) -> Tuple[float, float]:
    """Of a slice that is pushed, and comes back."""
    if setting.scheme == "ddp":
        size = elements * models.FLOAT32_BYTES * setting.sent_share
        return size, size
    push = compressions.of_push(shape, elements, compression)
    return push, compressions.of_broadcast(shape, elements, compression, len(setting.workers))


def can_compress(scheme: str, compression: Optional[Compression]) -> bool:
    """Whether a scheme is known with that."""
    if scheme == "ddp":
        return compression is None or compression.halves_all
    return compression is None or (scheme == "p3" and compression.is_of_codecs)


def _elements_of_a_part(setting: Setting, name: str, elements: int) -> int:
    if setting.scheme != "layers":
        return setting.strategy.of(name).slice or setting.slice_size.of(elements)
    parts = len(setting.server_hosts) if elements >= _BIG_ELEMENTS else 1
    return -(-elements // parts)


def _factors(setting: Setting, worker: int) -> List[float]:
    """Those of the replay, so that a simulated job has the lab's jitter."""
    slower, iterations = setting.stragglers.get(worker, 1.0), setting.warmup + setting.iterations
    return [slower * one for one in islice(gpu_clock.factors(setting.jitter, setting.seed, worker), iterations)]


def _check(setting: Setting) -> None:
    """What the C++ part cannot know; it checks the rest."""
    network = setting.network
    if setting.scheme not in SCHEMES:
        raise ValueError(f"no scheme is called {setting.scheme!r}; there are {', '.join(SCHEMES)}")
    if setting.release not in models.RELEASES:
        raise ValueError(f"release is {setting.release!r}; it must be one of {', '.join(models.RELEASES)}")
    if not can_compress(setting.scheme, setting.compression):
        raise ValueError(f"scheme {setting.scheme!r} is not known with compression {setting.compression}: "
                         "P3's codecs are p3's, fp16 and bf16 both ways also ddp's")
    if setting.clip not in CLIPPING:
        raise ValueError(f"clip is {setting.clip!r}; it must be one of {', '.join(CLIPPING)}")
    if setting.clip == "norm" and setting.compression is not None and not setting.compression.has_norm:
        raise ValueError(f"with {setting.compression} the servers cannot tell the norm of gradients: 'wait' for them")
    if network.congestion not in CONGESTION:
        raise ValueError(f"no congestion control is called {network.congestion!r}: {', '.join(CONGESTION)}")
    if len(network.up_mbit) != len(network.down_mbit) or not network.up_mbit:
        raise ValueError(f"{len(network.up_mbit)} rates up and {len(network.down_mbit)} down; a host needs one of each")
    _check_strategy(setting)
    if setting.slice_size.most < 1:
        raise ValueError(f"slice_elements is {setting.slice_elements}; a slice has at least one element")
    layers = [layer.name for layer in setting.model.layers]
    for name, alpha in setting.sparse.items():
        if name not in layers:
            raise ValueError(f"{setting.model.name} has no layer {name!r}; its layers are {', '.join(layers)}")
        if not 0 < alpha <= 1:
            raise ValueError(f"a step touches {alpha} of {name!r}; that must be a share above 0, at most 1")
    if setting.groups:
        trees.check(setting.groups, network.hosts)
        if why_not := why_no_groups(setting):
            raise ValueError(why_not)
    for worker in setting.stragglers:
        if not 0 <= worker < len(setting.workers):
            raise ValueError(f"worker {worker} is a straggler, but the workers are 0 to {len(setting.workers) - 1}")


def _check_strategy(setting: Setting) -> None:
    if setting.strategy == Strategy():
        return
    if setting.scheme != "p3":
        raise ValueError(f"scheme {setting.scheme!r} knows no strategies: they are of p3")
    setting.strategy.require_servers(len(setting.server_hosts))
    if setting.strategy.default.route == FACTORS:
        raise ValueError("the strategy has the route 'factors' for all keys: name the weights of fully connected "
                         "layers in 'keys'")
    for layer in setting.model.layers:
        for tensor in layer.tensors:
            why_not = setting.strategy.why_not(tensor.name, sparse=layer.name in setting.sparse)
            why_not = why_not or _why_no_factors(setting, tensor)
            if why_not:
                raise ValueError(why_not)
            if setting.factors_of(tensor) is None:  # those travel as they are
                _check_codec(setting, tensor.name)


def _why_no_factors(setting: Setting, tensor: models.Tensor) -> str:
    """"": it has some, or its route is another one."""
    if not setting.strategy.sends_factors(tensor.name):
        return ""
    if len(tensor.shape) != 2:
        return f"{tensor.name!r} is no weight of a fully connected layer, of outputs x inputs, and has no factors"
    if setting.batch is None:
        return f"{tensor.name!r} has the route 'factors', of as many rows as a worker's batch: say how many"
    if not setting.factors_of(tensor).fits_gradient:
        return f"{tensor.name!r} has factors that are larger than its gradient, with batches of {setting.batch} rows"
    if setting.clip == "norm":
        return f"{tensor.name!r} has factors, of which the servers cannot tell the norm: 'wait' for them"
    return ""


def _check_codec(setting: Setting, name: str) -> None:
    its = setting.compression_of(name)
    if setting.clip == "norm" and its is not None and not its.has_norm:
        raise ValueError(f"{name!r} has {its}, with which the servers cannot tell the norm of gradients: 'wait' for it")
    has_several = setting.local_aggregation and len(set(setting.workers)) < len(setting.workers)
    if has_several and compressions.adds_up_on_machine(its) != setting.adds_up:
        raise ValueError(f"{name!r} has {its}, which the workers of a host do not add up as they do the other keys: "
                         "give all keys such a codec, or each host one worker")
    if setting.groups and its is not None:
        raise ValueError(f"{name!r} has {its}, and groups of {trees.told(setting.groups)} are not simulated with that")


def why_no_groups(setting: Setting) -> str:
    """"": they are simulated with all else."""
    machines = sorted(set(setting.workers) if setting.adds_up else setting.workers)
    for is_asked, what in (
        (setting.scheme != "p3", f"scheme {setting.scheme!r}"),
        (setting.compression is not None, f"compression {setting.compression}"),
        (bool(setting.sparse), "sparse layers"),
        (machines != list(range(setting.network.hosts)), "hosts that push several times, or never"),
    ):
        if is_asked:
            return f"groups of {trees.told(setting.groups)} are not simulated with {what}"
    return ""
