"""`p3 run --on ray` on a Ray cluster of two nodes and more, all of them on this machine."""

import glob
import json
import os
import re
import signal
import socket
import sys
import threading

import pytest
from joined_jobs import require_right
from launched_jobs import parent, scheduler_of
from plugin_jobs import python
from processes import ROOT, Process, clean_environment, command_lines
from ray_clusters import RayNodes, living, wait_until

from p3.launch.ray.agent import Agent

pytest.importorskip("ray", reason="no Ray here; make test-ray installs it")

NODES = 2


@pytest.fixture(scope="module")
def ray_nodes():
    nodes = RayNodes(NODES, num_cpus=4, num_gpus=1)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def start(ray_nodes, processes, tmp_path):
    """start(workers, servers, *arguments, script, options) -> the Process of `p3 run`, of on_ray.py or another. Those
    of its environment that are the script's alone, P3S_*, no engine forwards: its command has them."""

    def start(workers, servers, *arguments, script=None, options=(), **variables):
        command = [sys.executable, "-m", "p3", "run", "--on", "ray", "-n", str(workers), "-s", str(servers), *options]
        command += ["env", *("%s=%s" % one for one in variables.items() if one[0].startswith("P3S_"))]
        command += python(script, *arguments) if script else python("on_ray.py", tmp_path, *arguments)
        env = clean_environment(**{"RAY_ADDRESS": ray_nodes.address, **variables})
        processes.append(Process(command, env, tmp_path))
        return processes[-1]

    yield start
    wait_until(lambda: not ray_nodes.left())


def told(folder, workers, job=None):
    """What each worker has told of itself, by rank; waits until the job runs."""
    paths = [folder / str(rank) for rank in range(workers)]

    def all_have():
        assert job is None or job.popen.poll() is None, job.wait()
        return all(path.exists() for path in paths)

    wait_until(all_have, 60)
    return [json.loads(path.read_text()) for path in paths]


def digests(text):
    return sorted(re.findall(r"worker \d began at \d+ and has \w+", text))


# Where, and what is shown


def test_workers_are_spread_over_the_nodes_and_shown_as_by_p3_run(start, tmp_path):
    """On one node there would be room for both, and for their servers."""
    finished = start(2, 2, 3).wait()
    assert (finished.code, finished.err) == (0, ""), finished
    lines = sorted(finished.out.splitlines())
    assert [line[:10] for line in lines] == ["[worker %d]" % (number // 2) for number in range(4)]
    assert lines[0] == "[worker 0] and that is all" and lines[1].startswith("[worker 0] worker 0 began at 0 and has ")
    workers = told(tmp_path, 2)
    assert sorted(one["DMLC_NODE_HOST"] for one in workers) == ["127.0.0.2", "127.0.0.3"]
    assert [(one["P3_LOCAL_RANK"], one["P3_LOCAL_SIZE"]) for one in workers] == [("0", "1")] * 2


def test_each_worker_gets_the_gpus_and_processors_that_were_asked_for(start, tmp_path):
    options = ["--gpus-per-worker", "1", "--cpus-per-worker", "2"]
    finished = start(2, 1, 1, options=options, CUDA_VISIBLE_DEVICES="7", OMP_NUM_THREADS="9").wait()
    assert finished.code == 0, finished
    workers = told(tmp_path, 2)
    assert [(one["CUDA_VISIBLE_DEVICES"], one["OMP_NUM_THREADS"]) for one in workers] == [("0", "2")] * 2
    assert len({one["DMLC_NODE_HOST"] for one in workers}) == 2


def test_what_there_is_no_room_for_is_an_error_that_says_what_there_is(start, ray_nodes):
    options = ["--gpus-per-worker", "1", "--room-timeout", "4"]
    finished = start(3, 1, 1, options=options).wait()
    waiting, error = finished.err.splitlines()
    assert finished.code == 1 and "waiting up to 4 s for Ray to have room for" in waiting
    assert error.startswith("p3: --on ray: no room within 4 s (--room-timeout). Requested: "
                            "1 x {CPU 2, GPU 1}, 2 x {CPU 1, GPU 1}. The cluster: "), error  # fmt: skip
    for address in ("127.0.0.2", "127.0.0.3"):
        assert address + " has {CPU 4, GPU 1}" in error
    assert error.endswith("free: {CPU 8, GPU 2}")


def test_a_job_that_waits_for_room_can_be_interrupted(start, processes):
    job = start(3, 1, 1, options=["--gpus-per-worker", "1"])
    wait_until(lambda: b"waiting up to" in job.popen.stderr.readline())
    job.signal(signal.SIGINT)
    assert job.wait().code == 130


def test_a_ray_client_whose_host_is_no_node_is_told_what_to_do_instead(start):
    finished = start(1, 1, 1, RAY_ADDRESS="ray://127.0.0.2:10001").wait()
    assert finished.code == 1 and finished.err.startswith("p3: --on ray: RAY_ADDRESS=ray://127.0.0.2:10001 is a")
    assert "ray job submit -- p3 run --on ray" in finished.err


def test_an_address_where_no_cluster_is_is_an_error_at_once_that_says_how_to_start_one(start):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "127.0.0.1:%d" % free.getsockname()[1]
    finished = start(1, 1, 1, RAY_ADDRESS=address).wait(20)
    assert finished.code == 1 and "(RAY_ADDRESS=%s): [Errno 111] Connection refused" % address in finished.err
    assert finished.err.endswith("On its first host: ray start --head; on the others: ray start --address=HOST:6379\n")


def test_who_has_nothing_to_seal_the_secret_with_is_told_what_to_install(start, tmp_path, monkeypatch):
    hidden = tmp_path / "hidden" / "cryptography"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('hidden')")
    finished = start(1, 1, 1, PYTHONPATH=os.pathsep.join([str(hidden.parent), str(ROOT)])).wait()
    assert finished.code == 1 and "-m pip install 'cryptography>=40'" in finished.err, finished
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    greeting = Agent().greet()
    assert greeting["address"] and "-m pip install 'cryptography>=40'" in greeting["problem"]


def test_the_doctor_asks_each_node(ray_nodes, processes, tmp_path):
    command = [sys.executable, "-m", "p3", "doctor", "--on", "ray", "-n", "2", "--json", "--seconds", "0.1"]
    processes.append(Process(command, clean_environment(RAY_ADDRESS=ray_nodes.address), tmp_path))
    finished = processes[-1].wait()
    assert (finished.code, finished.err) == (0, ""), finished
    found = json.loads(finished.out)
    assert sorted(host["address"] for host in found["hosts"]) == ["127.0.0.2", "127.0.0.3"]
    assert len([path for path in found["paths"] if "mbit" in path]) == 2
    wait_until(lambda: not ray_nodes.left())


# How it ends


def test_the_job_ends_with_the_code_of_a_worker_that_fails(start, tmp_path):
    finished = start(2, 2, "seven").wait()
    assert finished.code == 1
    assert "ended with exit code 1; its last line: ValueError: invalid literal for int()" in finished.err


def of_role(role):
    """The job's process of that role: a server's supervisor, which has its environment, was started before it."""
    return lambda worker, job: max(process for process, has in job.items() if has == role)


# What is killed, as found from a worker's process and the job's; what `p3 run` then says of its end.
VICTIMS = {
    "worker": (lambda worker, job: worker, "worker 1 on 127.0.0.. ended with exit code 137"),
    "server": (of_role("server"), "server 0 on 127.0.0.. ended with exit code 137"),
    "supervisor": (lambda worker, job: parent(worker), "worker 1 on 127.0.0.. ended with signal SIGKILL"),
    "actor": (lambda worker, job: parent(parent(worker)), "worker 1 on 127.0.0.. ended with its Ray actor: "),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_whoever_is_killed_all_end_and_nothing_is_left(start, tmp_path, victim):
    job = start(2, 1, 0)
    worker = told(tmp_path, 2, job)[1]
    port = worker["DMLC_PS_ROOT_PORT"]
    find, text = VICTIMS[victim]
    os.kill(find(worker["pid"], living(port)), signal.SIGKILL)
    finished = job.wait()
    assert finished.code == 128 + signal.SIGKILL and re.search(text, finished.err), finished
    wait_until(lambda: not living(port))


def test_a_job_outlives_its_scheduler_and_ends_with_the_bits_of_an_undisturbed_one(start):
    def digests(finished):
        assert finished.code == 0, finished
        return sorted(re.findall(r"worker \d: \w{64}", finished.out))

    undisturbed = digests(start(2, 1, 20, script="without_scheduler.py").wait())
    job = start(2, 1, 20, script="without_scheduler.py")
    while not (line := job.read_line()).endswith("step 2"):
        assert line, job.wait()
    os.kill(scheduler_of(job), signal.SIGKILL)
    finished = job.wait()
    assert digests(finished) == undisturbed and len(undisturbed) == 2
    assert "the scheduler ended with signal SIGKILL; starting another one, while the job goes on" in finished.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_job_whose_p3_run_is_ended(start, tmp_path, number):
    job = start(2, 2, 0)
    port = told(tmp_path, 2, job)[0]["DMLC_PS_ROOT_PORT"]
    job.signal(number)
    finished = job.wait(20)
    if number == signal.SIGKILL:
        assert finished.code == -number
    else:
        last = "p3 run: interrupted by %s; all processes have been stopped" % signal.Signals(number).name
        assert (finished.code, finished.err.splitlines()[-1]) == (128 + number, last)
        assert not living(port)
    wait_until(lambda: not living(port))


def test_a_killed_job_is_started_again_and_ends_with_the_bits_of_an_undisturbed_one(start, tmp_path):
    snapshots = ["--snapshot-every", "2", "--snapshot-dir"]
    whole = start(2, 2, 7, options=[*snapshots, str(tmp_path / "whole")]).wait()
    assert whole.code == 0, whole
    again = start(2, 2, 7, 5, options=["--restarts", "1", *snapshots, str(tmp_path / "again")]).wait()
    assert again.code == 0 and "; restarting it (restart 1 of 1)" in again.err, again
    assert [line.replace("began at 4", "began at 0") for line in digests(again.out)] == digests(whole.out)
    assert len(digests(whole.out)) == 2 and again.out.count("began at 4") == 2


def test_another_process_is_started_for_a_lost_worker_and_joins(start, tmp_path):
    gates = {"P3S_DEATHS": "1:3.0", "P3S_GATES": "5"}
    options = ["--on-worker-loss", "continue", "--rejoin"]
    job = start(2, 1, 20, tmp_path, script="joining.py", options=options, P3_TIMEOUT_S="5", **gates)
    said = job.read_until("waits to join the job")
    (tmp_path / "go-5").touch()
    finished = job.wait()
    assert finished.code == 0 and finished.err.count("another one is started now") == 1, finished
    require_right(tmp_path, said + finished.out, lambda step: [0] if 3 <= step < 5 else [0, 1], 2)


def test_a_job_that_loses_a_node_goes_on_with_the_others(start, ray_nodes, tmp_path):
    lost = ray_nodes.add()
    options = ["--restarts", "1", "--snapshot-every", "1", "--snapshot-dir", str(tmp_path / "snapshots")]
    job = start(3, 1, 0, options=options)
    assert lost in {one["DMLC_NODE_HOST"] for one in told(tmp_path, 3, job)}
    wait_until(lambda: glob.glob(str(tmp_path / "snapshots" / "round-*[0-9]")))
    for rank in range(3):
        (tmp_path / str(rank)).unlink()
    ray_nodes.kill_raylet(lost)
    workers = told(tmp_path, 3, job)
    assert {one["DMLC_NODE_HOST"] for one in workers} == {"127.0.0.2", "127.0.0.3"}
    local = sorted((one["P3_LOCAL_SIZE"], one["P3_LOCAL_RANK"]) for one in workers)
    assert local == [("1", "0"), ("2", "0"), ("2", "1")]
    job.signal(signal.SIGTERM)
    finished = job.wait()
    assert finished.code == 143 and re.search("on %s ended with" % lost, finished.err), finished
    wait_until(lambda: not living(workers[0]["DMLC_PS_ROOT_PORT"]))


# The secret


class Overheard:
    """All packets on the loopback device, as long as it is open."""

    def __init__(self):
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # linux/if_ether.h: ETH_P_ALL
        self._socket.bind(("lo", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        self._socket.settimeout(0.2)
        self._packets, self._goes_on = [], True
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self):
        while self._goes_on:
            try:
                self._packets.append(self._socket.recv(1 << 17))
            except socket.timeout:
                pass

    def close(self):
        self._goes_on = False
        self._thread.join()
        self._socket.close()

    def has(self, text):
        return any(text.encode() in packet for packet in self._packets)


@pytest.mark.skipif(os.getuid() != 0, reason="only root sees packets; run as root")
def test_the_secret_is_in_no_packet_no_log_of_rays_and_on_no_command_line(start, ray_nodes, tmp_path):
    overheard = Overheard()
    try:
        job = start(2, 1, 0, P3_LOG="debug")
        worker = told(tmp_path, 2, job)[1]
        secret = worker["P3_SECRET"]
        lines = command_lines()
    finally:
        overheard.close()
    job.signal(signal.SIGTERM)
    finished = job.wait()
    assert len(secret) == 64 and not [line for line in lines if secret.encode() in line]
    assert secret not in finished.out + finished.err
    assert overheard.has(str(tmp_path)) and not overheard.has(secret)  # the command crosses in the clear
    assert overheard.has("DMLC_PS_ROOT_PORT")
    logs = [path for path in glob.glob(ray_nodes.session_folder + "/**", recursive=True) if os.path.isfile(path)]
    assert len(logs) > 10
    assert not [path for path in logs if secret.encode() in open(path, "rb").read()]
