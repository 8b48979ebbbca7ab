"""`p3 doctor` in processes that another launcher has started: rank 0's is the doctor, the first of each machine an
examiner, and the others have nothing to do."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Optional

from p3.doctor import examiner
from p3.doctor.examination import Examination
from p3.errors import ConfigError
from p3.launch.launchers import meeting
from p3.launch.launchers.meeting import Met
from p3.launch.launchers.place import Adapter, Place
from p3.settings import Settings


def examine(
    settings: Settings, adapter: Adapter, place: Place, folder: str, timeout_s: float, seconds: float
) -> Optional[dict]:
    """To rank 0 what examination.py tells; to the others None, at its end. `folder`: where processes meet. `timeout_s`:
    until a machine's examiner has come. Errors as meet() and examiner.examine() have them."""
    if place.local_rank > 0 and not place.store:  # at torch's store, all have to ask
        return None
    with meeting.arrange(settings, place, folder, os.environ) as (channel, place, address):
        if place.machines == 1:
            raise ConfigError("all processes are on one machine, and p3 doctor --here looks at that")
        met = meeting.meet(settings, place, channel, address)
        chosen = _settings_of(place, met)
        if place.rank == 0:
            remedy = "%s must have started it, and it must reach %s, port %d" % (
                adapter.starts, chosen.root_host, chosen.root_port
            )  # fmt: skip
            return asyncio.run(_be_doctor(chosen, place, met, timeout_s, seconds, remedy))
        if place.local_rank == 0:
            asyncio.run(examiner.examine(chosen, timeout_s, _name(place)))
        return None


def _settings_of(place: Place, met: Met) -> Settings:
    """The examiner's; its rank is the machine's number, where the launcher says it."""
    env = {**os.environ, **met.variables}
    env.pop("P3_RANK", None)
    return Settings.from_env({**env, "P3_RANK": place.machine} if place.machine.isdigit() else env)


def _name(place: Place) -> str:
    return "rank %d (%s)" % (place.rank, socket.gethostname())


async def _be_doctor(settings: Settings, place: Place, met: Met, timeout_s: float, seconds: float, remedy: str) -> dict:
    names = ["machine %d of %d" % (number + 1, place.machines) for number in range(place.machines)]
    examination = Examination(met.listener, settings.job_secret(), names, remedy)
    own = asyncio.ensure_future(examiner.examine(settings, timeout_s, _name(place)))
    try:
        joined = [asyncio.ensure_future(examination.joined(host)) for host in range(place.machines)]
        all_joined = asyncio.gather(*joined, return_exceptions=True)
        await asyncio.wait({own, all_joined}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if own.done():
            own.result()
        for host, has_joined in enumerate(joined):
            if not has_joined.done():
                has_joined.cancel()
                also = " (%s)" % "; ".join(examination.refused) if examination.refused else ""
                examination.give_up(host, "did not come within %g s%s" % (timeout_s, also))
        return await examination.run(seconds)
    finally:
        await examination.close()
        met.listener.close()
        await asyncio.wait({own})
