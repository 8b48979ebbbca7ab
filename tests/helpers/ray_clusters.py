"""A Ray cluster of several nodes on this machine, each at a loopback address of its own, and what is left in it."""

import contextlib
import os
import time

ADDRESSES = ["127.0.0.%d" % number for number in range(2, 10)]


class RayNodes:
    """Ray's own test cluster. This process is not connected to it."""

    def __init__(self, nodes, **resources):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anybody
        from ray.cluster_utils import Cluster

        self._resources = resources
        self.cluster = Cluster()
        for _ in range(nodes):
            self.add()

    def add(self):
        """One more node, the first one the head; its address."""
        number = len(self.cluster.list_all_nodes())
        head = {} if number else {"include_dashboard": False}
        self.cluster.add_node(node_ip_address=ADDRESSES[number], **head, **self._resources)
        return ADDRESSES[number]

    def kill_raylet(self, address):
        (node,) = [node for node in self.cluster.list_all_nodes() if node.node_ip_address == address]
        node.kill_raylet()

    @property
    def address(self):
        return self.cluster.address

    @property
    def session_folder(self):
        return self.cluster.head_node.get_session_dir_path()

    def left(self):
        """Actors and placement groups that are not gone."""
        state = self.cluster.global_state
        actors = [actor["ActorClassName"] for actor in state.actor_table(None).values() if actor["State"] != "DEAD"]
        groups = [group["name"] for group in state.placement_group_table().values() if group["state"] != "REMOVED"]
        return actors + groups

    def shutdown(self):
        self.cluster.shutdown()


def living(port):
    """{process: its role or None} of all processes whose environment has a job's scheduler at that port."""
    found = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open("/proc/%s/environ" % process, "rb") as file:
            variables = dict(pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair)
            if variables.get(b"DMLC_PS_ROOT_PORT") == str(port).encode():
                found[int(process)] = variables.get(b"DMLC_ROLE", b"").decode()
    return found


def wait_until(condition, timeout_s=30.0):
    """Its first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "not within %g s" % timeout_s
        time.sleep(0.05)
    return value
