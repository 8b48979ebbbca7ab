"""Every setting of P3, in one place: each is a field with its variable, default, allowed values and description.

    settings = Settings.from_env(os.environ)      # ConfigError names the variable, its value and what is allowed
    python -m p3.settings                         # prints the tables of docs/settings.md

The environment is ps-lite's (DMLC_*), so that launchers that know it can start P3; P3's own variables are P3_*.
An unknown P3_* variable is a warning that names the nearest known one, because a typing error would otherwise
silently leave the default in force. So is a removed one; its warning says what to do instead.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, field, fields
from typing import Callable, Mapping, Optional, Tuple, Union

from p3 import secret_file
from p3.errors import ConfigError
from p3.plan import choices, combinations

log = logging.getLogger("p3")

MIN_SECRET_CHARACTERS = 16
ROLES = ("worker", "server", "scheduler")


# Parsers: text -> value, or ValueError with what is allowed.


def _number(convert, low, high, what: str) -> Callable:
    def parse(text: str):
        try:
            value = convert(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:  # also refuses NaN
            raise ValueError("%s from %s to %s" % (what, low, high))
        return value

    return parse


def _integer(low: int, high: int) -> Callable[[str], int]:
    return _number(int, low, high, "a whole number")


def _seconds(low: float, high: float) -> Callable[[str], float]:
    return _number(float, low, high, "a number of seconds")


def _word_or(word: str, meaning, parse_number: Callable[[str], int]) -> Callable:
    def parse(text: str):
        try:
            return meaning if text == word else parse_number(text)
        except ValueError as error:
            raise ValueError("%s, or %s" % (word, error)) from None

    return parse


def _auto_or(parse_number: Callable[[str], int]) -> Callable[[str], Union[int, str]]:
    return _word_or("auto", "auto", parse_number)


def _text(is_allowed: Callable[[str], object], what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not is_allowed(text):
            raise ValueError(what)
        return text

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    return _text(allowed.__contains__, "one of " + ", ".join(allowed))


def sizes_of_groups(text: str) -> Tuple[int, ...]:
    """Of P3_GROUPS, as _groups has parsed it."""
    return () if text == "1" else tuple(map(int, text.split("x")))


_groups = _text(
    re.compile(r"1|([2-9]|[1-9]\d{1,3})(x([2-9]|[1-9]\d{1,3}))*").fullmatch, "1, a size of groups, or sizes as 16x8"
)


def _on_worker_loss(text: str) -> str:
    if text == "wait":
        raise ValueError(
            'fail or continue: "wait" was taken out. Use --on-worker-loss continue --rejoin: another process takes a '
            "lost worker's place at the workers' next members(round)"
        )
    return _choice("fail", "continue")(text)


def _ports(text: str) -> Tuple[int, ...]:
    """`9100-9107,9200`, each once."""
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = [first, last if dash else first]
        if not all(bound.isascii() and bound.isdigit() and 1 <= int(bound) <= 65535 for bound in bounds):
            raise ValueError("ports from 1 to 65535, for example 9100-9107 or 9100,9102")
        if int(bounds[1]) < int(bounds[0]):
            raise ValueError("ports from 1 to 65535, the lower one first, for example 9100-9107")
        found += range(int(bounds[0]), int(bounds[1]) + 1)
    return tuple(dict.fromkeys(found))


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _address(text: str) -> str:
    """IPv6 may stand in brackets, as in a URI."""
    if text.split() != [text]:
        raise ValueError("a name or address without spaces")
    return text[1:-1] if text[0] == "[" and text[-1] == "]" and ":" in text else text


_command = _text(str.strip, "a command")
_path = _text(str.strip, "a path")
_secret = _text(
    lambda text: len(text) >= MIN_SECRET_CHARACTERS,
    "at least %d characters; `p3 run` makes one by itself" % MIN_SECRET_CHARACTERS,
)


def _setting(variable: str, default, parse, text: str, secret: bool = False, common: bool = False, heading: str = ""):
    """`text`: what it is, in which unit, when to change it; Markdown, with links as seen from docs/. `common`: must be
    the same on all nodes. `heading`: of the group of settings that begins with this one."""
    metadata = {
        "variable": variable, "parse": parse, "text": text, "secret": secret, "common": common, "heading": heading
    }  # fmt: skip
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    # fmt: off
    role: Optional[str] = _setting(
        "DMLC_ROLE", None, _choice(*ROLES),
        "What this process is: `worker`, `server` or `scheduler`. `p3 run` sets it. With no `DMLC_*` variable at all "
        "a script runs embedded: a worker and a server in its own process.",
        heading="The job, and the place of a process in it",
    )
    root_host: Optional[str] = _setting(
        "DMLC_PS_ROOT_URI", None, _address,
        "Name or address of the scheduler's host, as all nodes reach it. `p3 run` sets it.",
    )
    root_port: Optional[int] = _setting(
        "DMLC_PS_ROOT_PORT", None, _integer(1, 65535),
        "TCP port of the scheduler. `p3 run` takes a free one; set it where a firewall opens only certain ports.",
    )
    num_workers: Optional[int] = _setting(
        "DMLC_NUM_WORKER", None, _integer(1, 10000), "Number of workers in the job. `p3 run -n` sets it."
    )
    num_servers: Optional[int] = _setting(
        "DMLC_NUM_SERVER", None, _integer(1, 10000), "Number of servers in the job. `p3 run -s` sets it."
    )
    max_workers: Optional[int] = _setting(
        "P3_MAX_WORKERS", None, _integer(1, 10000),
        "The most workers that the job ever has; unset: as many as it begins with. Needs "
        "`P3_ON_WORKER_LOSS=continue`: then others may [join](reliability.md#joining) the running job until there are "
        "so many. `p3 run --max-workers` sets it.",
        common=True,
    )
    rank: Optional[int] = _setting(
        "P3_RANK", None, _integer(0, 9999),
        "Rank of this process in its role, starting at 0. `p3 run` sets it. With another launcher, set it for a "
        "process that takes a lost one's place or resumes a worker's snapshot; unset, the scheduler assigns ranks.",
    )
    interface: Optional[str] = _setting(
        "DMLC_INTERFACE", None, _address,
        "Network interface whose address other nodes use to reach this one, IPv4 if it has one. Set it on hosts with "
        "several networks; unset, it is the interface that leads to the scheduler.",
    )
    node_host: Optional[str] = _setting(
        "DMLC_NODE_HOST", None, _address,
        "Address at which other nodes reach this one; overrides `DMLC_INTERFACE`. Set it behind address translation.",
    )
    server_ports: Optional[Tuple[int, ...]] = _setting(
        "P3_SERVER_PORTS", None, _ports,
        "TCP ports for servers, for example `9100-9107` or `9100,9102`; each server takes the first that is free on "
        "its host, and with `P3_GROUPS` each worker. Unset: any free port. Set it where a firewall opens only certain "
        "ports, one for each of them on a host.",
    )
    secret: Optional[str] = _setting(
        "P3_SECRET", None, _secret,
        "The job's secret, at least 16 characters, the same on all nodes. `p3 run` makes one for each job, "
        "unless it is set; prefer `P3_SECRET_FILE`.",
        secret=True,
    )
    secret_file: Optional[str] = _setting(
        "P3_SECRET_FILE", None, _command,
        "File that holds the secret, readable by its owner alone, or as Kubernetes and Docker mount it. Set it with "
        "launchers other than `p3 run`, and where processes [join](reliability.md#joining) from other hosts.",
    )
    tls: bool = _setting(
        "P3_TLS", False, _flag,
        "`1`: encrypt what crosses the network ([how](security.md)). Turn it on unless you trust "
        "the network; it costs processor time.",
        common=True,
    )
    ssh: str = _setting(
        "P3_SSH", "ssh -o BatchMode=yes", _command,
        "Command by which `p3 run`, `p3 bench` and `p3 doctor` reach other hosts. Set it to choose a user, a port or a "
        "key.",
    )
    rendezvous_timeout_s: float = _setting(
        "P3_RENDEZVOUS_TIMEOUT_S", 60.0, _seconds(0.1, 86400),
        "Seconds within which all nodes must join. Raise it if the launcher starts them further apart.",
    )

    priority: str = _setting(
        "P3_PRIORITY", "auto", _choice("auto", "caller", "index", "off"),
        "Which slices are most urgent. `auto`: those of the parameters that the forward pass uses first; `caller`: as "
        "push and pull say; `index`: those of the lowest key; `off`: none, slices leave in the order they came. Leave "
        "it alone; the others are for scripts with priorities of their own and for measuring what priorities gain.",
        common=True,
        heading="What leaves when",
    )
    slice_elements: Union[int, str] = _setting(
        "P3_SLICE_ELEMENTS", "auto", _auto_or(_integer(1, 1 << 28)),
        "Maximum number of elements in a slice, the unit that priorities order. `auto`: 50000 with up to two servers; "
        "with more 2500 to 20000, such that each server holds as much of a key. Smaller ones let urgent slices overtake"
        " sooner and cost more overhead. Leave it alone unless `p3 bench slices` favours another size for your model.",
        common=True,
    )
    strategy: Optional[str] = _setting(
        "P3_STRATEGY", None, _path,
        "File that says which servers hold which keys, how large slices are and how gradients are compressed "
        "([more](planning.md#the-file)). The scheduler reads it. "
        "Write one with `p3 plan` if links differ in rate. `auto`: `p3.torch.DistributedOptimizer` plans "
        "while it trains ([more](planning.md#while-a-job-trains)).",
    )
    staleness: Union[int, float] = _setting(
        "P3_STALENESS", 1, _word_or("inf", math.inf, _integer(0, 10**9)),
        "Rounds that the fastest worker of a `p3_ssp` store may be ahead of the slowest "
        "([more](strategies.md#asynchronous-and-bounded-staleness)); `inf`: nobody waits. `0` is "
        "`p3_sync`. Raise it if workers differ in speed from step to step.",
        common=True,
    )
    partitions: Union[int, str] = _setting(
        "P3_PARTITIONS", "auto", _auto_or(_integer(1, 1 << 20)),
        "Number of partitions of each sparse key, at most one for each row. `auto` starts with the number of servers "
        "and searches for the fastest number while the job trains. Set a number to spare a job the search.",
        common=True,
    )
    local_aggregation: bool = _setting(
        "P3_LOCAL_AGGREGATION", True, _flag,
        "`1`: the workers of a machine add up their gradients before they leave it, and one copy of each value comes "
        "back. `0`: each pushes on its own; the bits are the same, but where gradients are compressed. Leave it alone; "
        "`P3_ON_WORKER_LOSS=continue` and `P3_ON_SERVER_LOSS=continue` turn it off.",
        common=True,
    )
    groups: str = _setting(
        "P3_GROUPS", "1", _groups,
        "Workers in a group, of neighbours by rank: they add up their gradients, each of them for some of the servers, "
        "before they push ([more](groups.md)). `16x8`: groups of 16, and groups of 8 of these. `1`: none. Set it for "
        "jobs of 8 hosts or more with slow links, to 4 or more.",
        common=True,
    )

    sum_order: str = _setting(
        "P3_SUM_ORDER", "rank", _choice("rank", "arrival"),
        "`rank`: servers add gradients in an order fixed by rank, so every run gives the same bits. `arrival`: as "
        "they come, which takes less memory. Change it if servers run out of memory and the last bits may differ "
        "between runs.",
        common=True,
        heading="Memory and threads",
    )
    server_threads: int = _setting(
        "P3_SERVER_THREADS", 0, _integer(0, 256),
        "Number of threads in which a server adds and updates. 0: its receiving thread does so, which suffices for "
        "about 10 Gbit/s. Raise it on servers with a faster network and idle cores.",
    )
    local: str = _setting(
        "P3_LOCAL", "shm", _choice("shm", "unix", "tcp"),
        "How processes of one machine connect: `shm` through shared memory, `unix` through a local socket, `tcp` as "
        "between machines. Leave it alone unless `p3 doctor` says that local sockets do not work.",
    )

    timeout_s: float = _setting(
        "P3_TIMEOUT_S", 10.0, _seconds(0.1, 86400),
        "Seconds of silence after which a peer counts as dead. A heartbeat leaves each connection every tenth of "
        "that, and at least every second. Raise it if hosts or the network pause for longer.",
        heading="Failures",
    )
    straggler_s: float = _setting(
        "P3_STRAGGLER_S", 30.0, _seconds(0.1, 864000),
        "Seconds that a living worker may keep others waiting before the log names it. Raise it if steps take longer.",
    )
    stuck_s: float = _setting(
        "P3_STUCK_S", 3600.0, _seconds(0, 864000),
        "Seconds that a living worker may keep others waiting before the job fails; 0: no limit. Raise it if one "
        "worker evaluates or reads data for longer.",
    )
    wait_timeout_s: float = _setting(
        "P3_WAIT_TIMEOUT_S", 600.0, _seconds(0.1, 864000),
        "Seconds that a barrier, `set_optimizer`, a snapshot and the like wait for other nodes while nothing moves: "
        "bytes of values, or of a snapshot on its way to any node's disk, restart the count. Raise it if one worker "
        "works for longer while others wait in a barrier.",
    )
    on_worker_loss: str = _setting(
        "P3_ON_WORKER_LOSS", "fail", _on_worker_loss,
        "`fail`: a lost worker ends the job. `continue`: the others train on without it "
        "([how](reliability.md#going-on-without-a-worker)), and another process may [join](reliability.md#joining) in "
        "its place.",
        common=True,
    )
    on_server_loss: str = _setting(
        "P3_ON_SERVER_LOSS", "fail", _choice("fail", "continue"),
        "`fail`: a lost server ends the job. `continue`: another one takes over, as servers only sum and the workers "
        "update then ([how](reliability.md#going-on-without-a-server)); each worker has all sums in memory once more, "
        "and of a store with an optimizer the states.",
        common=True,
    )
    join_s: Optional[float] = _setting(
        "P3_JOIN", None, _seconds(1, 864000),
        "This process joins a job that runs, and waits at most so many seconds to be let in: [a "
        "worker](reliability.md#joining) in the place of one that has departed or as a further one, [a "
        "server](reliability.md#a-server-that-comes-back) in the place of a lost one, which needs "
        "`P3_ON_SERVER_LOSS=continue`. `p3 join` and `p3 run --rejoin` set it.",
    )
    checksum: bool = _setting(
        "P3_CHECKSUM", False, _flag,
        "`1`: add a CRC32C to every slice; an altered one ends the job with an error that names its sender. Turn it "
        "on if you suspect a network or memory of altering data.",
        common=True,
    )

    snapshot_dir: Optional[str] = _setting(
        "P3_SNAPSHOT_DIR", None, _path,
        "Directory, shared by all nodes, where [snapshots](reliability.md) are written and resumed from. Unset: "
        "none are taken.",
        heading="Snapshots",
    )
    snapshot_every: int = _setting(
        "P3_SNAPSHOT_EVERY", 100, _integer(1, 1 << 31),
        "Rounds from one snapshot to the next, as the script counts them in its calls of `snapshot`. Lower it to lose "
        "less work after a failure; raise it if a snapshot takes longer to write than that many rounds.",
        common=True,
    )
    snapshot_keep: int = _setting(
        "P3_SNAPSHOT_KEEP", 2, _integer(1, 10000),
        "Number of snapshots to keep, the newest ones. With 1, a damaged snapshot leaves none to resume from.",
    )
    snapshot_rate: float = _setting(
        "P3_SNAPSHOT_RATE", 0.0, _number(float, 0, 1e6, "a number of MB per second"),
        "Limit on the rate at which each process writes a snapshot, in MB (10^6 bytes) per second; `0`: none. Set it "
        "if snapshots share the network with training.",
    )

    log_level: str = _setting(
        "P3_LOG", "warning", _choice("debug", "info", "warning", "error"),
        "Lowest severity that `p3 run`, schedulers and servers log: `debug`, `info`, `warning` or `error`. Set `info` "
        "to see how a job proceeds. In a script Python's `logging` decides, as for any library.",
        heading="Seeing what happens",
    )
    trace: Optional[str] = _setting(
        "P3_TRACE", None, _path,
        "Directory where every process records what happens to each slice, for [`p3 trace`](trace.md). Unset: no "
        "record. Set it to find out what the forward pass waits for.",
    )
    watch_s: float = _setting(
        "P3_WATCH_S", 60.0, _seconds(0, 86400),
        "Seconds between two lines of `p3 run` that say how fast the job is and what it waits for; `0`: none. SIGUSR2 "
        "to `p3 run` brings one at once ([more](watching.md)).",
    )
    metrics_port: Optional[int] = _setting(
        "P3_METRICS_PORT", None, _integer(0, 65535),
        "TCP port of the scheduler's host at which [Prometheus](watching.md#prometheus) finds the numbers of all "
        "processes; `0`: any free one, which the scheduler names. Unset: none. Set it if a Prometheus watches your "
        "jobs.",
    )
    check: int = _setting(
        "P3_CHECK", 0, _integer(0, 1 << 31),
        "With PyTorch: `N` compares the parameters of all workers every N steps, and fails, naming those that differ. "
        "With [local steps](local-steps.md) it compares the global ones at every N-th merge. `0`: never. Set `1` to "
        "find out whether a script changes weights or gradients in ways that P3 does not see; that costs the overlap "
        "with the next forward pass.",
    )
    # fmt: on

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Reads and checks all variables; an empty one counts as unset. ConfigError on the first that is wrong."""
        values = {}
        for variable, setting in VARIABLES.items():
            if env.get(variable):
                try:
                    values[setting.name] = setting.metadata["parse"](env[variable])
                except ValueError as error:
                    shown = "(not shown)" if setting.metadata["secret"] else repr(env[variable])
                    raise ConfigError("%s=%s: it must be %s." % (variable, shown, error)) from None
        _warn_of_unknown(env)
        of_losses = choices.of_losses(values.get("on_worker_loss", "fail"))
        if of_losses and values.setdefault("local_aggregation", False):
            raise ConfigError(combinations.refusal(*of_losses, choices.AGGREGATION))
        of_servers = choices.of_server_losses(values.get("on_server_loss", "fail"))
        if of_servers and values.setdefault("local_aggregation", False):
            raise ConfigError(combinations.refusal(*of_servers, choices.AGGREGATION))
        if values.get("groups", "1") != "1" and (of_losses or of_servers):
            raise ConfigError(combinations.refusal(*(of_losses or of_servers), choices.GROUPS))
        return cls(**values)

    @property
    def heartbeat_s(self) -> float:
        """Between two heartbeats: several may be lost or late before the peer counts as dead."""
        return min(1.0, self.timeout_s / 10)

    @property
    def _said_by(self) -> str:
        return "%s: " % self.role if self.role else ""

    @property
    def group_sizes(self) -> Tuple[int, ...]:
        """Of P3_GROUPS, from the smallest groups on; none: there are none."""
        return sizes_of_groups(self.groups)

    @property
    def outlives_workers(self) -> bool:
        return self.on_worker_loss == "continue"

    @property
    def outlives_servers(self) -> bool:
        return self.on_server_loss == "continue"

    def require_heir(self, num_servers: int) -> None:
        """ConfigError if a job of so many servers cannot do without one, as it is to."""
        if self.outlives_servers and num_servers < 2:
            raise ConfigError(
                "--on-server-loss continue (P3_ON_SERVER_LOSS) needs another server that can take over: p3 run -s 2. "
                "Other launchers start one server on each machine, so there have to be two machines"
            )

    @property
    def joins(self) -> bool:
        """This worker or server enters a job that runs."""
        return self.join_s is not None

    @property
    def places(self) -> Optional[int]:
        """How many workers there may be at once."""
        return self.max_workers or self.num_workers

    @property
    def trial_s(self) -> float:
        """That the others wait, while nothing moves, for one that has entered the job and is not at their side yet: it
        then departs, before their barrier gives up."""
        return self.wait_timeout_s / 2

    def require(self, *names: str) -> None:
        """ConfigError that lists the variables of those settings, of `names`, that are not set."""
        missing = [variable_of(name) for name in names if getattr(self, name) is None]
        if missing:
            raise ConfigError(
                "%s%s not set. Start the job with `p3 run`, or set DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, "
                "DMLC_NUM_WORKER and DMLC_NUM_SERVER for every process."
                % (self._said_by, ", ".join(missing) + (" is" if len(missing) == 1 else " are"))
            )
        if self.joins:  # the scheduler knows how many there may be
            if self.role == "server" and not self.outlives_servers:
                raise ConfigError(
                    "P3_JOIN is set for a server, and servers can join only jobs that go on without a lost one: set "
                    "P3_ON_SERVER_LOSS=continue, or unset P3_JOIN"
                )
            return
        for name, number in (("num_workers", self.num_workers), ("num_servers", self.num_servers)):
            if self.role == name[4:-1] and self.rank is not None and number is not None and self.rank >= number:
                raise ConfigError(
                    "P3_RANK=%d must be below %s=%d: ranks start at 0." % (self.rank, variable_of(name), number)
                )
        if self.max_workers is not None and self.num_workers is not None:
            self._require_room(self.max_workers, self.num_workers)

    def _require_room(self, most: int, first: int) -> None:
        """ConfigError unless a job of so many workers at most may begin with so many."""
        if most < first:
            raise ConfigError("P3_MAX_WORKERS=%d must not be below DMLC_NUM_WORKER=%d, with which the job begins"
                              % (most, first))  # fmt: skip
        if most > first and not self.outlives_workers:
            raise ConfigError(
                "P3_MAX_WORKERS=%d is more than DMLC_NUM_WORKER=%d, and others can join only jobs that go on without "
                "lost workers: set P3_ON_WORKER_LOSS=continue, or unset P3_MAX_WORKERS" % (most, first)
            )

    def job_secret(self) -> bytes:
        """The secret from P3_SECRET or P3_SECRET_FILE. ConfigError if there is none or the file cannot serve."""
        if self.secret is not None:
            return self.secret.encode("utf-8", "surrogateescape")
        if self.secret_file is None:
            raise ConfigError(
                "%sthe job has no secret: set P3_SECRET or P3_SECRET_FILE to the same value on every node "
                "(at least %d characters), or start the job with `p3 run`, which makes one."
                % (self._said_by, MIN_SECRET_CHARACTERS)
            )
        secret = secret_file.read(self.secret_file)
        if len(secret) < MIN_SECRET_CHARACTERS:
            raise ConfigError(
                "P3_SECRET_FILE=%r holds fewer than %d characters" % (self.secret_file, MIN_SECRET_CHARACTERS)
            )
        return secret


VARIABLES = {setting.metadata["variable"]: setting for setting in fields(Settings)}

# What `p3 run` tells each worker's script, for example to choose a GPU. P3_LOCAL_SIZE also shares out the cores.
# P3_SIGNALS=0 says that signals are the launcher's, and the worker leaves them alone.
TOLD_TO_SCRIPTS = ("P3_LOCAL_RANK", "P3_LOCAL_SIZE", "P3_SIGNALS")

# Former settings, and what to do instead.
REMOVED = {
    "P3_HEARTBEAT_S": "set P3_TIMEOUT_S; a heartbeat leaves every tenth of it, and at least every second",
    "P3_LAUNCHER_PID": "pass --launcher-pid to p3 exec",
    "P3_LISTEN_FD": "pass --listen-fd to p3 exec",
    "P3_NOTSENT_LOWAT": "unset it; 128 KiB may wait unsent on each connection",
    "P3_PYTHON": "unset it; Python must have the same path on every host",
    "P3_REJOIN_TIMEOUT_S": "unset it; the others wait for one that joins the job for half of P3_WAIT_TIMEOUT_S",
    "P3_RING_BYTES": "unset it; a connection through shared memory has 512 KiB each way",
    "P3_ROUTE": "unset it; in each round a sparse key takes the route that needs fewer bytes",
    "P3_STAGE_GRADIENTS": "unset it; MXNet copies only those gradients that P3 cannot read in place",
    "P3_STATUS_FD": "pass --status-fd to p3 exec",
}


def variable_of(name: str) -> str:
    """The environment variable of a setting: variable_of('timeout_s') is 'P3_TIMEOUT_S'."""
    return Settings.__dataclass_fields__[name].metadata["variable"]


def in_job(env: Mapping[str, str]) -> bool:
    """Whether the environment asks to join a job (any DMLC_* variable) rather than to run embedded."""
    return any(name.startswith("DMLC_") and value for name, value in env.items())


def tables() -> str:
    """All settings as docs/settings.md shows them: a table below the heading of each group."""
    lines = []
    for variable, setting in VARIABLES.items():
        if setting.metadata["heading"]:
            lines += ["", "## " + setting.metadata["heading"], "", "| variable | default | meaning |", "|---|---|---|"]
        text = setting.metadata["text"] + (" The same on all nodes." if setting.metadata["common"] else "")
        lines.append("| `%s` | %s | %s |" % (variable, _shown(setting.default), text))
    return "\n".join(lines[1:])


def _shown(default) -> str:
    if default is None:
        return "unset"
    return "%g" % default if isinstance(default, (bool, float)) else str(default)


def _warn_of_unknown(env: Mapping[str, str]) -> None:
    for name in sorted(env):
        if name in REMOVED:
            log.warning("%s is set, but is no longer a setting and has no effect: %s", name, REMOVED[name])
        elif name.startswith("P3_") and name not in VARIABLES and name not in TOLD_TO_SCRIPTS:
            import difflib  # here: it is for typing errors alone

            nearest = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = "; did you mean %s?" % nearest[0] if nearest else ""
            log.warning("%s is set, but P3 has no such setting%s", name, hint)


if __name__ == "__main__":
    print(tables())
