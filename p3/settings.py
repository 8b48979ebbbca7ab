"""Every setting of P3, in one place: each is a field with its variable, default, unit and meaning.

    settings = Settings.from_env(os.environ)      # ConfigError names the variable, its value and what is allowed

The environment is ps-lite's (DMLC_*), so that launchers that know it can start P3; P3's own variables are P3_*.
An unknown P3_* variable is a warning that names the nearest known one, because a typing error would otherwise
silently leave the default in force.
"""

from __future__ import annotations

import difflib
import logging
import os
import stat
from dataclasses import dataclass, field, fields
from typing import Callable, Mapping, Optional, Union

from p3.errors import ConfigError

log = logging.getLogger("p3")

MIN_SECRET_CHARACTERS = 16
ROLES = ("worker", "server", "scheduler")


# Parsers: text -> value, or ValueError with what is allowed.


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ValueError("a whole number from %d to %d" % (low, high))
        return value

    return parse


def _auto_or(parse_number: Callable[[str], int]) -> Callable[[str], Union[int, str]]:
    def parse(text: str) -> Union[int, str]:
        try:
            return text if text == "auto" else parse_number(text)
        except ValueError as error:
            raise ValueError("auto, or %s" % error) from None

    return parse


def _power_of_two(low: int, high: int) -> Callable[[str], int]:
    integer = _integer(low, high)

    def parse(text: str) -> int:
        value = integer(text)
        if value & (value - 1):
            raise ValueError("a power of two from %d to %d" % (low, high))
        return value

    return parse


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:  # also refuses NaN
            raise ValueError("a number of seconds from %g to %g" % (low, high))
        return value

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _text(text: str) -> str:
    if not text.strip() or any(character.isspace() for character in text):
        raise ValueError("a name or address without blanks")
    return text


def _command(text: str) -> str:
    if not text.strip():
        raise ValueError("a command")
    return text


def _path(text: str) -> str:
    if not text.strip():
        raise ValueError("a path")
    return text


def _secret(text: str) -> str:
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ValueError("at least %d characters; `p3 run` makes one by itself" % MIN_SECRET_CHARACTERS)
    return text


def _setting(variable: str, default, parse, meaning: str, secret: bool = False):
    metadata = {"variable": variable, "parse": parse, "meaning": meaning, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    # Who this process is and whom it joins.
    role: Optional[str] = _setting("DMLC_ROLE", None, _choice(*ROLES), "what this process is; unset: embedded")
    root_host: Optional[str] = _setting("DMLC_PS_ROOT_URI", None, _text, "name or address of the scheduler's host")
    root_port: Optional[int] = _setting("DMLC_PS_ROOT_PORT", None, _integer(1, 65535), "the scheduler's TCP port")
    num_workers: Optional[int] = _setting("DMLC_NUM_WORKER", None, _integer(1, 10000), "workers in the job")
    num_servers: Optional[int] = _setting("DMLC_NUM_SERVER", None, _integer(1, 10000), "servers in the job")
    interface: Optional[str] = _setting("DMLC_INTERFACE", None, _text, "network interface whose address is ours")
    node_host: Optional[str] = _setting("DMLC_NODE_HOST", None, _text, "address at which others reach this node")
    rank: Optional[int] = _setting("P3_RANK", None, _integer(0, 9999), "rank in its role; unset: given on joining")
    local_rank: Optional[int] = _setting("P3_LOCAL_RANK", None, _integer(0, 9999), "rank among this host's workers")
    local_size: Optional[int] = _setting("P3_LOCAL_SIZE", None, _integer(1, 10000), "workers on this host")
    secret: Optional[str] = _setting("P3_SECRET", None, _secret, "the job's secret", secret=True)
    secret_file: Optional[str] = _setting("P3_SECRET_FILE", None, _command, "file that holds the job's secret")
    tls: bool = _setting("P3_TLS", False, _flag, "1: what crosses the network is encrypted; the same on all nodes")

    # How tensors travel.
    slice_elements: int = _setting("P3_SLICE_ELEMENTS", 50000, _integer(1, 1 << 28), "elements of a slice, at most")
    partitions: Union[int, str] = _setting(
        "P3_PARTITIONS", "auto", _auto_or(_integer(1, 1 << 20)), "parts of each sparse key, at most one for each row"
    )
    route: str = _setting(
        "P3_ROUTE", "auto", _choice("auto", "rows", "slices"), "of sparse keys: what is fewer bytes, or always the one"
    )
    priority: str = _setting(
        "P3_PRIORITY", "auto", _choice("auto", "caller", "index", "off"), "by first use, caller's, number, or none"
    )
    sum_order: str = _setting(
        "P3_SUM_ORDER", "rank", _choice("rank", "arrival"), "rank: reproducible; arrival: less memory on the server"
    )
    server_threads: int = _setting("P3_SERVER_THREADS", 0, _integer(0, 256), "threads of a server that only sum")
    notsent_lowat_bytes: int = _setting(
        "P3_NOTSENT_LOWAT", 128 << 10, _integer(1 << 12, 1 << 30), "bytes that may wait unsent in the kernel, per van"
    )
    local: str = _setting(
        "P3_LOCAL", "shm", _choice("shm", "unix", "tcp"), "to a server of the same machine: shared memory, or a socket"
    )
    local_aggregation: bool = _setting(
        "P3_LOCAL_AGGREGATION", True, _flag, "1: workers of one machine add up their gradients before they leave it"
    )
    ring_bytes: int = _setting(
        "P3_RING_BYTES", 512 << 10, _power_of_two(4096, 1 << 30), "shared memory of a van, each way; a power of two"
    )
    checksum: bool = _setting("P3_CHECKSUM", False, _flag, "1: CRC32C on every slice; an altered one ends the job")
    stage_gradients: bool = _setting(
        "P3_STAGE_GRADIENTS", False, _flag, "1: MXNet copies each gradient before it is sent"
    )

    # How long to wait.
    heartbeat_s: float = _setting("P3_HEARTBEAT_S", 1.0, _seconds(0.01, 3600), "between two signs of life")
    timeout_s: float = _setting("P3_TIMEOUT_S", 10.0, _seconds(0.1, 86400), "silence that means death")
    rendezvous_timeout_s: float = _setting(
        "P3_RENDEZVOUS_TIMEOUT_S", 60.0, _seconds(0.1, 86400), "until all nodes must have joined"
    )
    on_worker_loss: str = _setting(
        "P3_ON_WORKER_LOSS", "fail", _choice("fail", "wait"), "wait: the others wait for another process of that rank"
    )
    rejoin_timeout_s: float = _setting(
        "P3_REJOIN_TIMEOUT_S", 300.0, _seconds(0.1, 864000), "that others wait for a lost worker"
    )
    wait_timeout_s: float = _setting(
        "P3_WAIT_TIMEOUT_S", 600.0, _seconds(0.1, 864000), "barrier, set_optimizer and the like wait for living workers"
    )
    straggler_s: float = _setting(
        "P3_STRAGGLER_S", 30.0, _seconds(0.1, 864000), "a worker keeps others waiting before the log names it"
    )
    stuck_s: float = _setting(
        "P3_STUCK_S", 3600.0, _seconds(0, 864000), "a living worker keeps others waiting before the job fails; 0: never"
    )

    # How P3 is run.
    log_level: str = _setting(
        "P3_LOG", "warning", _choice("debug", "info", "warning", "error"), "least severity of what is logged"
    )
    trace: Optional[str] = _setting("P3_TRACE", None, _path, "directory for a record of what happens to each slice")
    snapshot_dir: Optional[str] = _setting(
        "P3_SNAPSHOT_DIR", None, _path, "directory, shared by all nodes, of snapshots to resume from; unset: none"
    )
    snapshot_every: int = _setting(
        "P3_SNAPSHOT_EVERY", 100, _integer(1, 1 << 31), "of the rounds given to kv.snapshot, each so-many-th is taken"
    )
    snapshot_keep: int = _setting("P3_SNAPSHOT_KEEP", 2, _integer(1, 10000), "snapshots that stay, the newest")
    ssh: str = _setting("P3_SSH", "ssh -o BatchMode=yes", _command, "command by which `p3 run` reaches other hosts")
    python: Optional[str] = _setting("P3_PYTHON", None, _command, "Python on other hosts; unset: the same path as here")

    # Set by `p3 run` for the processes it starts; not meant for people.
    listen_fd: Optional[int] = _setting("P3_LISTEN_FD", None, _integer(3, 1 << 20), "scheduler: its listening socket")
    status_fd: Optional[int] = _setting("P3_STATUS_FD", None, _integer(3, 1 << 20), "scheduler: where it reports to")
    launcher_pid: Optional[int] = _setting("P3_LAUNCHER_PID", None, _integer(1, 1 << 30), "whom to die with")

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Reads and checks all variables; an empty one counts as unset. ConfigError on the first that is wrong."""
        values = {}
        for setting in fields(cls):
            text = env.get(variable_of(setting.name), "")
            if text:
                values[setting.name] = _parse(setting, text)
        _warn_of_unknown(env)
        if values.get("on_worker_loss") == "wait" and values.setdefault("local_aggregation", False):
            raise ConfigError(
                "P3_LOCAL_AGGREGATION=1 and P3_ON_WORKER_LOSS=wait exclude each other: what a worker has added up for "
                "others would be lost with it. Leave P3_LOCAL_AGGREGATION unset."
            )
        settings = cls(**values)
        if settings.heartbeat_s * 2 > settings.timeout_s:
            raise ConfigError(
                "P3_HEARTBEAT_S=%g is too long for P3_TIMEOUT_S=%g: a living peer would count as dead. "
                "Make the time-out at least twice the heartbeat." % (settings.heartbeat_s, settings.timeout_s)
            )
        return settings

    @property
    def replaces_workers(self) -> bool:
        return self.on_worker_loss == "wait"

    def require(self, *names: str) -> None:
        """ConfigError that lists the variables of those settings, of `names`, that are not set."""
        missing = [variable_of(name) for name in names if getattr(self, name) is None]
        if missing:
            raise ConfigError(
                "%s: %s not set. Start the job with `p3 run`, or set DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, "
                "DMLC_NUM_WORKER and DMLC_NUM_SERVER for every process."
                % (self.role or "p3", ", ".join(missing) + (" is" if len(missing) == 1 else " are"))
            )
        for name, number in (("num_workers", self.num_workers), ("num_servers", self.num_servers)):
            if self.role == name[4:-1] and self.rank is not None and number is not None and self.rank >= number:
                raise ConfigError(
                    "P3_RANK=%d is not below %s=%d: ranks count from 0." % (self.rank, variable_of(name), number)
                )

    def job_secret(self) -> bytes:
        """The secret from P3_SECRET or P3_SECRET_FILE. ConfigError if there is none or the file cannot serve."""
        if self.secret is not None:
            return self.secret.encode("utf-8", "surrogateescape")
        if self.secret_file is None:
            raise ConfigError(
                "%s: the job has no secret: set P3_SECRET or P3_SECRET_FILE to the same value on every node "
                "(at least %d characters), or start the job with `p3 run`, which makes one."
                % (self.role or "p3", MIN_SECRET_CHARACTERS)
            )
        try:
            with open(self.secret_file, "rb") as file:
                others_may_read = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
                secret = file.read(1 << 16).strip()
        except OSError as error:
            raise ConfigError("P3_SECRET_FILE=%r cannot be read: %s" % (self.secret_file, error.strerror)) from None
        if others_may_read:
            raise ConfigError(
                "P3_SECRET_FILE=%r can be read by others. Run: chmod 600 %s" % (self.secret_file, self.secret_file)
            )
        if len(secret) < MIN_SECRET_CHARACTERS:
            raise ConfigError(
                "P3_SECRET_FILE=%r holds fewer than %d characters" % (self.secret_file, MIN_SECRET_CHARACTERS)
            )
        return secret


_BY_NAME = {setting.name: setting for setting in fields(Settings)}
VARIABLES = {setting.metadata["variable"]: setting for setting in fields(Settings)}


def variable_of(name: str) -> str:
    """The environment variable of a setting: variable_of('timeout_s') is 'P3_TIMEOUT_S'."""
    return _BY_NAME[name].metadata["variable"]


def in_job(env: Mapping[str, str]) -> bool:
    """Whether the environment asks to join a job (any DMLC_* variable) rather than to run embedded."""
    return any(name.startswith("DMLC_") and value for name, value in env.items())


def _parse(setting, text: str):
    try:
        return setting.metadata["parse"](text)
    except ValueError as error:
        shown = "(not shown)" if setting.metadata["secret"] else repr(text)
        raise ConfigError("%s=%s: allowed is %s." % (setting.metadata["variable"], shown, error)) from None


def _warn_of_unknown(env: Mapping[str, str]) -> None:
    for name in sorted(env):
        if name.startswith("P3_") and name not in VARIABLES:
            nearest = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = "; did you mean %s?" % nearest[0] if nearest else ""
            log.warning("%s is set, but P3 knows no such setting%s", name, hint)
