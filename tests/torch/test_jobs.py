"""Jobs of several workers: nothing blocks, uneven data, snapshots, torchrun, and finding weights that differ."""

import json
import os
import re
import signal
import socket
import sys
import time

import forked
import launched_jobs as jobs_of_launchers
import plugin_jobs as jobs
import pytest
import torchruns
from lab_traces import needs_lab
from processes import SECRET, Process, clean_environment

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.measure.lab import hosts as lab  # noqa: E402


def script(*arguments):
    return jobs.python("torch_jobs.py", *arguments)


def torchrun(*options):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port), *options]


def of_torch(command):
    return forked.started(command)  # torchrun starts Python itself


def test_no_call_waits_for_the_network():
    status, output = jobs.run_p3(1, 1, script("frozen_server", 0))
    assert status == 0, output
    assert "the step returned while the server was frozen" in output and "and took effect afterwards" in output


def test_the_script_may_have_another_default_device():
    status, output = jobs.run(jobs.python("torch_elsewhere.py"))
    assert status == 0 and "trained" in output, output


def test_page_faults_of_a_step_are_counted():
    status, output = jobs.run(jobs.python("torch_faults.py", "--steps", "1"), timeout_s=100)
    assert status == 0, output
    assert json.loads(output.splitlines()[0])["faults"] >= 0


@pytest.mark.parametrize("kind", ["adam", "adamax", "synchronous"])
def test_workers_may_take_different_numbers_of_steps(tmp_path, kind):
    status, output = jobs.run_p3(3, 2, script("uneven", tmp_path, kind, 2, 5, 3), P3_CHECK="1")
    assert status == 0, output
    assert output.count("follows") == 3


@pytest.mark.parametrize("kind", ["adamax", "synchronous", "clipped"])
def test_a_worker_that_follows_others_by_another_learning_rate_is_an_error(kind):
    status, output = jobs.run_p3(2, 1, script("joins_without_its_schedule", kind))
    assert status != 0, output
    assert "in join() the learning rates of this worker's param groups add up to 0.05, and those of the workers that " \
        "take the step to 0.025; the weight decays" in output  # fmt: skip


def test_where_the_servers_update_a_worker_that_follows_needs_no_learning_rate():
    status, output = jobs.run_p3(2, 1, script("joins_without_its_schedule", "adam"))
    assert status == 0, output
    assert len(set(re.findall(r"ends with (.*)", output))) == 1, output


@pytest.mark.parametrize("kind, how", [
    ("adamax", "loads first"), ("adamax", "loads later"), ("synchronous", "loads first"), ("clipped", "loads later"),
    ("adamax", "with settings"), ("adamax", "joins first"), ("adamax", "joins"),
])  # fmt: skip
def test_optimizers_that_begin_otherwise_on_one_worker_are_an_error(kind, how):
    status, output = jobs.run_p3(2, 1, script("begins_alone", kind, how))
    assert status != 0, output
    assert "the workers' optimizers differ, and each updates its own weights" in output


@pytest.mark.parametrize("kind", ["adamax", "synchronous", "clipped"])
def test_optimizers_that_all_load_one_state_end_alike(kind):
    status, output = jobs.run_p3(2, 1, script("begins_alone", kind, "all load"))
    assert status == 0, output
    assert len(set(re.findall(r"ends with (.*)", output))) == 1, output


@pytest.mark.parametrize("staged", [[], ["--staged"]])
@pytest.mark.parametrize("staleness, workers", [("0", 2), ("1", 2), ("3", 3), ("inf", 2)])
def test_workers_may_be_steps_apart(staged, staleness, workers):
    command = jobs.python("torch_jobs.py", *staged, "apart", staleness, 30)
    status, output = jobs.run_p3(workers, 2, command)
    assert status == 0, output
    assert output.count("kept within its staleness") == workers
    assert output.count("so no two runs are alike") == (staleness != "0")
    ahead = sum(map(int, re.findall(r"staleness, (\d+) times", output)))
    assert (ahead > 0) == (staleness != "0" and not staged), output


@pytest.mark.parametrize("workers, differ_in, told", [(3, -1, 1), (2, -1, 1), (2, 1, 0), (1, -1, 0)])
def test_workers_that_all_have_the_same_data_are_told_so_once(workers, differ_in, told):
    status, output = jobs.run_p3(workers, 2, script("alike", differ_in))
    assert status == 0 and output.count("ends") == workers, output
    assert output.count("had the same inputs in each of their first 3 steps, as if nobody shared") == told, output
    assert output.count("DistributedSampler") == told


def test_with_staleness_a_step_does_not_wait_for_the_answer_to_the_one_before():
    status, output = jobs.run_p3(1, 1, script("goes_ahead"))
    assert status == 0, output
    assert output.count("beside its predecessor's answer") == 7 and "nothing was lost" in output


def test_with_staleness_a_gradient_written_when_it_was_under_way_is_an_error():
    status, output = jobs.run_p3(1, 1, script("keeps_gradients"))
    assert status == 0, output
    told = re.findall(r"gradient of (\S+) was written after step.*give P3 a clone, or call optimizer.sync", output)
    assert told == ["0.weight"] * 3 + ["1.weight"] * 6, output


def test_workers_that_push_in_turn_have_the_weights_of_one_process():
    status, output = jobs.run_p3(2, 2, script("in_turn", 6), P3_SLICE_ELEMENTS="20")
    assert status == 0, output
    assert output.count("is as one process") == 2


@pytest.mark.parametrize("job", ["broadcasts_again", "saves_before_it_loads", "saves_behind_a_load"])
def test_a_worker_that_is_early_or_late_gets_what_its_own_call_stands_for(tmp_path, job):
    status, output = jobs.run_p3(2, 1, script(job, tmp_path))
    assert status == 0, output


def test_workers_that_are_steps_apart_begin_with_the_optimizers_state():
    status, output = jobs.run_p3(2, 1, script("begins_with_states"))
    assert status == 0, output
    assert output.count("has seen all steps counted") == 2


def test_workers_that_are_steps_apart_cannot_update():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match=r"staleness and sums handed to the workers \(the servers have no LBFGS"):
        p3.torch.DistributedOptimizer(optimizer, model, staleness=2)


def test_a_parameter_that_a_worker_has_not_touched_sends_nothing():
    status, output = jobs.run_p3(2, 2, script("untouched"), P3_LOCAL_AGGREGATION="0")
    assert status == 0, output
    assert output.count("sent its own layer alone") == 2


def test_a_step_of_mean_gradients_of_zero_is_a_step_also_with_a_learning_rate_of_zero():
    """And none that makes the optimizer's states, as torch.distributed.checkpoint takes one."""
    status, output = jobs.run_p3(2, 1, script("warms_up"))
    assert status == 0, output
    assert output.count("has warmed up") == 2


def test_all_workers_follow_rank_0s_order_when_it_changes():
    status, output = jobs.run_p3(3, 2, script("ways", 8))
    assert status == 0, output
    assert sorted(re.findall(r"worker (\d) follows ([\d ]+)", output)) == [
        (str(rank), "4 2 0 3 1") for rank in range(3)
    ], output


@pytest.mark.parametrize("aggregates", "01")
@pytest.mark.parametrize("synchronous", [0, 1])
def test_compressed_gradients_are_those_of_the_documentation(synchronous, aggregates):
    settings = {"P3_CHECK": "1", "P3_LOCAL_AGGREGATION": aggregates}
    status, output = jobs.run_p3(2, 2, script("compressed", synchronous), **settings)
    assert status == 0, output
    assert output.count("follows") == 2


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_that_overflows_leaves_nothing_behind_with_a_grad_scaler(workers):
    command = jobs.python("loss_scaled.py", "torch")
    status, output = jobs.run(command) if workers == 1 else jobs.run_p3(workers, 2, command, P3_CHECK="1")
    assert status == 0, output
    assert output.count(": as if there had been no overflow") == 6 * workers


@pytest.mark.parametrize("workers", [2, 3])
def test_deep_gradient_compression_has_the_bits_of_numpy(workers):
    status, output = jobs.run_p3(workers, 2, script("dgc"), P3_CHECK="1")
    assert status == 0, output
    assert output.count("has the bits of NumPy") == workers
    assert output.count("is compressed, {") == 1, output


@pytest.mark.parametrize("kind", ["adam", "adamax", "synchronous"])
def test_workers_whose_learning_rates_differ_end_the_job(kind):
    status, output = jobs.run_p3(2, 1, script("differing_rates", kind))
    assert status != 0 and "disagree in round" in output and "the same optimizer, learning rate" in output, output


@pytest.mark.parametrize("kind", ["on_servers", "on_workers", "synchronous"])
def test_check_names_the_parameter_that_one_worker_has_written(kind):
    """A synchronous optimizer's script may write to weights, but all workers must write the same."""
    status, output = jobs.run_p3(2, 1, script("written", kind), P3_CHECK="1")
    text = "the workers' weights differ, in 1.weight." if kind == "synchronous" else "parameter 1.weight was written by"
    assert status != 0 and text in output, output


@pytest.mark.parametrize(
    "kind",
    ["adamw", "momentum", "cycled", "adamax", "compressed", "compressed_synchronous", "dgc", "both_ways",
     "both_ways_synchronous", "both_ways_exact", "each_its_own", "each_its_own_synchronous", "lowrank",
     "lowrank_synchronous"],
)
def test_a_job_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path, kind):
    whole = jobs.run_p3(2, 2, script("resumed", tmp_path, kind, 7, 0), P3_CHECK="1")
    assert whole[0] == 0, whole[1]
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--restarts", "1"]
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "2", "P3_CHECK": "1"}
    status, output = jobs.run([*launcher, *script("resumed", tmp_path, kind, 7, 5)], timeout_s=100, **variables)
    assert status == 0, output
    assert "began at 4" in output
    assert sorted(re.findall(r"has ([0-9a-f]{8})", output)) == sorted(re.findall(r"has ([0-9a-f]{8})", whole[1]))


def test_torchrun_starts_a_job_and_a_restart_resumes(tmp_path):
    whole = jobs.run_p3(2, 1, script("resumed", tmp_path, "adamw", 7, 0))
    assert whole[0] == 0, whole[1]
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*torchrun(*options), *of_torch(script("resumed", tmp_path, "adamw", 7, 5))]
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "2"}
    variables["DMLC_NODE_HOST"] = "127.0.0.1"  # which says nothing of another launcher
    status, output = jobs.run(command, timeout_s=100, **variables)
    assert status == 0, output
    assert "began at 4" in output
    assert sorted(re.findall(r"has ([0-9a-f]{8})", output)) == sorted(re.findall(r"has ([0-9a-f]{8})", whole[1]))


@pytest.mark.timeout(240)
def test_torchrun_on_two_hosts_needs_a_secret_and_then_trains_and_the_doctor_asks_both(tmp_path):
    def run(started=of_torch(script("uneven", tmp_path, "adam", 2, 1)), **variables):
        command = [*torchruns.agent(2), *started]
        agents = [Process(command, {**forked.environment(), **variables}, tmp_path) for _ in range(2)]
        try:
            return [agent.wait(80) for agent in agents]
        finally:
            for agent in agents:
                agent.end()

    refused = run(P3_RENDEZVOUS_TIMEOUT_S="5")
    assert all(one.code != 0 for one in refused)
    assert any("set P3_SECRET or P3_SECRET_FILE to the same value on every host" in one.err for one in refused)
    trained = run(P3_SECRET="a secret that only tests use")
    assert [one.code for one in trained] == [0, 0], trained
    assert sum(one.out.count("follows") for one in trained) == 2
    one, other = run(["--no-python", *jobs_of_launchers.doctor(tmp_path)], P3_SECRET="a secret that only tests use")
    asked = one if one.out else other
    assert (one.code, other.code) == (0, 0) and len(json.loads(asked.out)["hosts"]) == 2, (one, other)


def told_no_machines(rank, size, address, port):
    """As Kubeflow's PyTorchJob has it, and others."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def test_workers_that_know_their_rank_alone_count_their_machines(tmp_path, processes):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(2):
        env = {**forked.environment(), **told_no_machines(rank, 2, "127.0.0.1", port)}
        processes.append(Process(script("uneven", tmp_path, "adam", 2, 1), env, tmp_path))
    ended = [one.wait(80) for one in processes]
    assert [(one.code, one.out.count("follows")) for one in ended] == [(0, 1)] * 2, ended


@needs_lab
def test_ranks_of_two_machines_that_are_told_nothing_more_have_a_server_on_each(tmp_path, processes):
    with lab.lab(2) as pair:
        for rank, host in enumerate((pair[0], pair[1], pair[0])):
            env = jobs_of_launchers.environment(
                tmp_path, P3_SECRET=SECRET, DMLC_NODE_HOST="", **told_no_machines(rank, 3, pair[0].address, 29500)
            )
            processes.append(Process(host.command(*jobs_of_launchers.command(tmp_path, 3)), env, tmp_path))
        ended = [one.wait(80) for one in processes]
    assert [one.code for one in ended] == [0] * 3, ended
    assert "".join(one.out for one in ended).count("of 3 with 2 servers") == 3
    told = jobs_of_launchers.workers(tmp_path, 3)
    assert [(one["P3_LOCAL_RANK"], one["P3_LOCAL_SIZE"]) for one in told] == [("0", "2"), ("0", "1"), ("1", "2")]


def test_a_job_outlives_the_thread_that_has_opened_it(tmp_path):
    command = [*torchrun("--nproc-per-node", "2"), *of_torch(script("--thread", "uneven", tmp_path, "adam", 2, 1))]
    status, output = jobs.run(command, timeout_s=60)
    assert status == 0 and output.count("follows") == 2, output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_a_torchrun_job_and_leaves_nothing(tmp_path, processes, victim):
    command = [*torchrun("--nproc-per-node", "2"), *of_torch(script("sleeping", tmp_path))]
    agent = Process(command, clean_environment(OMP_NUM_THREADS="1", P3_TESTED=str(tmp_path)), tmp_path)
    processes.append(agent)
    deadline = time.monotonic() + 60
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < deadline and agent.popen.poll() is None
        time.sleep(0.05)
    os.kill(int((tmp_path / str(victim)).read_text()), signal.SIGKILL)
    assert agent.wait(60).code != 0
    deadline = time.monotonic() + 20
    while running(tmp_path):
        assert time.monotonic() < deadline, running(tmp_path)
        time.sleep(0.05)


def running(folder):
    """Processes that have this test's folder in their environment."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/environ" % process, "rb") as file:
                if b"P3_TESTED=" + os.fsencode(folder) in file.read().split(b"\0"):
                    found.append(process)
        except OSError:
            pass
    return found


def test_torchrun_starts_p3_exec(tmp_path):
    env = jobs_of_launchers.environment(tmp_path)
    command = [*torchrun("--nproc-per-node", "2", "--no-python"), *jobs_of_launchers.command(tmp_path, 3)]
    agent = Process(command, env, tmp_path)
    try:
        ended = agent.wait(60)
    finally:
        agent.end()
    assert ended.code == 0 and jobs_of_launchers.digests(ended.out)[0] == 2, ended
    assert not jobs_of_launchers.living(tmp_path)
