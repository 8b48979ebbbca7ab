"""What P3 makes of the variables of each launcher, and what it says when they are not clear."""

import json
import os
import socket
import sys
import threading

import pytest
from processes import Process, clean_environment

from p3.errors import ConfigError
from p3.launch.launchers import adapters, pmi
from p3.launch.launchers.place import counted, find, warning_if_alone

# As Slurm 22.05, Open MPI 4.1.4 and torchrun of torch 2.13 set them; those that P3 does not read are left out.
SLURM = {
    "SLURM_CLUSTER_NAME": "c", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,2,1(x2)", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_num_nodes": "2",
    "OMPI_MCA_orte_local_daemon_uri": "1976369152.2;tcp://10.0.0.6:57559;tcp6://[fd00::6]:37815",
    "OMPI_MCA_orte_hnp_uri": "1976369152.0;tcp://10.0.0.5,10.1.0.5:42017;tcp6://[fd00::5]:48577",
    "OMPI_MCA_orte_precondition_transports": "e003b8bc31138f3e-6be026f15e7eaa90", "PMIX_NAMESPACE": "1976369153",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "DMLC_NUM_WORKER": "4"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


def place(env, chosen=None):
    return find(adapters.ADAPTERS, env, chosen).place(env)


@pytest.mark.parametrize(
    "env, expected",
    [  # launcher, rank, size, local rank, local size, machines, machine
        (SLURM, ("slurm", 5, 7, 0, 1, 4, "2")),
        (dict(SLURM, SLURM_NODEID="0", SLURM_PROCID="2", SLURM_LOCALID="2"), ("slurm", 2, 7, 2, 3, 4, "0")),
        (OPEN_MPI, ("openmpi", 3, 4, 1, 2, 2, OPEN_MPI["OMPI_MCA_orte_local_daemon_uri"])),
        (TORCHRUN, ("torchrun", 3, 4, 1, 2, 2, "1")),
        (KUBERNETES, ("kubernetes", 3, 4, 0, 1, 4, "3")),
    ],
)
def test_places(env, expected):
    assert place(env)[:7] == expected


def test_no_launcher_is_seen_where_there_is_none():
    assert find(adapters.ADAPTERS, {"HOME": "/root", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"])
def test_each_attempt_has_a_name_of_its_own(name):
    assert place(SLURM).job == place(dict(SLURM, SLURM_PROCID="6", SLURM_NODEID="3")).job
    assert place(SLURM).job != place(dict(SLURM, **{name: "9"})).job


def test_the_launchers_host_is_known_where_it_says_so():
    assert place(SLURM).gateway == "10.0.0.1" and place(OPEN_MPI).gateway == "10.0.0.5"


def test_two_launchers_at_once_are_an_error_until_one_is_chosen():
    both = {**SLURM, **OPEN_MPI}
    with pytest.raises(ConfigError) as caught:
        place(both)
    text = str(caught.value)
    assert "srun (SLURM_STEP_ID=0, SLURM_PROCID=5); Open MPI's mpirun (OMPI_COMM_WORLD_RANK=3)" in text
    assert "--launcher slurm or --launcher openmpi" in text
    assert place(both, "slurm").rank == 5 and place(both, "openmpi").rank == 3


def test_srun_with_pmi2_is_srun():
    assert place(dict(SLURM, PMI_RANK="5", PMI_SIZE="7", PMI_FD="11")).launcher == "slurm"


@pytest.mark.parametrize(
    "env, text",
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, "(OMPI_COMM_WORLD_RANK=1), but does not say its size: OMPI_COMM_WORLD_SIZE"),
        (dict(OPEN_MPI, OMPI_MCA_orte_num_nodes=""), "its number of machines. Set DMLC_NUM_SERVER to it"),
        (dict(OPEN_MPI, OMPI_COMM_WORLD_SIZE="two"), "OMPI_COMM_WORLD_SIZE=two, from Open MPI's mpirun, is no size"),
        (dict(OPEN_MPI, OMPI_COMM_WORLD_SIZE="0"), "OMPI_COMM_WORLD_SIZE=0, from Open MPI's mpirun, is no size"),
        (dict(SLURM, SLURM_PROCID="7"), "srun contradicts itself: rank 7 of 7"),
        ({"JOB_COMPLETION_INDEX": "0"}, "but does not say its size: DMLC_NUM_WORKER is not set"),
        (MPICH, "MPICH's mpiexec has started this process (PMI_RANK=2, PMI_SIZE=3, MPI_LOCALRANKID=0), but does not"),
    ],
)
def test_what_is_not_clear_is_an_error_that_names_it(env, text):
    with pytest.raises(ConfigError) as caught:
        place(env)
    assert text in str(caught.value)


def test_a_chosen_launcher_that_was_not_there_is_an_error():
    with pytest.raises(ConfigError, match="--launcher openmpi: OMPI_COMM_WORLD_RANK is not set, which Open MPI"):
        place(SLURM, "openmpi")


def test_the_number_of_machines_may_be_given_where_the_launcher_is_silent():
    without = dict(OPEN_MPI, OMPI_MCA_orte_num_nodes="")
    assert place(dict(without, DMLC_NUM_SERVER="2")).machines == 2
    assert place(dict(without, OMPI_COMM_WORLD_LOCAL_SIZE="4")).machines == 1


@pytest.mark.parametrize(
    "mapping, size, machines",
    [
        ("(vector,(0,1,1))", 3, [0, 0, 0]),  # begun anew
        ("(vector,(0,2,2))", 3, [0, 0, 1]),
        ("(vector,(0,2,1),(0,1,2),(5,1,1))", 5, [0, 1, 0, 0, 5]),
        ("nothing", 3, []),
    ],
)
def test_hydras_mapping(mapping, size, machines):
    assert pmi.machines_of(mapping, size) == machines


def test_hydra_is_asked_at_its_socket():
    answers = {
        "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
        "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_6483_0_746716811_host",
        "get": "cmd=get_result rc=0 msg=success value=(vector,(3,2,2))",
        "finalize": "cmd=finalize_ack",
    }
    ours, hydras = socket.socketpair()
    asked = []

    def answer():
        with hydras, hydras.makefile("r") as lines:
            for line in lines:
                asked.append(line)
                hydras.sendall((answers[line.split()[0][4:]] + "\n").encode())

    thread = threading.Thread(target=answer)
    thread.start()
    with ours:
        at = place(dict(MPICH, PMI_FD=str(ours.fileno())))
    thread.join(10)
    assert at[:7] == ("mpich", 2, 3, 0, 1, 2, "1") and len(asked) == 4
    assert "kvsname=kvs_6483_0_746716811_host key=PMI_process_mapping" in asked[2]


def test_an_mxjob_tells_the_rank_within_the_role():
    config = {"cluster": {}, "labels": {}, "task": {"type": "worker", "index": 2}}
    assert adapters.rank_of_mxjob({"MX_CONFIG": json.dumps(config)}) == "2"
    with pytest.raises(ConfigError, match="does not name this task's index"):
        adapters.rank_of_mxjob({"MX_CONFIG": '{"task": {"type": "worker"}}'})


def test_ranks_that_are_told_nothing_of_machines_are_placed_once_they_have_counted_them():
    alone = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert place(alone)[:7] == place(dict(alone, LOCAL_RANK="1"))[:7] == ("torchrun", 3, 4, 0, None, 0, "")
    assert counted(place(alone), ["a", "b", "a", "b"])[:7] == ("torchrun", 3, 4, 1, 2, 2, "1")
    assert counted(place(alone), ["a", "b", "a", "b"]).store == place(TORCHRUN).store == "10.0.0.5"
    with pytest.raises(ConfigError, match="RANK=three"):
        place(dict(alone, RANK="three"))


def test_ranks_that_cannot_meet_are_warned():
    warning = warning_if_alone(adapters.ADAPTERS, {"RANK": "1", "WORLD_SIZE": "2"})
    assert warning.startswith("RANK=1, WORLD_SIZE=2: this is one of 2 processes, but each trains alone.")
    assert warning.endswith("they need MASTER_ADDR and MASTER_PORT, too")
    assert warning_if_alone(adapters.ADAPTERS, {"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("size", [1, 4])
def test_a_script_that_trains_alone_beside_others_is_warned(tmp_path, processes, size):
    env = clean_environment(**dict(SLURM, SLURM_STEP_NUM_TASKS=str(size)))
    script = "from p3.worker.session import Session; print(Session.open().num_workers)"
    processes.append(Process([sys.executable, "-c", script], env, tmp_path))
    ended = processes[0].wait(30)
    assert ended.out == "1\n"
    assert ("srun has started 4 of this process (SLURM_STEP_ID=0, SLURM_PROCID=5)" in ended.err) == (size > 1), ended


def test_the_choices_of_the_command_line_are_those_of_the_table():
    from p3.cli import parser

    for adapter in adapters.ADAPTERS:
        assert parser(["exec"]).parse_args(["exec", "--launcher", adapter.name]).launcher == adapter.name
    assert len({adapter.name for adapter in adapters.ADAPTERS}) == 5


@pytest.mark.parametrize("env, text", [
    ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "this is Slurm's batch script itself; write srun p3 exec"),
    ({**SLURM, **OPEN_MPI}, "more than one launcher has started this process"),
    (SLURM, "p3 exec needs the command that the workers run"),
])  # fmt: skip
def test_p3_exec_says_so_and_starts_nothing(monkeypatch, capsys, env, text):
    from p3 import cli

    for name in list(os.environ):
        if name.startswith(("DMLC_", "P3_", "SLURM_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["exec"]) == 1
    assert text in capsys.readouterr().err
