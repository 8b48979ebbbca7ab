"""The goal line: no schedule makes an iteration of synchronous training shorter than this. docs/replay.md proves it.

    python -m p3.measure.replay.bound --model vgg19 --compute 4.0 --hosts 2 --rate 200

For each layer: when its gradient is ready, so are those of all later layers, but none of earlier ones; and until its
weight is used again, those of all earlier layers must have arrived as well. So the values of this layer and the earlier
ones, the *prefix*, cross the network between two moments between which little is computed:

    period >= transfer of the prefix + computation from the layer's forward step to its own backward step

With late gradients, which all become ready when the backward pass ends, that window is shorter: what is computed from
the layer's forward step to the end of the whole backward pass counts.

With clipping by the global norm no weight changes before the sums of all gradients are known. So until a worker uses
the first weight, all pushes must have reached their servers, also those of layers whose values are needed much later.
Now a window may begin with one layer's gradient, and end with the use of the same or an earlier one's weight:

    period >= transfer of the pushes of all layers up to the later one, and of the values of those up to the earlier one
              + computation from the earlier layer's forward step to the later one's backward step

That holds whatever the schedule: values may travel before the norm is known, or after. The norm itself is taken to need
no bytes, but where a push has crossed the network, the way back.

The heaviest-first model is held up by its first layer: its transfer hides behind nothing. Where the last layer is the
worst, the network is the limit; where no layer adds anything, the computation is.

Whether servers or workers update makes no difference: a sum is as long as a weight, and updates are taken to be free.
"""

import argparse
import itertools
import math
import sys
from collections import Counter
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from p3.measure import compressions
from p3.measure.arguments import slice_size
from p3.measure.compressions import Compression, in_place_of, of_broadcast, of_key, of_push
from p3.measure.replay import groups as trees
from p3.measure.replay import models
from p3.placement import FRAME_BYTES, PACKET_BYTES
from p3.plan.key_plan import SliceSize
from p3.plan.strategy import Cut, Strategy, Turns


class Overhead(NamedTuple):
    """What travels besides the values: by default P3's header, and Ethernet, IP and TCP with time stamps at MTU 1500.

    Acknowledgements, heartbeats and retransmissions are left out, as a lower bound may.
    """

    slice_bytes: int = FRAME_BYTES
    packet_bytes: int = PACKET_BYTES
    packet_payload_bytes: int = 1448

    def on_wire(self, payload_bytes: int) -> float:
        bytes_ = payload_bytes + self.slice_bytes
        return bytes_ * (1 + self.packet_bytes / self.packet_payload_bytes)


NO_OVERHEAD = Overhead(0, 0, 1)
FRAMES_ALONE = NO_OVERHEAD._replace(slice_bytes=Overhead().slice_bytes)  # what a store counts itself


class Cluster(NamedTuple):
    """Where workers and servers run (numbers of hosts), and each host's NIC in Mbit/s (10^6 bits)."""

    up_mbit: Sequence[float]
    down_mbit: Sequence[float]
    workers: Sequence[int]
    servers: Sequence[int]

    @property
    def hosts(self) -> range:
        return range(len(self.up_mbit))


def one_of_each(hosts: int, rate_mbit: float) -> Cluster:
    """One worker and one server on each host, and the same rate everywhere, up and down."""
    return Cluster([rate_mbit] * hosts, [rate_mbit] * hosts, list(range(hosts)), list(range(hosts)))


class Bound(NamedTuple):
    seconds: float
    compute_s: float
    reason: str

    def explain(self) -> str:
        return f"at least {self.seconds:.4f} s an iteration, of which {self.compute_s:.4f} s compute: {self.reason}"


def bound(
    model: models.Model,
    compute_s: float,
    cluster: Cluster,
    slice_elements: Union[int, str] = "auto",
    overhead: Overhead = Overhead(),
    delay_s: float = 0.0,
    release: str = "layer",
    compression: Optional[Compression] = None,
    clips: bool = False,
    strategy: Strategy = Strategy(),
    groups: Sequence[int] = (),
) -> Bound:
    """The least average time of an iteration that computes for `compute_s` on every worker. Raises ValueError.

    Slices go in turn to the servers in forward order, "auto" ones are as large as P3 makes them, and `strategy` goes
    before both, and has codecs for keys of which `compression` says nothing; `delay_s` is what a byte takes to the
    other host besides. `release`: one of models.RELEASES. With deep gradient compression, broadcasts are the smallest,
    as if all workers sent the same elements. `clips`: by the global norm of all gradients. `groups`: of hosts
    (groups.py), of which each has one worker; slices go whole from leader to leader.
    """
    slice_size = SliceSize(slice_elements, len(cluster.servers))
    trees.check(groups, len(cluster.hosts))
    _check(model, compute_s, cluster, slice_size, delay_s, release)
    best = Bound(compute_s, compute_s, "the computation is the limit; all communication can hide behind it")
    traffic, prefixes = _Traffic(cluster, groups), []
    for layer in model.layers:
        for tensor in layer.tensors:
            cut, its = strategy.of(tensor.name), of_key(strategy, tensor.name, compression)
            for shape in in_place_of(tensor.shape, its):
                sizes = _slices(math.prod(shape), cut.slice or slice_size.of(math.prod(shape)))
                on_wire = {
                    elements: [overhead.on_wire(of(shape, elements, its)) for of in (of_push, of_broadcast)]
                    for elements in set(sizes)
                }
                for elements in sizes:
                    traffic.add_slice(*on_wire[elements], cut)
        prefixes.append(traffic.prefix(delay_s))
    for window in _windows(model, compute_s, release, clips):
        pushed, cast = prefixes[window.gradient], prefixes[window.use]
        transfer = traffic.least(pushed, cast, delay_s)
        if window.computed_s + transfer.seconds > best.seconds:
            gradient, use = (model.layers[number].name for number in (window.gradient, window.use))
            best = Bound(
                window.computed_s + transfer.seconds,
                compute_s,
                f"{_between(gradient, use, pushed, cast)}, which takes {transfer.seconds:.4f} s ({transfer.reason}); "
                f"from that use to {'its next gradient' if gradient == use else f'the next gradient of {gradient!r}'} "
                f"a worker computes for {window.computed_s:.4f} s",
            )
    busiest = traffic.busiest()
    if busiest.seconds > best.seconds:
        best = Bound(busiest.seconds, compute_s, f"the network is the limit ({busiest.reason})")
    return best


class _Window(NamedTuple):
    """From the gradient of one layer to the next use of one, by number; in between this crosses the network."""

    gradient: int
    use: int
    computed_s: float  # from that use to the next gradient


def _windows(model: models.Model, compute_s: float, release: str, clips: bool) -> Iterator[_Window]:
    last = len(model.layers) - 1
    first_update = next((number for number, layer in enumerate(model.layers) if layer.tensors), last + 1)
    if release == "layer":
        backward = [0.0, *itertools.accumulate(layer.backward for layer in model.layers)]  # of the layers before each
    else:
        backward = [0.0] * len(model.layers)
    forward = [0.0, *itertools.accumulate(layer.forward for layer in model.layers)]
    for use in range(len(model.layers)):
        gradients = [use]
        if clips and use >= first_update:
            # Late gradients are all ready at one moment, and then the most traffic says most.
            gradients = list(range(use, last + 1)) if release == "layer" else [last]
        for gradient in gradients:
            yield _Window(gradient, use, compute_s - (forward[use] + backward[gradient]) * compute_s)


def _between(gradient: str, use: str, pushed: "_Prefix", cast: "_Prefix") -> str:
    megabytes = f"{cast.value_bytes / 1e6:.3g} MB"
    if gradient == use:
        return (
            f"between the gradient of {gradient!r} and its next use, {megabytes} (the layers up to it, with headers) "
            "must be pushed and broadcast"
        )
    return (
        f"between the gradient of {gradient!r} and the next use of {use!r}, for which the norm must be known, "
        f"{pushed.push_bytes / 1e6:.3g} MB (the layers up to the former, with headers) must be pushed, and {megabytes} "
        "(those up to the latter) broadcast"
    )


def card_bytes(
    model: models.Model,
    cluster: Cluster,
    slice_elements: Union[int, str] = "auto",
    overhead: Overhead = FRAMES_ALONE,
    compression: Optional[Compression] = None,
) -> float:
    """What each card sends in an iteration, in the mean over the hosts; it receives as much."""
    slice_size = SliceSize(slice_elements, len(cluster.servers))
    traffic = _Traffic(cluster)
    for shape in (shape for tensor in model.tensors for shape in in_place_of(tensor.shape, compression)):
        for elements in _slices(math.prod(shape), slice_size.of(math.prod(shape))):
            push = of_push(shape, elements, compression)
            cast = of_broadcast(shape, elements, compression, len(cluster.workers))
            traffic.add_slice(overhead.on_wire(push), overhead.on_wire(cast))
    return traffic.sent() / len(cluster.hosts)


class _Transfer(NamedTuple):
    seconds: float
    reason: str


_NOTHING = _Transfer(0.0, "nothing crosses the network")


class _Prefix(NamedTuple):
    """What the slices up to a layer take, by NIC: bytes of one worker's pushes up, of broadcasts to one worker down."""

    push_bytes: float  # of each worker
    value_bytes: float
    pushes: _Transfer
    casts: _Transfer
    push_up_of_one: Sequence[float]
    push_down: Sequence[float]
    cast_up: Sequence[float]
    cast_down_of_one: Sequence[float]


class _Hop(NamedTuple):
    """Of a slice on its way from a host to its server, and back."""

    adds: int  # the host that it goes to
    push_mbit: float
    cast_mbit: float


class _Traffic:
    """The bytes of all slices added so far, by NIC and direction."""

    def __init__(self, cluster: Cluster, groups: Sequence[int] = ()) -> None:
        self._cluster = cluster
        self._groups = groups
        self._ways_to: Dict[int, List[Tuple[int, List[_Hop]]]] = {}  # a server's host
        self._workers_on = [list(cluster.workers).count(host) for host in cluster.hosts]
        self._turns = Turns(len(cluster.servers))
        # Slices not counted yet, by the host of their server and the bytes each way: many are alike.
        self._added: Counter = Counter()
        self._push_bytes = self._value_bytes = 0.0
        self._push_up, self._push_down, self._cast_up, self._cast_down = ([0.0] * len(cluster.hosts) for _ in range(4))
        self._one_way = self._round_trip = _NOTHING

    def add_slice(self, push_bytes: float, cast_bytes: float, cut: Cut = Cut()) -> None:
        """The next slice of a key that is cut so: from every worker to its server, and back. What stays on a host
        crosses no NIC."""
        self._added[self._cluster.servers[self._turns.next(cut)], push_bytes, cast_bytes] += 1

    def _count(self) -> None:
        """All that have been added."""
        for (home, push_bytes, cast_bytes), count in self._added.items():
            self._push_bytes += count * push_bytes
            self._value_bytes += count * cast_bytes
            for host, hops in self._ways(home):
                pushes, adds = count * self._workers_on[host], hops[0].adds
                self._push_up[host] += pushes * push_bytes
                self._push_down[adds] += pushes * push_bytes
                self._cast_up[adds] += pushes * cast_bytes
                self._cast_down[host] += pushes * cast_bytes
                there = back = 0.0
                for hop in hops:
                    there += _seconds(push_bytes, hop.push_mbit)
                    back += _seconds(cast_bytes, hop.cast_mbit)
                whole = f"a slice goes whole from host {host} to {home}"
                if there > self._one_way.seconds:
                    self._one_way = _Transfer(there, f"{whole}, and the norm back")
                if there + back > self._round_trip.seconds:
                    self._round_trip = _Transfer(there + back, f"{whole} and back")
        self._added.clear()

    def _ways(self, home: int) -> List[Tuple[int, List[_Hop]]]:
        """From each other host with workers to a server on host `home`."""
        if home not in self._ways_to:
            leaders = trees.leaders(self._groups, len(self._cluster.hosts), home)
            self._ways_to[home] = [
                (host, self._hops(leaders, host, home))
                for host in self._cluster.hosts if host != home and self._workers_on[host]
            ]  # fmt: skip
        return self._ways_to[home]

    def _hops(self, leaders: List[int], host: int, home: int) -> List[_Hop]:
        """By way of the leaders, each of which has all of a slice before it passes any on."""
        cluster, hops = self._cluster, []
        while host != home:
            adds = home if leaders[host] == trees.SERVER else leaders[host]
            hops.append(_Hop(adds, min(cluster.up_mbit[host], cluster.down_mbit[adds]),
                             min(cluster.up_mbit[adds], cluster.down_mbit[host])))  # fmt: skip
            host = adds
        return hops

    def sent(self) -> float:
        """By all hosts."""
        self._count()
        return sum(self._push_up) + sum(self._cast_up)

    def prefix(self, delay_s: float) -> _Prefix:
        """Of the slices so far. Both transfers are what the busiest NIC takes, or a single slice."""
        self._count()
        cluster = self._cluster
        push_up_of_one = [bytes_ / max(1, count) for bytes_, count in zip(self._push_up, self._workers_on)]
        cast_down_of_one = [bytes_ / max(1, count) for bytes_, count in zip(self._cast_down, self._workers_on)]
        pushes = [self._one_way._replace(seconds=self._one_way.seconds + 2 * delay_s)]
        casts = [self._round_trip._replace(seconds=self._round_trip.seconds + 2 * delay_s)]
        for host in cluster.hosts:
            up, down = cluster.up_mbit[host], cluster.down_mbit[host]
            pushes += [
                _Transfer(_seconds(push_up_of_one[host], up) + delay_s, f"pushes of a worker of host {host}"),
                _Transfer(_seconds(self._push_down[host], down) + delay_s, f"pushes to host {host}"),
            ]
            casts += [
                _Transfer(_seconds(self._cast_up[host], up) + delay_s, f"broadcasts from host {host}"),
                _Transfer(_seconds(self._cast_down[host], down) + delay_s, f"broadcasts to host {host}"),
            ]
        crosses = any(self._push_up)
        return _Prefix(
            self._push_bytes, self._value_bytes,
            _longest(pushes) if crosses else _NOTHING, _longest(casts) if crosses else _NOTHING,
            push_up_of_one, list(self._push_down), list(self._cast_up), cast_down_of_one,
        )  # fmt: skip

    def least(self, pushed: _Prefix, cast: _Prefix, delay_s: float) -> _Transfer:
        """No less from the moment when the first gradient of `pushed` is ready until all values of `cast`, no more than
        those, are used, if by then all of the pushes must be there."""
        if not any(pushed.push_up_of_one):
            return _NOTHING
        cluster = self._cluster
        with_workers = [host for host in cluster.hosts if self._workers_on[host]]
        # Whoever is last: his own pushes, and all broadcasts, begin when he is ready.
        sent = min(
            (_seconds(pushed.push_up_of_one[host] + cast.cast_up[host], cluster.up_mbit[host]), host)
            for host in with_workers
        )
        # Whoever is first: nothing of this arrives before he is ready, and all pushes must before his next use.
        received = min(
            (_seconds(pushed.push_down[host] + cast.cast_down_of_one[host], cluster.down_mbit[host]), host)
            for host in with_workers
        )
        return _longest([
            pushed.pushes, cast.casts,
            _Transfer(sent[0] + delay_s, f"all that host {sent[1]} sends"),
            _Transfer(received[0] + delay_s, f"all that host {received[1]} receives"),
        ])  # fmt: skip

    def busiest(self) -> _Transfer:
        """The NIC that needs longest for all slices of an iteration."""
        self._count()
        cluster = self._cluster
        busy = [
            _Transfer(_seconds(one + other, rates[host]), f"host {host}'s NIC, {direction}")
            for direction, rates, pushes, casts in (
                ("up", cluster.up_mbit, self._push_up, self._cast_up),
                ("down", cluster.down_mbit, self._push_down, self._cast_down),
            )
            for host, (one, other) in enumerate(zip(pushes, casts))
        ]
        return max(busy, key=lambda one: one.seconds)


def _longest(transfers: List[_Transfer]) -> _Transfer:
    """The last of equals, which says most: it counts both kinds of traffic."""
    return max(reversed(transfers), key=lambda one: one.seconds)


def _seconds(bytes_: float, mbit: float) -> float:
    return bytes_ * 8 / (mbit * 1e6)


def _slices(elements: int, slice_elements: int) -> List[int]:
    whole, rest = divmod(elements, slice_elements)
    return [slice_elements] * whole + ([rest] if rest else [])


def _check(model, compute_s, cluster, slice_size, delay_s, release):
    if not model.layers:
        raise ValueError(f"model {model.name!r} has no layers")
    if not 0 <= compute_s < float("inf"):
        raise ValueError(f"compute_s is {compute_s}; it must be seconds, 0 or more")
    if not 0 <= delay_s < float("inf"):
        raise ValueError(f"delay_s is {delay_s}; it must be seconds, 0 or more")
    if release not in models.RELEASES:
        raise ValueError(f"release is {release!r}; it must be one of {', '.join(models.RELEASES)}")
    if slice_size.most < 1:
        raise ValueError(f"slice_elements is {slice_size.setting}; a slice has at least one element")
    if len(cluster.up_mbit) != len(cluster.down_mbit) or not cluster.up_mbit:
        raise ValueError(f"{len(cluster.up_mbit)} rates up and {len(cluster.down_mbit)} down; a host needs one of each")
    if not all(rate > 0 for rate in (*cluster.up_mbit, *cluster.down_mbit)):
        raise ValueError("rates must be positive, in Mbit/s")
    for role, places in (("worker", cluster.workers), ("server", cluster.servers)):
        if not places or not all(host in cluster.hosts for host in places):
            raise ValueError(f"{role}s on hosts {list(places)}; at least one, on hosts 0 to {len(cluster.hosts) - 1}")


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m p3.measure.replay.bound", description="Bounds iteration time.")
    parser.add_argument("--model", required=True, choices=models.NAMES)
    parser.add_argument("--size", type=float, help="fraction of the model's parameters (default: the lab's)")
    parser.add_argument("--compute", type=float, required=True, metavar="SECONDS", help="of forward and backward pass")
    parser.add_argument("--hosts", type=int, default=2, help="each with one worker and one server (default 2)")
    parser.add_argument("--rate", type=float, required=True, metavar="MBIT", help="of each NIC, each way, in Mbit/s")
    parser.add_argument("--slice-elements", type=slice_size, default="auto", metavar="N")
    parser.add_argument("--release", choices=models.RELEASES, default="layer",
                        help="of gradients: each layer's in its turn, or all at the end (default layer)")
    parser.add_argument("--compression", type=compressions.parse, metavar="CODEC",
                        help="both ways, as int8; or as int8-bf16, up and down, or int8-exact (default: exact)")
    parser.add_argument("--clip", action="store_true", help="by the global norm of all gradients")
    parser.add_argument("--payload-only", action="store_true", help="count no headers")
    options = parser.parse_args(argv)
    overhead = NO_OVERHEAD if options.payload_only else Overhead()
    try:
        model = models.load(options.model, options.size)
        cluster = one_of_each(options.hosts, options.rate)
        result = bound(model, options.compute, cluster, options.slice_elements, overhead, release=options.release,
                       compression=options.compression, clips=options.clip)
    except ValueError as error:
        parser.error(str(error))
    print(f"{model.name}, {model.bytes / 1e6:.1f} MB, emulated computation: {result.explain()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
