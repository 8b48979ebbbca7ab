"""`p3 run --on ray`: servers and workers as processes of a Ray cluster.

Bundle i of one placement group holds worker i and server i, and Ray spreads the bundles over the nodes. In each there
is an actor for the worker and one for the server (agent.py), which starts the process, hands on its output, and
takes it along when it ends. The scheduler stays beside `p3 run`, which runs on a node of the cluster. Everything in Ray
belongs to this driver: if that is killed, Ray removes the group, and the actors with their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from typing import Any, Awaitable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from p3.cluster.node import address_as_set
from p3.errors import ConfigError
from p3.launch.engines import Engine, Process
from p3.launch.execute import p3_exec
from p3.launch.placement import Host, Task, forwarded_environment, tasks_on
from p3.launch.ray import agent as ray_agent
from p3.launch.ray import seal as ray_seal
from p3.settings import Settings

try:
    import ray
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ConfigError(
        "--on ray: Ray is not installed for %s. Run: %s -m pip install ray 'cryptography>=40'"
        % (sys.executable, sys.executable)
    ) from None

_SERVER_CPUS = 1
_CONNECT_S = 5.0
_LOOK_S = 0.5
_PATIENCE_S = 3.0  # before the user is told what is being waited for
_FAREWELL_S = 5.0  # for Ray to take back what was taken
# What Ray gives each of its workers by the resources that it was asked for: ours would be the driver's.
_RAYS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


class Wants(NamedTuple):
    """What is asked of Ray for each worker, and for how long."""

    cpus: int = 1
    gpus: float = 0.0
    timeout_s: float = 60.0
    timeout_option: str = "--room-timeout"  # by which the user says it


def connect() -> None:
    """To the cluster of RAY_ADDRESS, or that which this host is a node of; blocks. ConfigError if there is none."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address.startswith("ray://"):
        raise ConfigError(
            "--on ray: RAY_ADDRESS=%s is a Ray Client address. The workers must reach the scheduler, so run this on a "
            "node of the cluster, or with: ray job submit -- p3 run --on ray ..." % address
        )
    ray.cloudpickle.register_pickle_by_value(ray_agent)
    ray.cloudpickle.register_pickle_by_value(ray_seal)
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise ConfigError(
            "--on ray: no Ray cluster is reached from here (RAY_ADDRESS=%s): %s. On its first host: ray start "
            "--head; on the others: ray start --address=HOST:6379" % (address, _first_line(error).rstrip("."))
        ) from None


class RayCluster(Engine):
    def __init__(self, settings: Settings, wants: Wants) -> None:
        """See connect(); ConfigError, too, if this host has nothing to seal the secret with."""
        try:
            self._keys = ray_seal.KeyPair()
        except ImportError as error:
            raise ConfigError("--on ray: %s" % error) from None
        connect()
        self._settings, self._wants = settings, wants
        self.root = address_as_set(settings) or ray.util.get_node_ip_address()
        self._group: Optional[PlacementGroup] = None
        self._agents: List[Any] = []  # all that were made
        # By role and rank: an agent that has not started anything yet, and its greeting.
        self._ready: Dict[Tuple[str, int], Tuple[Any, dict]] = {}
        self._started: Dict[Tuple[str, int], Any] = {}

    # Placing

    async def place(self, num_workers: int, num_servers: int) -> List[Task]:
        bundles = [self._resources(number, num_workers, num_servers) for number in range(max(num_workers, num_servers))]
        name = "p3-run-%s" % secrets.token_hex(4)  # no two groups may have one
        self._group = ray.util.placement_group(bundles, strategy="SPREAD", name=name)
        await self._wait_for_room(bundles)
        servers = [("server", rank) for rank in range(num_servers)]
        workers = [("worker", rank) for rank in range(num_workers)]
        made = {task: self._make_agent(*task) for task in servers + workers}  # all at the same time
        greetings = await asyncio.gather(*(self._greeting(*each) for each in made.items()))
        self._ready = {task: (agent, greeting) for (task, agent), greeting in zip(made.items(), greetings)}
        hosts = {task: Host(greeting["address"]) for task, greeting in zip(made, greetings)}
        return tasks_on([hosts[task] for task in servers], [hosts[task] for task in workers])

    def _resources(self, number: int, num_workers: int, num_servers: int) -> Dict[str, float]:
        """Of one bundle."""
        cpus = self._wants.cpus * (number < num_workers) + _SERVER_CPUS * (number < num_servers)
        return {"CPU": cpus, **({"GPU": self._wants.gpus} if self._wants.gpus and number < num_workers else {})}

    async def _wait_for_room(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ray gives all of the bundles or none."""
        wants, loop = self._wants, asyncio.get_running_loop()
        began, is_told = time.monotonic(), False
        while not await loop.run_in_executor(None, self._group.wait, _LOOK_S):  # can be cancelled after each look
            waited_s = time.monotonic() - began
            if waited_s >= wants.timeout_s:
                raise ConfigError(
                    "--on ray: no room within %g s (%s). Requested: %s. The cluster: %s"
                    % (wants.timeout_s, wants.timeout_option, _asked(bundles), _there_is())
                )
            if waited_s >= _PATIENCE_S and not is_told:
                is_told = True
                text = "p3: waiting up to %g s for Ray to have room for %s; %s"
                print(text % (wants.timeout_s, _asked(bundles), _there_is()), file=sys.stderr, flush=True)

    def _make_agent(self, role: str, rank: int) -> Any:
        wants = {"num_cpus": self._wants.cpus, "num_gpus": self._wants.gpus} if role == "worker" else {
            "num_cpus": _SERVER_CPUS}  # fmt: skip
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        agent = ray.remote(ray_agent.Agent).options(scheduling_strategy=where, max_concurrency=4, **wants).remote()
        self._agents.append(agent)
        return agent

    async def _greeting(self, task: Tuple[str, int], agent: Any) -> dict:
        name, timeout_s = "%s %d" % task, self._settings.rendezvous_timeout_s
        try:
            greeting = await asyncio.wait_for(_result(agent.greet.remote()), timeout_s)
            if "problem" not in greeting:
                return greeting
            problem = "on %s, %s" % (greeting["address"], greeting["problem"])
        except asyncio.TimeoutError:
            problem = "it did not start within %g s (P3_RENDEZVOUS_TIMEOUT_S)" % timeout_s
        except ray.exceptions.RayError as error:
            problem = _first_line(error)
        raise ConfigError("--on ray: the actor for %s: %s" % (name, problem))

    # Starting

    async def start(self, task: Task, job: Mapping[str, str], secret: str, command: Sequence[str]) -> Process:
        key = (task.role, task.rank)
        if key in self._started:  # another actor takes the place of that one, which may be lost with its node
            ray.kill(self._started[key])
            agent = self._make_agent(*key)
            self._ready[key] = agent, await self._greeting(key, agent)
        agent, greeting = self._ready.pop(key)
        self._started[key] = agent
        env = {"PYTHONUNBUFFERED": "1", **forwarded_environment(os.environ), **job, **task.env}
        if self._settings.interface is None:
            env["DMLC_NODE_HOST"] = greeting["address"]
        for name in _RAYS:
            env.pop(name, None)
        sealed = self._keys.seal(secret, greeting["public"])
        words = p3_exec("--secret-stdin", "--", *command)
        try:
            without = ("P3_SECRET", "P3_SECRET_FILE")
            problem = await _result(agent.start.remote(words, env, without, os.getcwd(), self._keys.public, sealed))
        except ray.exceptions.RayError as error:
            problem = _first_line(error)
        if problem is not None:
            raise ConfigError("cannot start %s on %s: %s" % (task.name, greeting["address"], problem))
        return RayProcess(agent)

    # Ending

    async def release(self) -> None:
        for agent in self._agents:
            ray.kill(agent)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        gone = {asyncio.ensure_future(_until_dead(agent)) for agent in self._agents}
        if gone:
            _, left = await asyncio.wait(gone, timeout=_FAREWELL_S)
            for waiting in left:
                waiting.cancel()


class RayProcess(Process):
    """What an agent has started, as seen from here."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._code: Optional[int] = None
        self._lost = ""  # Ray's words, if it was lost with its actor
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self._following = asyncio.ensure_future(self._follow())

    @property
    def returncode(self) -> Optional[int]:
        return self._code

    async def wait(self) -> None:
        await asyncio.wait({self._following})

    def signal(self, number: int) -> None:
        if self._code is None:
            self._agent.signal.remote(number)

    def how(self) -> str:
        return "its Ray actor: " + self._lost if self._lost else super().how()

    async def _follow(self) -> None:
        code: Optional[int] = None
        try:
            while code is None:
                chunks, code = await _result(self._agent.read.remote())
                for number, data in chunks:
                    (self.stdout if number == 1 else self.stderr).feed_data(data)
        except ray.exceptions.RayError as error:
            self._lost, code = _first_line(error), -signal.SIGKILL
        finally:
            self._code = code
            self.stdout.feed_eof()
            self.stderr.feed_eof()


async def _result(reference: Awaitable) -> Any:
    """A coroutine that asyncio takes for a task; Ray's references are awaitable, but none."""
    return await reference


async def _until_dead(agent: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        while True:
            await agent.greet.remote()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _asked(bundles: Sequence[Mapping[str, float]]) -> str:
    texts = [_shown(bundle) for bundle in bundles]
    return ", ".join("%d x {%s}" % (texts.count(text), text) for text in dict.fromkeys(texts))


def _there_is() -> str:
    """In the cluster now."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    having = ", ".join("%s has {%s}" % (node["NodeManagerAddress"], _shown(node["Resources"])) for node in nodes)
    return "%s; free: {%s}" % (having, _shown(ray.available_resources()))


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join("%s %g" % (name, resources[name]) for name in ("CPU", "GPU") if resources.get(name))
