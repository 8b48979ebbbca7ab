"""`p3 exec` under a launcher that the tests play: how a job of two machines with two workers each begins and ends."""

import json
import os
import signal
import sys

import launched_jobs as jobs
import pytest
from processes import SECRET, Process, command_lines

SIZE, EACH = 4, 2


def start(processes, folder, *arguments, others=None, **variables):
    """As mpirun starts the four; they have this machine in common, which the launcher takes for two. `others`: by
    rank, commands other than the usual script."""
    started = []
    for rank in range(SIZE):
        place = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(SIZE),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % EACH),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(EACH),
            "OMPI_MCA_orte_num_nodes": str(SIZE // EACH),
            "OMPI_MCA_orte_local_daemon_uri": "daemon %d" % (rank // EACH),
            "PMIX_NAMESPACE": "1234",
        }
        env = jobs.environment(folder, **{**place, **variables})
        command = jobs.command(folder, *arguments)
        if rank in (others or {}):
            command = command[: command.index("exec") + 1] + others[rank]
        started.append(Process(command, env, folder))
    processes.extend(started)
    return started


def ends(started, folder, timeout_s=40):
    """The exit codes, once nothing of the job is left."""
    ended = [one.wait(timeout_s) for one in started]
    jobs.wait_until(lambda: not jobs.living(folder), 10)
    assert os.listdir(folder / ".p3") == []
    return [one.code for one in ended], "".join(one.out for one in ended), "".join(one.err for one in ended)


def test_each_machine_brings_a_server_and_all_get_their_place(processes, tmp_path):
    started = start(processes, tmp_path, 5)
    codes, out, err = ends(started, tmp_path)
    assert codes == [0] * SIZE, err
    number, digests, _ = jobs.digests(out)
    assert (number, len(digests)) == (SIZE, 1) and out.count("of 4 with 2 servers") == SIZE, out
    told = jobs.workers(tmp_path, SIZE)
    assert [(one["P3_LOCAL_RANK"], one["P3_LOCAL_SIZE"]) for one in told] == [("0", "2"), ("1", "2")] * 2


def test_the_secret_goes_through_a_private_file_that_is_gone_once_all_have_joined(processes, tmp_path):
    started = start(processes, tmp_path, 0)
    told = jobs.workers(tmp_path, SIZE)
    jobs.wait_until(lambda: os.listdir(tmp_path / ".p3") == [], 10)
    assert os.stat(tmp_path / ".p3").st_mode & 0o777 == 0o700
    with open("/proc/%d/environ" % told[3]["pid"], "rb") as file:
        (secret,) = [text[10:] for text in file.read().split(b"\0") if text.startswith(b"P3_SECRET=")]
    assert len(secret) == 64
    lines = command_lines()
    assert not [line for line in lines if secret in line]
    for one in started:
        one.signal(signal.SIGTERM)
    codes, out, err = ends(started, tmp_path)
    # Who hears of the others' end before its own signal ends of that.
    assert set(codes) <= {1, 128 + signal.SIGTERM} and 128 + signal.SIGTERM in codes, err
    assert secret.decode() not in out + err


# rank of the supervisor; what is killed: itself, or the child of that role
VICTIMS = [(0, "worker"), (3, "worker"), (0, "server"), (2, "server"), (0, ""), (1, ""), (2, "")]


@pytest.mark.parametrize("rank, role", VICTIMS, ids=lambda value: str(value) or "p3exec")
def test_whoever_is_killed_all_end_and_none_with_success(processes, tmp_path, rank, role):
    started = start(processes, tmp_path, 0)
    jobs.workers(tmp_path, SIZE)
    supervisor = started[rank].popen.pid
    os.kill(jobs.node_of(supervisor, role) if role else supervisor, signal.SIGKILL)
    codes, _, err = ends(started, tmp_path)
    expected = {"worker": 128 + signal.SIGKILL, "": -signal.SIGKILL}.get(role, 1)
    assert codes == [expected if at == rank else 1 for at in range(SIZE)], err
    if role:
        which = "worker %d" % rank if role == "worker" else "the %s of worker %d" % (role, rank)
        assert "p3 exec: %s (" % which in err and "ended with signal SIGKILL" in err


def test_a_scheduler_that_is_killed_is_outlived(processes, tmp_path):
    started = start(processes, tmp_path, "patient")
    jobs.workers(tmp_path, SIZE)
    supervisor = started[0].popen.pid
    for _ in range(2):
        scheduler = jobs.node_of(supervisor, "scheduler")
        os.kill(scheduler, signal.SIGKILL)
        jobs.wait_until(lambda: jobs.node_of(supervisor, "scheduler", default=scheduler) != scheduler)
    for process in started:
        process.signal(signal.SIGTERM)  # to the script, which then takes steps and a barrier and ends
    codes, out, err = ends(started, tmp_path)
    assert codes == [0] * SIZE, err
    number, digests, _ = jobs.digests(out)
    assert (number, len(digests)) == (SIZE, 1)
    assert err.count("ended with signal SIGKILL; starting another one, while the job goes on") == 2


def test_a_worker_that_is_killed_is_left_behind_if_the_job_goes_on_without(processes, tmp_path):
    started = start(processes, tmp_path, "patient", P3_ON_WORKER_LOSS="continue")
    told = jobs.workers(tmp_path, SIZE)
    for rank in (0, 2):  # with the first, whose nodes stay
        os.kill(told[rank]["pid"], signal.SIGKILL)
    for rank in (1, 3):
        os.kill(told[rank]["pid"], signal.SIGTERM)  # it then takes steps and a barrier, and ends
    codes, out, err = ends(started, tmp_path)
    assert codes == [0] * SIZE, err
    assert err.count("ended with signal SIGKILL; the job goes on without it") == 2
    number, digests, _ = jobs.digests(out)
    assert (number, len(digests)) == (2, 1), out


def what_all_said(started, folder):
    """At their end, of workers who went on without a server and have the same weights."""
    for process in started:
        process.signal(signal.SIGTERM)  # to the script, which then takes steps and a barrier and ends
    codes, out, err = ends(started, folder)
    assert codes == [0] * SIZE, err
    number, digests, _ = jobs.digests(out)
    assert (number, len(digests)) == (SIZE, 1), out
    return err


def test_a_server_that_is_killed_is_left_behind_if_the_job_goes_on_without(processes, tmp_path):
    started = start(processes, tmp_path, "patient", P3_ON_SERVER_LOSS="continue")
    jobs.workers(tmp_path, SIZE)
    os.kill(jobs.node_of(started[2].popen.pid, "server"), signal.SIGKILL)
    assert what_all_said(started, tmp_path).count("ended with signal SIGKILL; the job goes on without it") == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_so_is_one_that_freezes_and_it_is_ended_behind_the_job(processes, tmp_path, rank):
    started = start(processes, tmp_path, "patient", P3_ON_SERVER_LOSS="continue", P3_TIMEOUT_S="3")
    jobs.workers(tmp_path, SIZE)
    os.kill(jobs.node_of(started[rank].popen.pid, "server"), signal.SIGSTOP)
    err = what_all_said(started, tmp_path)
    assert err.count("which did not end by itself; the job went on without it") == 1, err


@pytest.mark.parametrize("rank", [0, 2])
def test_so_is_one_that_wakes_up_again_and_ends_by_itself(processes, tmp_path, rank):
    started = start(processes, tmp_path, "patient", P3_ON_SERVER_LOSS="continue", P3_TIMEOUT_S="3")
    jobs.workers(tmp_path, SIZE)
    server = jobs.node_of(started[rank].popen.pid, "server")
    os.kill(server, signal.SIGSTOP)
    while b"is lost; server" not in started[1].popen.stderr.readline():
        pass
    os.kill(server, signal.SIGCONT)
    jobs.wait_until(lambda: server not in jobs.living(tmp_path), 15)
    what_all_said(started, tmp_path)


def test_workers_that_do_not_notice_the_end_of_the_job_are_ended(processes, tmp_path):
    started = start(processes, tmp_path, "stuck")
    told = jobs.workers(tmp_path, SIZE)
    os.kill(told[1]["pid"], signal.SIGKILL)
    codes, _, err = ends(started, tmp_path)
    assert codes == [1, 128 + signal.SIGKILL, 1, 1]
    for rank in (0, 2, 3):
        assert "p3 exec: stopping worker %d (" % rank in err
    assert err.count("): the job failed\n") == 3


def test_a_worker_that_is_killed_gives_its_exit_code_however_late_its_p3_exec_sees_it(processes, tmp_path):
    """When it looks, its neighbours have failed already, for want of its worker."""
    started = start(processes, tmp_path, "stuck")
    told = jobs.workers(tmp_path, SIZE)
    os.kill(started[1].popen.pid, signal.SIGSTOP)
    os.kill(told[1]["pid"], signal.SIGKILL)
    assert [started[rank].wait(60).code for rank in (0, 2, 3)] == [1] * 3
    os.kill(started[1].popen.pid, signal.SIGCONT)
    assert started[1].wait(60).code == 128 + signal.SIGKILL


def test_a_script_that_catches_sigterm_comes_to_an_orderly_end(processes, tmp_path):
    started = start(processes, tmp_path, "patient")
    jobs.workers(tmp_path, SIZE)
    for process in jobs.living(tmp_path):  # as scancel does
        os.kill(process, signal.SIGTERM)
    codes, out, err = ends(started, tmp_path)
    assert codes == [0] * SIZE, err
    assert jobs.digests(out)[0] == SIZE


def test_a_script_that_fails_before_it_joins_ends_the_job_with_its_code(processes, tmp_path):
    started = start(processes, tmp_path, 0, others={3: [sys.executable, "-c", "raise SystemExit(7)"]})
    codes, _, err = ends(started, tmp_path)
    assert codes == [1, 1, 1, 7]
    assert "p3 exec: worker 3 (" in err and "ended with exit code 7" in err


def test_a_command_that_does_not_exist_is_an_error_that_names_it(processes, tmp_path):
    codes, _, err = ends(start(processes, tmp_path, 0, others={1: ["no-such-program"]}), tmp_path)
    assert codes[1] == 1 and "cannot run 'no-such-program': No such file" in err
    assert 0 not in codes


def test_a_scheduler_at_a_known_place_and_a_secret_need_no_file(processes, tmp_path, make_cluster):
    cluster = make_cluster()
    cluster.listener.close()  # its port is free, and the kernel does not hand it out again soon
    known = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(cluster.port), "P3_SECRET": SECRET}
    (tmp_path / ".p3").touch(mode=0o600)  # no folder
    started = start(processes, tmp_path, 3, **known)
    ended = [one.wait(40) for one in started]
    assert [one.code for one in ended] == [0] * SIZE, ended
    assert jobs.workers(tmp_path, SIZE)[0]["port"] == str(cluster.port)


def test_the_pods_of_an_indexed_job_train(processes, tmp_path, make_cluster):
    cluster = make_cluster()
    cluster.listener.close()
    env = {"DMLC_NUM_WORKER": "2", "DMLC_PS_ROOT_URI": "localhost", "DMLC_PS_ROOT_PORT": str(cluster.port)}
    started = [
        Process(jobs.command(tmp_path, 3), jobs.environment(tmp_path, JOB_COMPLETION_INDEX=str(index), P3_SECRET=SECRET,
                                                            DMLC_NODE_HOST="", **env), tmp_path)
        for index in range(2)
    ]  # fmt: skip
    processes.extend(started)
    ended = [one.wait(40) for one in started]
    assert [one.code for one in ended] == [0, 0], ended
    assert "of 2 with 2 servers" in ended[0].out


def test_the_processes_of_an_mxjob_train(processes, tmp_path, make_cluster):
    cluster = make_cluster(workers=2, servers=1)
    cluster.listener.close()
    started = []
    for role, index in [("scheduler", 0), ("server", 0), ("worker", 1), ("worker", 0)]:
        config = {"cluster": {}, "labels": {}, "task": {"type": role, "index": index}}
        env = cluster.env(DMLC_ROLE=role, DMLC_USE_KUBERNETES="1", MX_CONFIG=json.dumps(config))
        command = jobs.command(tmp_path, 3) if role == "worker" else jobs.command(tmp_path, 3)[:4]
        started.append(Process(command, {**jobs.environment(tmp_path), **env}, tmp_path))
    processes.extend(started)
    ended = [one.wait(40) for one in started]
    assert [one.code for one in ended] == [0] * 4, ended
    assert ended[2].out.startswith("worker 1 of 2") and ended[3].out.startswith("worker 0 of 2")
