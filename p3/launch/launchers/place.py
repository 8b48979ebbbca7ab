"""Where a process stands in the job that a launcher has started, as the launcher's variables tell."""

from __future__ import annotations

import hashlib
from typing import Callable, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from p3.errors import ConfigError

# The name of a variable, or a function of all of them; a text, or None if the launcher does not say.
Reader = Union[str, Callable[[Mapping[str, str]], Optional[str]]]


class Place(NamedTuple):
    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: Optional[int]  # None: the launcher does not say
    machines: int  # each gets a server; 0: the launcher tells nothing of machines, so that counted() has to
    machine: str  # alike on the processes of one machine, and on no others of the job
    job: str  # no other job of this user has that name, nor has another attempt at this one; "": it has none
    gateway: str = ""  # an address of the launcher's own host, if it says so
    store: str = ""  # the address of torch's store, where the processes meet; "": elsewhere, as channels.py has it


def counted(place: Place, machines: Sequence[str]) -> Place:
    """The place of a process whose launcher tells nothing of machines, by what that of each rank calls itself."""
    own = machines[place.rank]
    here = [rank for rank, machine in enumerate(machines) if machine == own]
    numbers = list(dict.fromkeys(machines))
    return place._replace(
        local_rank=here.index(place.rank), local_size=len(here), machines=len(numbers), machine=str(numbers.index(own))
    )


class Adapter(NamedTuple):
    """What one launcher says, and where."""

    name: str  # of --launcher
    starts: str  # how people call it
    seen: Tuple[str, ...]  # variables that it sets in every process that it starts, and nothing else sets
    rank: Reader
    size: Reader
    local_rank: Reader
    local_size: Reader
    machines: Reader
    machine: Reader
    job: Tuple[Reader, ...]  # together they name one attempt at one job
    gateway: Reader = lambda env: None
    store: Reader = lambda env: None
    places: Tuple[str, ...] = ()  # variables; unless it sets all of them, the processes count their machines
    may_count: bool = False  # DMLC_NUM_SERVER says the number of machines, if nothing else does
    threads: Reader = lambda env: None  # the processors that it has given to this process alone

    def is_seen(self, env: Mapping[str, str]) -> bool:
        return all(env.get(name) for name in self.seen)

    def place(self, env: Mapping[str, str]) -> Place:
        """ConfigError that names the variable, if the launcher does not say something, or something that cannot be."""
        size, rank = self._number(env, "size", self.size, 1), self._number(env, "rank", self.rank)
        job = "%s-%s" % (self.name, _digest([_read(reader, env) or "" for reader in self.job])) if self.job else ""
        store = _read(self.store, env) or ""
        if not all(env.get(name) for name in self.places) and rank < size:
            return Place(self.name, rank, size, 0, None, 0, "", job, store=store)
        local_size = _read(self.local_size, env) and self._number(env, "local size", self.local_size, 1)
        place = Place(
            self.name,
            rank,
            size,
            self._number(env, "local rank", self.local_rank),
            local_size or None,
            self._number(env, "number of machines", self.machines, 1),
            self._text(env, "machine", self.machine),
            job,
            _read(self.gateway, env) or "",
            store,
        )
        if not (place.rank < place.size and place.local_rank < (local_size or place.size) <= place.size
                and place.machines <= place.size):  # fmt: skip
            raise ConfigError(
                "%s contradicts itself: rank %d of %d, local rank %d of %s, %d machines (%s)"
                % (self.starts, rank, size, place.local_rank, local_size, place.machines, self.shown(env))
            )
        return place

    def shown(self, env: Mapping[str, str]) -> str:
        return ", ".join("%s=%s" % (name, env[name]) for name in self.seen if env.get(name))

    def threads_of(self, env: Mapping[str, str]) -> Optional[str]:
        return _read(self.threads, env)

    def _text(self, env: Mapping[str, str], what: str, reader: Reader) -> str:
        text = _read(reader, env)
        if not text:
            by = ": %s is not set" % reader if isinstance(reader, str) else ""
            also = ". Set DMLC_NUM_SERVER to it" if what == "number of machines" and self.may_count else ""
            raise ConfigError("%s has started this process (%s), but does not say its %s%s%s"
                              % (self.starts, self.shown(env), what, by, also))  # fmt: skip
        return text

    def _number(self, env: Mapping[str, str], what: str, reader: Reader, least: int = 0) -> int:
        text = self._text(env, what, reader)
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            by = reader + "=" if isinstance(reader, str) else ""
            raise ConfigError("%s%s, from %s, is no %s" % (by, text, self.starts, what))
        return int(text)


def find(adapters: Sequence[Adapter], env: Mapping[str, str], chosen: Optional[str] = None) -> Optional[Adapter]:
    """The one that has started this process; None if none has. ConfigError, with what was seen, if it is not clear."""
    found = [adapter for adapter in adapters if adapter.is_seen(env)]
    if chosen is not None:
        (wanted,) = [adapter for adapter in adapters if adapter.name == chosen]
        if wanted not in found:
            missing = ", ".join(name for name in wanted.seen if not env.get(name))
            raise ConfigError("--launcher %s: %s is not set, which %s sets in what it starts"
                              % (chosen, missing, wanted.starts))  # fmt: skip
        return wanted
    if len(found) > 1:
        raise ConfigError(
            "more than one launcher has started this process: %s. Say which one places the workers: %s"
            % (
                "; ".join("%s (%s)" % (adapter.starts, adapter.shown(env)) for adapter in found),
                " or ".join("--launcher " + adapter.name for adapter in found),
            )
        )
    return found[0] if found else None


def warning_if_alone(adapters: Sequence[Adapter], env: Mapping[str, str]) -> Optional[str]:
    """What to say to a script that would train alone, though a launcher has started several of it."""
    for adapter in adapters:
        size = _read(adapter.size, env) if adapter.is_seen(env) else None
        if size and size.isdigit() and int(size) > 1:
            return ("%s has started %s of this process (%s), but each trains alone. To train together, start them as "
                    "p3 exec python train.py" % (adapter.starts, size, adapter.shown(env)))  # fmt: skip
    if not any(adapter.is_seen(env) for adapter in adapters):
        for adapter in adapters:
            size, rank = _read(adapter.size, env) or "", _read(adapter.rank, env)
            if rank and size.isdigit() and int(size) > 1:
                missing = " and ".join(name for name in adapter.seen if not env.get(name))
                return ("%s: this is one of %s processes, but each trains alone. To train together as %s starts them, "
                        "they need %s, too" % (adapter.shown(env), size, adapter.starts, missing))  # fmt: skip
    return None


def first_of(*readers: Reader) -> Reader:
    """What the first of them says that says anything."""
    return lambda env: next(filter(None, (_read(reader, env) for reader in readers)), None)


def _read(reader: Reader, env: Mapping[str, str]) -> Optional[str]:
    return env.get(reader) if isinstance(reader, str) else reader(env)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:24]
