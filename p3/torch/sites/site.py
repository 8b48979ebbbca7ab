"""A site: processes that train synchronously, as by DistributedDataParallel, and are one worker of the job together.

    torch.distributed.init_process_group("gloo")          # of this site, or of all
    p3.torch.site(torch.distributed.group.WORLD)          # whose members are a site
    optimizer = p3.torch.LocalSteps(optimizer, DistributedDataParallel(model), every=30)

Its first process, the leader, has the session: what it sends and gets is all that leaves the site. The others have the
same weights, and get from the leader what comes from other sites. How sites meet depends on who has started them. `p3
run` or `p3 exec` starts one command for each site, as a torchrun of its own. One torchrun of all sites starts none of
P3's processes: then the leaders do, and meet at its store, as workers without sites.
"""

from __future__ import annotations

import functools
import logging
import os
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from p3.errors import ConfigError
from p3.launch.launchers.adapters import TORCHRUN
from p3.plan import choices, combinations
from p3.plan.choices import Choice
from p3.settings import Settings
from p3.snapshots import tree
from p3.torch.sites.words import Words
from p3.torch.start import job, ray_train, torchrun
from p3.worker import open_sessions
from p3.worker.session import Session

log = logging.getLogger("p3.torch")

_AT_ONCE_BYTES = 64 << 20  # of weights, which are copied for that

_current: Optional[Site] = None


def current() -> Optional[Site]:
    """That of this process, if it is of one."""
    return _current


def refuse(call: str, choice: Choice) -> None:
    """ValueError in a process of a site, which cannot have that choice."""
    if _current is not None:
        combinations.require(call, choices.SITES, choice)


def enter(group: Any) -> None:
    """See p3.torch.site()."""
    global _current
    if not dist.is_initialized() or not isinstance(group, dist.ProcessGroup):
        raise ValueError("p3.torch.site() takes a group of torch.distributed of which this process is a member, not "
                         "%.100r: call torch.distributed.init_process_group() before" % (group,))  # fmt: skip
    ranks = dist.get_process_group_ranks(group)
    if _current is not None:
        if _current.ranks != ranks:
            raise ValueError("p3.torch.site(): this process is of a site already, of the ranks %s, and cannot be of "
                             "another one, of %s" % (_current.ranks, ranks))  # fmt: skip
        return
    if open_sessions.opened() is not None:
        raise RuntimeError("p3.torch.site() comes before all else of p3.torch: this process has joined the job by "
                           "itself already")  # fmt: skip
    _current = Site(group, ranks)


class Site:
    """Threads: the script's, one at a time. All members make the same calls at the same point; what one does not call
    in P3_WAIT_TIMEOUT_S is a RuntimeError on the others."""

    def __init__(self, group: Any, ranks: List[int]) -> None:
        """Blocks until the leaders of all sites are there. ConfigError if nothing says how the sites are to meet;
        errors as of job.current()."""
        self.ranks, self._group = ranks, group
        self._settings = Settings.from_env(os.environ)
        sites = _sites(ranks)
        open_session = _opener(sites, ranks)
        self._words = self._words_of(sites)
        self.is_leader, self.label = self._words.is_leader, self._words.label
        self.lead, self.gather = self._words.lead, self._words.gather
        self._require_one_worker()
        job.open_by(open_session if self.is_leader else self.refuse)
        self.rank, self.size = self.lead("p3.torch.site()", _place)  # among the sites: of the worker
        if self.is_leader and self.size == 1:
            log.warning("p3.torch.site(): the job has one site, so nothing is exchanged with any other "
                        "(docs/local-steps.md)")  # fmt: skip

    def _words_of(self, sites: Sequence[Sequence[int]]) -> Words:
        """Every process makes the groups of all sites, as torch.distributed wants it."""
        timeout = timedelta(seconds=self._settings.wait_timeout_s)
        groups = [dist.new_group(list(ranks), timeout, "gloo") for ranks in sites]
        return Words(self.ranks, groups[sites.index(self.ranks)], self._settings.wait_timeout_s)

    def _require_one_worker(self) -> None:
        """ConfigError on all members if they were started as several workers."""
        own = self._settings.rank if os.environ.get("DMLC_ROLE") else None
        ranks = self.gather(-1 if own is None else own, "p3.torch.site()")  # -1: also on other hosts than the leader's
        if len(set(ranks) - {-1}) > 1:
            raise ConfigError("%s: its processes were started as %d workers of P3's job (P3_RANK), and must be one: "
                              "start one torchrun for each site, p3 run -n SITES torchrun --nproc-per-node MEMBERS "
                              "train.py, or a torchrun of all without p3 exec (docs/local-steps.md)"
                              % (self.label, len(set(ranks) - {-1})))  # fmt: skip

    def refuse(self, *_: Any) -> NoReturn:
        """What a member cannot do."""
        raise RuntimeError("%s: its leader alone is a worker of P3's job, and this call is the workers'. Call it there "
                           "only, or take torch.distributed's own (docs/local-steps.md)" % self.label)  # fmt: skip

    def unwrapped(self, model: Any) -> Any:
        """What a DistributedDataParallel has within it. ValueError if that adds up gradients of others than this site's
        members."""
        if not isinstance(model, DistributedDataParallel):
            return model
        ranks = dist.get_process_group_ranks(model.process_group)
        if ranks != self.ranks:
            raise ValueError("%s: DistributedDataParallel adds up gradients of the ranks %s, and the site has %s: give "
                             "it the site's group, as DistributedDataParallel(model, process_group=group)"
                             % (self.label, ranks, self.ranks))  # fmt: skip
        return model.module

    # What the leader has, to all

    def share(self, tensors: Sequence[torch.Tensor], call: str) -> None:
        """The leader's content, in place, on whatever device: those of all members are alike."""
        for device, those in _batches(tensors):
            if self.is_leader:
                whole = torch.cat([_bytes_of(one) for one in those])
            else:
                whole = torch.empty(sum(map(_size, those)), dtype=torch.uint8, device=device)
            self._words.broadcast(whole, call, None if device.type == "cpu" else self._group)
            if not self.is_leader:
                _take(those, whole)

    def tree(self, call: str, make: Callable[[], Any]) -> Any:
        """What the leader's `make()` returns, a tree of p3.snapshots.tree, on all."""
        arrays: Dict[str, np.ndarray] = {}

        def lead() -> Any:
            tensors = tree.encode(make())
            arrays.update((name, np.array(array)) for name, _, _, array in tensors)
            return [[name, dtype, list(shape)] for name, dtype, shape, _ in tensors]

        described = self.lead(call, lead)
        if not self.is_leader:
            arrays.update((name, np.empty(shape, dtype)) for name, dtype, shape in described)
        for name, _, _ in described:
            if arrays[name].size > 0:
                self._words.broadcast(torch.from_numpy(arrays[name].reshape(-1).view(np.uint8)), call)
        return tree.decode(arrays)


def _place() -> List[int]:
    session = job.current()
    return [session.rank, session.num_workers]


def _sites(ranks: Sequence[int]) -> List[List[int]]:
    """The ranks of each site, of all processes of the default group, each of which calls this."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    own = torch.tensor([ranks[0]], device=device)
    leaders = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(leaders, own)
    sites: Dict[int, List[int]] = {}
    for rank, leader in enumerate(leaders):
        sites.setdefault(int(leader.item()), []).append(rank)
    if sites[ranks[0]] != list(ranks):
        raise ValueError("p3.torch.site(): the group has the ranks %s, of which %s have called it with that group: "
                         "each process is of one site" % (list(ranks), sites[ranks[0]]))  # fmt: skip
    return list(sites.values())


def _opener(sites: Sequence[Sequence[int]], ranks: Sequence[int]) -> Callable[[], Session]:
    """How the leader joins the job. ConfigError, on all members, if nothing says that."""
    if os.environ.get("DMLC_ROLE"):
        if len(sites) > 1:
            raise ConfigError("p3.torch.site(): p3 run, or whatever has set DMLC_ROLE, has started a torchrun of %d "
                              "sites, and must start one for each site; or leave it out, and start one torchrun of all "
                              "sites (docs/local-steps.md)" % len(sites))  # fmt: skip
        return Session.open
    if ray_train.started(os.environ):
        raise ConfigError("p3.torch.site(): Ray Train starts every process as a worker. Start the sites by torchrun "
                          "(docs/local-steps.md)")  # fmt: skip
    if torchrun.started(os.environ):
        env = {name: value for name, value in os.environ.items() if name not in TORCHRUN.places}
        env.update(RANK=str(list(sites).index(ranks)), WORLD_SIZE=str(len(sites)))
        return functools.partial(torchrun.open_session, env)
    if len(sites) > 1:
        raise ConfigError("p3.torch.site(): there are %d sites, and nothing says how they meet: start them by torchrun "
                          "or p3 run (docs/local-steps.md)" % len(sites))  # fmt: skip
    return Session.open


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[Tuple[torch.device, List[torch.Tensor]]]:
    """Those of one device together, as many as make no large copy."""
    devices = {one.device: None for one in tensors if one.numel() > 0}
    for device in devices:
        batch: List[torch.Tensor] = []
        for one in tensors:
            if one.device == device and one.numel() > 0:
                if batch and sum(map(_size, batch)) + _size(one) > _AT_ONCE_BYTES:
                    yield device, batch
                    batch = []
                batch.append(one)
        yield device, batch


def _take(tensors: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
    with torch.no_grad():
        for one, content in zip(tensors, whole.split([_size(one) for one in tensors])):
            one.copy_(content.clone().view(one.dtype).view(one.shape))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
