"""A worker of Ray Train's TorchTrainer: what torchrun would tell it, and Ray Train does not.

Before it calls the training function, Ray Train sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK,
MASTER_ADDR and MASTER_PORT in each worker's environment, and opens torch's store there. It does not say how many nodes
there are, and there is no secret. The workers agree on both through an actor (p3/launch/ray/meeting.py); rank 0 makes
the secret, and seals it for each of the others (seal.py there). The rest is torchrun.py's.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import sys
import threading
from typing import Any, Dict, Mapping, Tuple

from p3.errors import ConfigError, RendezvousError
from p3.launch.ray.meeting import Meeting
from p3.launch.ray.seal import KeyPair
from p3.settings import Settings
from p3.torch.start import torchrun
from p3.worker.session import Session

_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def started(env: Mapping[str, str]) -> bool:
    """Whether this is a Ray actor with the variables that Ray Train sets for PyTorch."""
    ray = sys.modules.get("ray")
    if ray is None or not all(env.get(name) for name in _TOLD) or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def open_session(env: Mapping[str, str]) -> Session:
    """This worker's. Blocks until all are there; errors as of completed() and torchrun.open_session().

    All is done in a thread of its own, which leaves the job when the training function returns, in a thread of Ray
    Train's: that kills the process some time later, and nothing that Python calls at a process's end runs then.
    """
    opened: concurrent.futures.Future = concurrent.futures.Future()
    function = threading.current_thread()

    def follow() -> None:
        try:
            told, meeting = completed(env)
            opened.set_result(torchrun.open_session(told))
            del meeting
        except BaseException as error:  # handed to who waits below
            opened.set_exception(error)
            return
        function.join()
        opened.result().close()

    threading.Thread(target=follow, daemon=True, name="p3-ray-train").start()
    return opened.result()


def completed(env: Mapping[str, str]) -> Tuple[Dict[str, str], Any]:
    """`env` with the variables that torchrun would have set, and the secret if it has none; and the meeting's actor, to
    be held until all workers are in the job: Ray ends it when the worker that has made it holds it no longer.

    Blocks until all workers have called it: RendezvousError if they do not in P3_RENDEZVOUS_TIMEOUT_S. ConfigError if
    torch has no store, or nothing is installed that seals."""
    if not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        raise ConfigError("P3 in Ray Train needs MASTER_ADDR and MASTER_PORT: leave TorchConfig's init_method at 'env'")
    settings, rank = Settings.from_env(env), int(env["RANK"])
    made = {"GROUP_RANK": env["NODE_RANK"]}
    try:
        keys = KeyPair()
    except ImportError as error:
        raise ConfigError("P3 in Ray Train: %s" % error) from None
    meeting = _meeting(int(env["WORLD_SIZE"]), "p3 at %s:%s" % (env["MASTER_ADDR"], env["MASTER_PORT"]))
    joined = _within(settings, meeting.join.remote(rank, int(env["NODE_RANK"]), keys.public))
    made["GROUP_WORLD_SIZE"] = str(len({node for node, _ in joined.values()}))
    if settings.secret is None and settings.secret_file is None:
        if rank == 0:
            made["P3_SECRET"] = secrets.token_hex(32)
            sealed = {other: keys.seal(made["P3_SECRET"], public) for other, (_, public) in joined.items() if other}
            _within(settings, meeting.say.remote(sealed))
        else:
            made["P3_SECRET"] = keys.unseal(_within(settings, meeting.hear.remote(rank)), joined[0][1])
    return {**env, **made}, meeting


def _meeting(size: int, name: str) -> Any:
    """Made by who comes first, and gone with that worker. No other workers have torch's store at that place."""
    import ray

    options = {"name": name, "get_if_exists": True, "num_cpus": 0, "max_concurrency": 2 * size + 1}
    return ray.remote(Meeting).options(**options).remote(size)


def _within(settings: Settings, reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=settings.rendezvous_timeout_s)
    except ray.exceptions.GetTimeoutError:
        problem = "they were not all there in %g s (P3_RENDEZVOUS_TIMEOUT_S)" % settings.rendezvous_timeout_s
    except ray.exceptions.RayError as error:
        problem = str(error).strip().splitlines()[0]
    raise RendezvousError("the workers of Ray Train have not met: %s" % problem)
