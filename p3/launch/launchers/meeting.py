"""Where the processes of a job meet: rank 0 says where its scheduler is, the others wait for that.

What it says goes through a channel: channels.py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from typing import Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

from p3.cluster.node import address_as_set, address_towards, is_loopback, listen_as_root, loopback
from p3.errors import ConfigError, RendezvousError
from p3.launch.launchers.channels import Channel, FileChannel, Known
from p3.launch.launchers.place import Place
from p3.settings import Settings

_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # RFC 5737, RFC 3849: no host has them, so the route is the default one


class Met(NamedTuple):
    variables: Dict[str, str]  # for every node of the job that this process starts; the secret's among them
    listener: Optional[socket.socket]  # rank 0's, for the scheduler


@contextlib.contextmanager
def arrange(
    settings: Settings, place: Place, folder: str, env: Mapping[str, str]
) -> Iterator[Tuple[Channel, Place, str]]:
    """The channel of this job, the place of this process where that is known by now, and the address at which the
    others reach rank 0; what rank 0 has said is withdrawn at the end, also by SIGTERM. `folder`: for files, where
    nothing better is known. In the main thread. ConfigError if nobody would know the secret, or the address cannot be
    found; RendezvousError if torch's store cannot be reached."""
    channel = _channel(settings, place, folder, env)
    place = channel.place or place
    address = place.store or address_of_rank_0(settings, place)

    def leave(number: int, _frame: object) -> None:
        withdraw()
        signal.signal(number, before)
        os.kill(os.getpid(), number)  # which now does what it would have done

    def withdraw() -> None:
        if place.rank == 0:
            channel.withdraw()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield channel, place, address
    finally:
        signal.signal(signal.SIGTERM, before)
        withdraw()


def _channel(settings: Settings, place: Place, folder: str, env: Mapping[str, str]) -> Channel:
    if place.store:
        from p3.launch.launchers.torch_store import StoreChannel  # imports torch

        return StoreChannel(settings, place, env)
    if settings.root_host is not None and settings.root_port is not None:
        settings.job_secret()
        return Known(settings)
    if not place.job:
        raise ConfigError("%s has no name for its jobs by which the processes could find each other. Set "
                          "DMLC_PS_ROOT_URI to rank 0's host, and DMLC_PS_ROOT_PORT to a free port there"
                          % place.launcher)  # fmt: skip
    return FileChannel(os.path.expanduser(folder), place)


def meet(settings: Settings, place: Place, channel: Channel, address: str) -> Met:
    """Blocks until rank 0 has said where it is. `address`: rank 0's, as the others reach it. ConfigError if the job
    cannot be as it was asked for."""
    settings.require_heir(place.machines)
    job = {"DMLC_NUM_WORKER": str(place.size), "DMLC_NUM_SERVER": str(place.machines)}
    if place.rank > 0:
        return Met({**job, **_parsed(channel.read(settings.rendezvous_timeout_s))}, None)
    secret = ""
    if settings.secret is None and settings.secret_file is None:
        if not channel.private:
            raise ConfigError("the job has no secret: set P3_SECRET or P3_SECRET_FILE to the same value on every host "
                              "before %s" % place.launcher)  # fmt: skip
        secret = secrets.token_hex(32)
    listener = listen_as_root(address, settings.root_port)
    said = "%s %d %s" % (address, listener.getsockname()[1], secret)
    if place.size > 1:
        channel.publish(said)
    return Met({**job, **_parsed(said)}, listener)


def address_of_rank_0(settings: Settings, place: Place) -> str:
    """At which the others reach this host. ConfigError if it cannot be found."""
    if settings.root_host is not None:
        return settings.root_host
    address = address_as_set(settings)
    if address is not None:
        return address
    if place.machines == 1:
        return loopback()
    for other in (place.gateway, socket.gethostname(), *_ANYWHERE):
        own = address_towards(other) if other else None
        if own is not None and not is_loopback(own):
            return own
    raise ConfigError("cannot tell which address of this host the others reach. Set DMLC_INTERFACE or "
                      "DMLC_NODE_HOST")  # fmt: skip


def _parsed(said: str) -> Dict[str, str]:
    try:
        host, port, *secret = said.split()
        variables = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(int(port))}
    except ValueError:
        raise RendezvousError("cannot understand what rank 0 said: do all hosts have the same version of P3?") from None
    return {**variables, "P3_SECRET": secret[0]} if secret else variables
