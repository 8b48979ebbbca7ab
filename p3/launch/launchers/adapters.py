"""The launchers that P3 knows, and the variables by which each tells a process its place.

A new one is one more entry, a row in tests/launch/test_places.py, and a section of docs/launchers.md.
"""

from __future__ import annotations

import json
import re
import socket
from typing import Mapping, Optional

from p3.errors import ConfigError
from p3.launch.launchers import pmi
from p3.launch.launchers.place import Adapter, first_of

Env = Mapping[str, str]


def _tasks_of_this_node(env: Env) -> Optional[str]:
    """Slurm's tasks for each node, as 2(x3),1."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [count] * int(times or 1)
    node = env.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _address_of_mpirun(env: Env) -> Optional[str]:
    """Of 1657602048.0;tcp://10.0.0.5,10.1.0.5:38617;tcp6://[fd00::5,fd01::5]:42017"""
    found = re.search(r";(?:tcp4?://|tcp6://\[)([\da-f.:]*[\da-f])", env.get("OMPI_MCA_orte_hnp_uri", ""))
    return found and found.group(1)


def _one_if_all_are_local(env: Env) -> Optional[str]:
    all_are = env.get("OMPI_COMM_WORLD_SIZE") == env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return "1" if all_are else env.get("DMLC_NUM_SERVER")


SLURM = Adapter(
    name="slurm",
    starts="srun",
    seen=("SLURM_STEP_ID", "SLURM_PROCID"),  # a batch script has the second one, too
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size=_tasks_of_this_node,
    machines="SLURM_STEP_NUM_NODES",
    machine="SLURM_NODEID",
    job=("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    gateway="SLURM_LAUNCH_NODE_IPADDR",
    threads="SLURM_CPUS_PER_TASK",
)

OPEN_MPI = Adapter(
    name="openmpi",
    starts="Open MPI's mpirun",
    seen=("OMPI_COMM_WORLD_RANK",),
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    machines=first_of("OMPI_MCA_orte_num_nodes", _one_if_all_are_local),  # Open MPI 5 does not set the former
    machine=first_of("OMPI_MCA_orte_local_daemon_uri", lambda env: socket.gethostname()),
    job=("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_precondition_transports"),
    gateway=_address_of_mpirun,
    may_count=True,
)

MPICH = Adapter(
    name="mpich",
    starts="MPICH's mpiexec",
    seen=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # srun --mpi=pmi2 sets the first two
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    machines=lambda env: pmi.ask(env).machines,
    machine=lambda env: pmi.ask(env).machine,
    job=(lambda env: pmi.ask(env).job,),
)

# And whoever sets the first four as it does, like Kubeflow's PyTorchJob, which tells a process nothing of machines.
TORCHRUN = Adapter(
    name="torchrun",
    starts="torchrun",
    seen=("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    machines="GROUP_WORLD_SIZE",
    machine="GROUP_RANK",
    places=("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    store="MASTER_ADDR",
)

# The manifest says how many pods there are and where the first one is: DMLC_NUM_WORKER, and DMLC_PS_ROOT_URI and _PORT.
KUBERNETES = Adapter(
    name="kubernetes",
    starts="an indexed Kubernetes Job",
    seen=("JOB_COMPLETION_INDEX",),
    rank="JOB_COMPLETION_INDEX",
    size="DMLC_NUM_WORKER",
    local_rank=lambda env: "0",
    local_size=lambda env: "1",
    machines="DMLC_NUM_WORKER",
    machine="JOB_COMPLETION_INDEX",
    job=(),
)

ADAPTERS = (SLURM, OPEN_MPI, MPICH, TORCHRUN, KUBERNETES)


def outside_a_step(env: Env) -> bool:
    """In a Slurm batch script itself, where srun has not started anything yet."""
    return bool(env.get("SLURM_JOB_ID")) and not env.get("SLURM_STEP_ID")


def rank_of_mxjob(env: Env) -> str:
    """Kubeflow's MXJob gives every process its role and the scheduler's address in DMLC_*, so that P3 has nothing to
    add but this: its index within the role, told in a JSON object. ConfigError if that is not as expected."""
    text = env["MX_CONFIG"]
    try:
        index = json.loads(text)["task"]["index"]
        if not isinstance(index, int) or index < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ConfigError("MX_CONFIG=%s, from MXJob, does not name this task's index" % text) from None
    return str(index)
