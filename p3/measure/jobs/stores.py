"""The stores that are compared: what a job of each is, and how tables and figures name and draw it.

What all of them have in common stands here once; nothing elsewhere lists them. Results are read without the core.
"""

from __future__ import annotations

import sys
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from p3 import codecs
from p3.errors import NotBuilt
from p3.measure.replay.payloads import Compression
from p3.mxnet import hooks

# Of Okabe and Ito, told apart by people who see few colours; markers do so in print.
BLUE, ORANGE, PINK, GREEN, SKY, RED, GREY = (
    "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#D55E00", "#999999"
)  # fmt: skip


class Store(NamedTuple):
    name: str  # in options and results
    kvstore: str  # what mx.kv.create is given; or of torch, p3_torch, p3_torch:STALENESS or ddp:MEGABYTES
    label: str = ""  # of figures
    group: str = ""  # of which experiments offer all or none
    environment: Mapping[str, str] = {}  # of all its processes
    compression: Optional[Compression] = None
    route: Optional[str] = None  # of real fully connected layers, as p3.factors has them
    look: Tuple[str, str] = (GREY, "v")  # colour and marker
    over: Sequence[str] = ()  # stores that tables compare it with
    simulated: Optional[Mapping[str, object]] = None  # what p3 simulate takes for it; None: it knows no such store

    @property
    def is_p3(self) -> bool:
        return self.kvstore.startswith("p3_")

    @property
    def is_torch(self) -> bool:
        return self.kvstore.startswith("p3_torch") or self.is_workers_alone

    @property
    def may_be_apart(self) -> bool:
        """Whether its workers may be rounds apart, so that there is no n-th step of all."""
        return hooks.may_be_apart(self.kvstore) or self.kvstore.startswith("p3_torch:")

    @property
    def clips(self) -> bool:
        """Whether its workers can clip by the global norm: those of torch, unless they may be apart."""
        return self.is_torch and not self.may_be_apart

    @property
    def is_workers_alone(self) -> bool:
        """Without servers and scheduler, found at MASTER_ADDR."""
        return self.kvstore.startswith("ddp:") or self.kvstore == "alone"

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
    compression = Compression("dgc", ratio)
    return Store(f"p3_dgc_{ratio:g}", "p3_sync", "p3_sync, DGC " + label, "dgc", compression=compression, look=look)


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
              {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}, look=(ORANGE, "s")),
        Store("p3_slicing", "p3_sync", "p3_sync, slicing only", "main", {"P3_PRIORITY": "off"}, look=(PINK, "^"),
              simulated={"priorities": False}),
        Store("p3_sync", "p3_sync", "p3_sync", "main", look=(GREEN, "D"), over=("dist_sync", "mxnet_p3"), simulated={}),
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
        Store("p3_torch_1", "p3_torch:1", "p3.torch, 1 step apart", "apart"),
        Store("p3_torch_4", "p3_torch:4", "p3.torch, 4 steps apart", "apart"),
        # Of `p3 bench pushpull`.
        Store("p3_apart", "p3_sync", environment={"P3_LOCAL_AGGREGATION": "0"}),
        Store("p3_checksum", "p3_sync", environment={"P3_CHECKSUM": "1"}),
        Store("p3_tls", "p3_sync", environment={"P3_TLS": "1"}),
        Store("raw_tcp", "raw_tcp"),
        # Computes as the others do, and sends nothing: by which a real computation is measured.
        Store("alone", "alone"),
    )
}  # fmt: skip
OURS = "p3_sync"
_OF_CODECS = "p3_"  # and the name of any codec of gradients: a store, too


def named(name: str) -> Store:
    """Of STORES, or p3_CODEC. Of another name, as results of other versions may have, one that looks like no other."""
    if name in STORES or not name.startswith(_OF_CODECS):
        return STORES.get(name) or Store(name, name, name)
    codec = name[len(_OF_CODECS):]
    return Store(name, "p3_sync", "p3_sync, " + codec, compression=Compression(codec))


def names(*groups: str) -> Tuple[str, ...]:
    return tuple(name for group in groups for name, store in STORES.items() if store.group == group)


def of_codecs() -> Tuple[str, ...]:
    """Of compressed gradients. None without the core: no job runs then, but `p3 --help` does."""
    try:
        return tuple(_OF_CODECS + name for name in codecs.of_gradients())
    except NotBuilt:
        return ()


def rank(name: str) -> Tuple[int, str]:
    """By which stores are sorted; those of codecs come behind p3_sync, unknown ones last."""
    if name in STORES:
        return list(STORES).index(name), ""
    return (list(STORES).index(OURS) if name.startswith(_OF_CODECS) else len(STORES)), name
