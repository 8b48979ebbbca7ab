"""Torch's own key-value store as the channel of a job that torchrun has started; the only file here that imports torch.

The store may be that of the starts before, with what they have left there, and no variable tells one start from another
(TORCHELASTIC_RESTART_COUNT is each agent's own, and stays when a host comes or goes). So rank 0 first forgets who has
asked, and answers only those who ask then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from datetime import timedelta
from typing import Callable, List, Mapping, Optional

import torch.distributed

from p3.cluster.node import machine_id
from p3.errors import RendezvousError
from p3.launch.launchers.channels import Channel, read_private
from p3.launch.launchers.place import Place, counted
from p3.settings import Settings

_ASK_AGAIN_S = 0.2
_stores: List[torch.distributed.Store] = []  # kept, as rank 0's process may be its server


class StoreChannel(Channel):
    """torch's store; on a single host, a file whose path the store tells."""

    place: Place

    def __init__(self, settings: Settings, place: Place, env: Mapping[str, str]) -> None:
        """Blocks until all have said on which machine they are, if the launcher does not."""
        self._rank, self._size, self._timeout_s = place.rank, place.size, settings.rendezvous_timeout_s
        self._path = ""
        try:
            timeout = timedelta(seconds=settings.rendezvous_timeout_s)
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timeout))
        except (RuntimeError, ValueError) as error:
            raise RendezvousError("torch's store at MASTER_ADDR and MASTER_PORT cannot be reached: %s"
                                  % str(error).splitlines()[0]) from None  # fmt: skip
        self._store = torch.distributed.PrefixStore("p3/%s/" % env.get("TORCHELASTIC_RUN_ID", ""), store)
        _stores.append(self._store)
        self.place = place if place.machines else counted(place, self._machines())
        self.private = self.place.machines == 1

    def publish(self, text: str) -> None:
        if self.private:
            file, self._path = tempfile.mkstemp(prefix="p3-secret-")  # of mode 600
            with open(file, "w") as opened:
                opened.write(text)
        self._answer("address", lambda asked: self._path or text)

    def read(self, timeout_s: float) -> str:
        said = self._ask("address", "", timeout_s)
        return self._content(said) if self.private else said

    def _machines(self) -> List[str]:
        """That of each rank."""
        if self._rank > 0:
            said = self._ask("machines", machine_id(), self._timeout_s)
        else:
            said = self._answer("machines", lambda asked: " ".join([machine_id(), *asked]))
        if len(said.split()) != self._size:
            raise RendezvousError("cannot understand what rank 0 said: do all hosts have the same version of P3?")
        return said.split()

    def _answer(self, topic: str, make: Callable[[List[str]], str]) -> str:
        """To every other worker of this start, what `make` makes of what they have said when asking, by rank."""
        nonces, texts, deadline = [], [], time.monotonic() + self._timeout_s
        for rank in range(1, self._size):
            self._store.delete_key("%s/%d" % (topic, rank))
        for rank in range(1, self._size):
            asked = self._get("%s/%d" % (topic, rank), deadline - time.monotonic())
            if asked is None:
                raise RendezvousError("rank %d has not asked in %g s where the scheduler is (P3_RENDEZVOUS_TIMEOUT_S)"
                                      % (rank, self._timeout_s))  # fmt: skip
            nonce, _, text = asked.partition(" ")
            nonces.append(nonce)
            texts.append(text)
        answer = make(texts)
        for nonce in nonces:
            self._store.set("told/" + nonce, answer)
        return answer

    def _ask(self, topic: str, text: str, timeout_s: float) -> str:
        nonce, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
        while True:
            # Again and again, as rank 0 may just have forgotten it.
            self._store.set("%s/%d" % (topic, self._rank), "%s %s" % (nonce, text))
            said = self._get("told/" + nonce, _ASK_AGAIN_S)
            if said is not None:
                return said
            if time.monotonic() > deadline:
                raise RendezvousError("rank 0 has not said in %g s where its scheduler is (P3_RENDEZVOUS_TIMEOUT_S)"
                                      % timeout_s)  # fmt: skip

    @staticmethod
    def _content(path: str) -> str:
        try:
            return read_private(path)
        except OSError as error:
            text = "rank 0 has ended, or is not on this host: %s: %s"
            raise RendezvousError(text % (path, error.strerror)) from None

    def _get(self, key: str, timeout_s: float) -> Optional[str]:
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            return self._store.get(key).decode()
        except RuntimeError:
            return None

    def withdraw(self) -> None:
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
