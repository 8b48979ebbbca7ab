"""Who has joined the job, who is missing, and which rank each gets. A state machine without I/O.

Every contradiction is a RendezvousError whose text names both nodes and both values.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from p3.cluster.messages import PROTOCOL_VERSION
from p3.cluster.node import Node, is_loopback
from p3.errors import RendezvousError


class Rendezvous:
    """join() each node as it comes; once complete(), assign() gives all of them their ranks."""

    def __init__(self, host: str, num_workers: int, num_servers: int, max_workers: Optional[int] = None) -> None:
        self._label = "scheduler (%s)" % host
        self._wanted = {"worker": num_workers, "server": num_servers}
        self._counts = {"DMLC_NUM_WORKER": num_workers, "DMLC_NUM_SERVER": num_servers, "P3_MAX_WORKERS": max_workers}
        self._joined: List[dict] = []  # `join` messages, as they came

    def join(self, message: dict) -> None:
        """Adds a node by its `join` message."""
        role, label = message["role"], label_of(message)
        if role not in self._wanted:
            raise RendezvousError("%s: a node of role %r cannot join" % (label, role))
        self._check_version(message)
        joined = self._with(role)
        if len(joined) == self._wanted[role]:
            raise RendezvousError(
                "%s is one too many: the job has %s already (%s), as DMLC_NUM_%s says"
                % (label, _count(len(joined), role), ", ".join(map(label_of, joined)), role.upper())
            )
        rank = message["rank"]
        if rank is not None:
            if rank >= self._wanted[role]:
                raise RendezvousError(
                    "%s has P3_RANK=%d, but the job has %s, counted from 0"
                    % (label, rank, _count(self._wanted[role], role))
                )
            for other in joined:
                if other["rank"] == rank:
                    raise RendezvousError("%s and %s both have P3_RANK=%d" % (label_of(other), label, rank))
        self._joined.append(message)

    def _with(self, role: str) -> List[dict]:
        return [join for join in self._joined if join["role"] == role]

    def check_entrant(self, message: dict, other: dict) -> None:
        """Of a process that wants to enter a running job, which `other` is a node of; both as their `join` messages."""
        self._check_protocol(message)
        _compare(label_of(message), message["settings"], label_of(other), other["settings"])

    def _check_version(self, message: dict) -> None:
        self._check_protocol(message)
        _compare(label_of(message), message["counts"], self._label, self._counts)

    def _check_protocol(self, message: dict) -> None:
        label = label_of(message)
        if message["protocol"] != PROTOCOL_VERSION:
            raise RendezvousError(
                "%s runs P3 %s with control protocol %d, %s has protocol %d: install the same version on all hosts"
                % (label, message["version"], message["protocol"], self._label, PROTOCOL_VERSION)
            )

    def complete(self) -> bool:
        return len(self._joined) == sum(self._wanted.values())

    def missing(self) -> str:
        """Who has not come, by count and, where ranks were set by P3_RANK, by rank."""
        parts = []
        for role, wanted in self._wanted.items():
            joined = self._with(role)
            if len(joined) < wanted:
                ranks = {message["rank"] for message in joined}
                absent = ""
                if None not in ranks:
                    absent = " (rank %s)" % ", ".join(str(rank) for rank in range(wanted) if rank not in ranks)
                parts.append("%d of %s%s" % (wanted - len(joined), _count(wanted, role), absent))
        return " and ".join(parts)

    def assign(self) -> List[Node]:
        """Each node's rank, in the order of joining: P3_RANK where set, the others by host and port or process id."""
        given: Dict[int, int] = {}  # by the id() of the message
        for role in self._wanted:
            joined = self._with(role)
            taken = {join["rank"] for join in joined}
            unranked = sorted((join for join in joined if join["rank"] is None), key=_place)
            given.update(zip(map(id, unranked), (rank for rank in range(len(joined)) if rank not in taken)))
        nodes = [Node(join["role"], given.get(id(join), join["rank"]), join["host"]) for join in self._joined]
        # Everyone is compared with worker 0.
        self._check_hosts(nodes)
        settings = {node: join["settings"] for node, join in zip(nodes, self._joined)}
        reference, *others = sorted(nodes, key=lambda node: (node.role != "worker", node.rank))
        for node in others:
            _compare(str(node), settings[node], str(reference), settings[reference])
        return nodes


    def _check_hosts(self, nodes: List[Node]) -> None:
        """A server's loopback address is none for workers that have come over a network."""
        machines = {node: join["machine"] for node, join in zip(nodes, self._joined)}
        bound = [node for node in sorted(nodes) if node.role == "server" and is_loopback(node.host)]
        others = [node for node in sorted(nodes) if node.role == "worker" and not is_loopback(node.host)]
        for server in bound:
            for worker in others:
                if machines[server] != machines[worker]:
                    raise RendezvousError(
                        "%s gives a loopback address as its own, which %s on another machine cannot reach: set "
                        "DMLC_NODE_HOST or DMLC_INTERFACE on that server's host, and DMLC_PS_ROOT_URI to a name or "
                        "address that all hosts reach" % (server, worker)
                    )


def _compare(label: str, values: dict, other_label: str, other_values: dict) -> None:
    for name in sorted(values.keys() | other_values.keys()):
        if values.get(name) != other_values.get(name):
            raise RendezvousError(
                "%s has %s=%s, but %s has %s=%s: they must be the same on all nodes"
                % (label, name, _shown(values.get(name)), other_label, name, _shown(other_values.get(name)))
            )


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)


def label_of(join: dict) -> str:
    """A node by its `join` message, before it has got its rank."""
    if join["rank"] is None:
        return "%s (%s, process %d)" % (join["role"], join["host"], join["pid"])
    return str(Node(join["role"], join["rank"], join["host"]))


def is_guest(join: dict) -> bool:
    """Whether the process is one of `p3 join`: `p3 run` says how many there are."""
    return join["counts"]["DMLC_NUM_WORKER"] is None


def _place(join: dict) -> tuple:
    return (join["host"], join["port"] or join["pid"], join["pid"])


def _count(number: int, role: str) -> str:
    return "%d %s%s" % (number, role, "" if number == 1 else "s")
