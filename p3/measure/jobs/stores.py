"""The stores that are compared: what a job of each is, and how tables and figures name and draw it.

What all of them have in common stands here once; nothing elsewhere lists them. Results are read without the core.

Stores of torch have one more for each compression (p3/measure/compressions.py), by a rule: p3_torch_int8,
p3_torch_int8-bf16, ddp_25_fp16. And there are ddp_N with buckets of any size, p3_local_N with any number of steps
between two exchanges, and p3_local_N:M with an outer momentum of M.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from p3 import codecs
from p3.errors import NotBuilt
from p3.measure import compressions
from p3.measure.compressions import EXACT, Compression
from p3.mxnet import hooks

# Of Okabe and Ito, told apart by people who see few colours; markers do so in print.
BLUE, ORANGE, PINK, GREEN, SKY, RED, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#D55E00", "#F0E442", "#999999"
)  # fmt: skip


OURS = "p3_sync"


class Store(NamedTuple):
    name: str  # in options and results
    kvstore: str  # what mx.kv.create is given; or of torch, as torch_store.py has it
    label: str = ""  # of figures
    group: str = ""  # of which experiments offer all or none
    environment: Mapping[str, str] = {}  # of all its processes
    compression: Optional[Compression] = None
    route: Optional[str] = None  # of real fully connected layers, as p3.factors has them
    look: Tuple[str, str] = (GREY, "v")  # colour and marker
    over: Sequence[str] = ()  # stores that tables compare it with
    simulated: Optional[Mapping[str, object]] = None  # what p3 simulate takes for it; None: it knows no such store
    may_hang_at_end: bool = False  # when all its workers have their results: that is no failure

    @property
    def is_p3(self) -> bool:
        return self.kvstore.startswith("p3_")

    @property
    def is_torch(self) -> bool:
        return self.kvstore.startswith(("p3_torch", "p3_local")) or self.is_workers_alone

    @property
    def trains_exactly(self) -> bool:
        """Whether its losses are those of one process on the joined batch, to rounding."""
        return self.compression is None and not self.may_be_apart and not self.is_local

    @property
    def may_be_apart(self) -> bool:
        """Whether its workers may be rounds apart, so that there is no n-th step of all."""
        return hooks.may_be_apart(self.kvstore) or self.kvstore.startswith("p3_torch:")

    @property
    def clips(self) -> bool:
        """Whether its workers can clip by the norm of what all send: those of torch, unless they may be apart."""
        return self.is_torch and not self.may_be_apart and self.kvstore != "alone"

    @property
    def is_workers_alone(self) -> bool:
        """Without servers and scheduler, found at MASTER_ADDR."""
        return self.is_ddp or self.kvstore == "alone"

    @property
    def is_ddp(self) -> bool:
        return self.kvstore.startswith("ddp:")

    @property
    def is_local(self) -> bool:
        """Whether its workers take local steps."""
        return self.kvstore.startswith("p3_local:")

    @property
    def every(self) -> int:
        """Steps between two exchanges of a weight."""
        return int(self._of_local_steps[0]) if self.is_local else 1

    @property
    def outer_momentum(self) -> Optional[str]:
        """Of one that takes local steps; None: P3's own."""
        return next(iter(self._of_local_steps[1:]), None)

    @property
    def _of_local_steps(self) -> List[str]:
        return compressions.split(self.kvstore)[0].split(":")[1:] if self.is_local else []

    @property
    def may_be_compressed(self) -> bool:
        """Whether the rule of compressed stores applies to its name."""
        return self.is_ddp or self.kvstore.startswith(("p3_torch", "p3_local"))

    def command(self, role: str, worker: Sequence[str]) -> List[str]:
        if self.is_p3:
            return [sys.executable, "-m", "p3", "exec", *worker]
        if role == "worker":
            return list(worker)
        # Importing MXNet in these roles runs the role, and exits when the job ends.
        return [sys.executable, "-c", "import mxnet"]


def _factored(name: str, label: str, route: str) -> Store:
    return Store(name, "p3_sync", "p3_sync, " + label, "factored", {"P3_PRIORITY": "caller"}, route=route)


def _sparse(ratio: float, label: str, look: Tuple[str, str]) -> Store:
    return _encoded(f"p3_dgc_{ratio:g}", Compression(f"dgc:{ratio:g}", EXACT), "p3_sync, DGC " + label, "dgc", look)


def _encoded(
    name: str, compression: Compression, label: str, group: str = "", look: Tuple[str, str] = (GREY, "v")
) -> Store:
    simulated = {"compression": compression}
    return Store(name, "p3_sync", label, group, compression=compression, look=look, simulated=simulated)


def _local(every: str, look: Tuple[str, str] = (GREY, "x")) -> Store:
    """`every`: 30, or 30:0.5 with that outer momentum."""
    steps, _, momentum = every.partition(":")
    label = f"p3.torch, exchange every {steps} steps" + (momentum and f", momentum {momentum}")
    return Store(f"p3_local_{every}", f"p3_local:{every}", label, "local", look=look, over=("ddp_25", "p3_torch"))


def _groups(size: int, of: str = OURS) -> Store:
    """`of`: a store without them."""
    name, label = ("p3", OURS) if of == OURS else (of, of.replace("_", "."))
    return Store(f"{name}_groups_{size}", of, f"{label}, groups of {size}", "groups", {"P3_GROUPS": str(size)},
                 over=(of,), simulated={"groups": (size,)})  # fmt: skip


def _ddp(megabytes: int, look: Tuple[str, str]) -> Store:
    return Store(
        f"ddp_{megabytes}", f"ddp:{megabytes}", f"DDP, buckets of {megabytes} MB", "torch",
        {"GLOO_SOCKET_IFNAME": "eth0"}, look=look, simulated={"scheme": "ddp", "bucket_mb": float(megabytes)},
    )  # fmt: skip


# In the order in which tables and figures show them.
STORES: Dict[str, Store] = {
    store.name: store
    for store in (
        Store("dist_sync", "dist_sync", "MXNet dist_sync", "main", look=(BLUE, "o")),
        Store("mxnet_p3", "dist_sync", "MXNet's P3", "main",
              {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}, look=(ORANGE, "s"), may_hang_at_end=True),
        Store("p3_slicing", "p3_sync", "p3_sync, slicing only", "main", {"P3_PRIORITY": "off"}, look=(PINK, "^"),
              simulated={"priorities": False}),
        Store("p3_sync", "p3_sync", "p3_sync", "main", look=(GREEN, "D"), over=("dist_sync", "mxnet_p3"), simulated={}),
        _groups(4),
        _groups(8),
        _groups(16),
        _sparse(0.01, "1%", (ORANGE, "s")),
        _sparse(0.001, "0.1%", (RED, "^")),
        _factored("p3_dense", "dense", "dense"),
        _factored("p3_factors", "factors", "factors"),
        _factored("p3_rule", "by the rule", "auto"),
        Store("dist_async", "dist_async", "MXNet dist_async", "apart"),
        Store("p3_ssp_1", "p3_ssp", "p3_ssp, 1 round apart", "apart", {"P3_STALENESS": "1"}),
        Store("p3_ssp_4", "p3_ssp", "p3_ssp, 4 rounds apart", "apart", {"P3_STALENESS": "4"}),
        Store("p3_async", "p3_async", "p3_async", "apart", over=("dist_async", "p3_sync")),
        _ddp(1, (SKY, "<")),
        _ddp(5, (BLUE, "P")),
        _ddp(25, (RED, ">")),
        Store("p3_torch", "p3_torch", "p3.torch", "torch", look=(GREEN, "D"), over=("ddp_1", "ddp_5", "ddp_25"),
              simulated={}),
        _groups(4, "p3_torch"),
        _groups(8, "p3_torch"),
        _groups(16, "p3_torch"),
        Store("p3_auto", "p3_torch", "p3.torch, strategy auto", "auto", {"P3_STRATEGY": "auto"}, look=(PINK, "D"),
              over=("p3_torch",)),
        Store("p3_torch_1", "p3_torch:1", "p3.torch, 1 step apart", "apart"),
        Store("p3_torch_4", "p3_torch:4", "p3.torch, 4 steps apart", "apart"),
        _local("10", (YELLOW, "o")),
        _local("30", (PINK, "X")),
        _local("100", (ORANGE, "X")),
        # Of `p3 bench pushpull`.
        Store("p3_apart", "p3_sync", environment={"P3_LOCAL_AGGREGATION": "0"}),
        Store("p3_checksum", "p3_sync", environment={"P3_CHECKSUM": "1"}),
        Store("p3_tls", "p3_sync", environment={"P3_TLS": "1"}),
        Store("raw_tcp", "raw_tcp"),
        # Computes as those of torch do, and sends nothing: by which computations are measured.
        Store("alone", "alone", "PyTorch alone", "alone"),
    )
}  # fmt: skip
_OF_CODECS = "p3_"  # and the name of any codec of gradients: a store, too
_DDP = re.compile(r"ddp_([1-9]\d*)(?:_(.+))?")  # its buckets are of any size
_LOCAL = re.compile(r"p3_local_([1-9]\d*(?::0(?:\.\d+)?)?)(?:_(.+))?")  # and any number of steps between two exchanges
# Of codecs, in figures; of any other name, GREY. One of DDP's has the colour, and DDP's marker.
_COLOURS = {"fp16": BLUE, "bf16": SKY, "int8": ORANGE, "int4": RED, "1bit": PINK, "topk": "#000000", "powersgd": YELLOW,
            "lowrank": YELLOW, "2bit": "#882255"}  # fmt: skip


def named(name: str) -> Store:
    """Of STORES, p3_CODEC, or a compressed one of torch. Of another name, as results of other versions may have, one
    that looks like no other."""
    base, text = _split(name)
    if base is not None and text:
        return _compressed(base, text)
    if base is not None or not name.startswith(_OF_CODECS):
        return base or Store(name, name, name)
    codec = name[len(_OF_CODECS):]
    return _encoded(name, Compression(codec, EXACT), "p3_sync, " + codec)


def among(known: Sequence[str]) -> Callable[[str], str]:
    """A parser, as argparse's `type`: of a name in `known`, and where there are stores of torch, of them with another
    size of buckets or a compression."""

    def parse(text: str) -> str:
        base, compression = _split(text)
        bases = [name for name in known if named(name).may_be_compressed]
        has_local = any(named(name).is_local for name in known)
        is_like_them = base is not None and (
            base.name in bases or (base.is_ddp and bool(bases)) or (base.is_local and has_local)
        )
        if text in known or (is_like_them and not compression):
            return text
        if not is_like_them:
            more = f"; nor with a compression, as {bases[-1]}_fp16, or other buckets, as ddp_100" if bases else ""
            more += ", or steps, as p3_local_500" if has_local else ""
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}{more}")
        if (compressions.parse_hook if base.is_ddp else compressions.parse)(compression) is None:
            raise argparse.ArgumentTypeError(f"{text!r} compresses nothing: that is {base.name}")
        return text

    return parse


def _split(name: str) -> Tuple[Optional[Store], str]:
    """A store, and its compression in words or ""; None, if the rule of names does not know it."""
    if name in STORES:
        return STORES[name], ""
    of_ddp = _DDP.fullmatch(name)
    if of_ddp:
        megabytes, text = of_ddp.groups()
        return STORES.get(f"ddp_{megabytes}") or _ddp(int(megabytes), (GREY, "x")), text or ""
    of_local = _LOCAL.fullmatch(name)
    if of_local:
        every, text = of_local.groups()
        return STORES.get(f"p3_local_{every}") or _local(every), text or ""
    bases = [one for one in STORES.values() if one.may_be_compressed and name.startswith(one.name + "_")]
    if not bases:
        return None, ""
    base = max(bases, key=lambda one: len(one.name))
    return base, name[len(base.name) + 1 :]


def _compressed(base: Store, text: str) -> Store:
    compression = Compression.of(text)
    of_codecs = not base.is_ddp or (compression is not None and compression.halves_all)
    simulated = {**base.simulated, "compression": compression} if base.simulated is not None and of_codecs else None
    return base._replace(
        name=f"{base.name}_{text}", kvstore=f"{base.kvstore}+{text}", label=f"{base.label}, {text}", over=(),
        compression=compression, look=(_COLOURS.get(text.split("-")[0].split(":")[0], GREY), base.look[1]),
        simulated=simulated,
    )  # fmt: skip


def names(*groups: str) -> Tuple[str, ...]:
    return tuple(name for group in groups for name, store in STORES.items() if store.group == group)


def of_codecs() -> Tuple[str, ...]:
    """Of compressed gradients. None without the core: no job runs then, but `p3 --help` does."""
    try:
        return tuple(_OF_CODECS + name for name in codecs.of_gradients())
    except NotBuilt:
        return ()


def of_torch() -> Tuple[str, ...]:
    """Types of compression that p3.torch takes without an option, and with any optimizer. None without the core."""
    try:
        known = codecs.types()
    except NotBuilt:
        return ()
    of_all_optimizers = (*codecs.of_gradients(), codecs.LOW_RANK.name)
    return tuple(name for name in of_all_optimizers if not any(option.is_mxnets for option in known[name].options))


def rank(name: str) -> Tuple[int, str]:
    """By which stores are sorted; those of codecs come behind p3_sync, compressed ones behind what they are of, unknown
    ones last."""
    base, text = _split(name)
    if base is not None and base.is_local:
        return list(STORES).index("p3_local_10"), f"{base.every:09d} {base.outer_momentum or ''} {text}"
    if base is not None:
        return list(STORES).index(base.name if base.name in STORES else "ddp_25"), name if base.is_ddp else text
    return (list(STORES).index(OURS) if name.startswith(_OF_CODECS) else len(STORES)), name
