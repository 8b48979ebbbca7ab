"""p3.torch's jobs that come back from a snapshot with another number of workers, as torchrun starts them."""

import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import forked
import plugin_jobs as jobs
import pytest
from processes import SECRET, Process

from p3.errors import RendezvousError
from p3.launch.launchers.place import Place
from p3.settings import Settings
from p3.snapshots import reading, tree

distributed = pytest.importorskip("torch.distributed")
import p3.torch  # noqa: E402, F401  which knows the arrays of its snapshots


def said(output, when):
    """{rank: (weights, statistics)}. Lines of processes that share their output may run into each other."""
    found = re.findall(r"worker (\d) %s: weights ([0-9a-f]{8}) statistics ([0-9a-f]{8})" % when, output)
    return {int(rank): (weights, statistics) for rank, weights, statistics in found}


def run(directory, workers, kill_at):
    """Of more than one worker by torchrun, else alone."""
    command = jobs.python("torch_regrouped.py", 6, kill_at)
    if workers > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            options = ["--master-port", str(free.getsockname()[1]), "--nproc-per-node", str(workers)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *forked.started(command)]
    return jobs.run(command, timeout_s=100, P3_SNAPSHOT_DIR=str(directory), P3_SNAPSHOT_EVERY="2")


def test_a_job_comes_back_with_more_processes_and_then_with_one(tmp_path):
    status, output = run(tmp_path / "whole", 1, 0)
    assert status == 0, output
    whole = said(output, "behind 6")[0]
    status, output = run(tmp_path / "snapshots", 2, 2)
    assert status != 0, output
    two = said(output, "behind 2")
    assert two[0][0] == two[1][0] and two[0][1] != two[1][1], output
    status, output = run(tmp_path / "snapshots", 4, 4)
    assert status != 0, output
    assert said(output, "at 2 of 2") == {0: two[0], 1: two[1], 2: two[0], 3: two[0]}, output
    four = said(output, "behind 4")
    status, output = run(tmp_path / "snapshots", 1, 0)
    assert status == 0, output
    assert said(output, "at 4 of 4") == {0: four[0]}, output
    assert said(output, "behind 6") == {0: whole}, output


@pytest.mark.parametrize("aggregates, before", [("0", [{0.125}, {0.25}]), ("1", [{0.125 + 0.25}, set()])])
def test_what_compression_has_left_out_is_owed_to_the_mean_of_fewer_workers(tmp_path, aggregates, before):
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path), "P3_SNAPSHOT_EVERY": "1", "P3_LOCAL_AGGREGATION": aggregates}
    command = jobs.python("regrouped_rest.py", "torch")
    for status, output in (jobs.run_p3(2, 1, command, **variables), jobs.run(command, **variables)):
        assert status == 0, output
    for round, wanted in ((1, before), (2, [{(0.125 + 0.25) / 2}])):
        parts = [tree.decode(reading.Snapshot(str(tmp_path), round).worker(rank)) for rank in range(len(wanted))]
        residuals = [set(left_out) for part in parts for _, _, left_out in part["residuals"] if left_out is not None]
        assert residuals == wanted


def agent(folder, port, is_host, **variables):
    """torchrun on one host of a job that may have one or two."""
    conf = "is_host=%d,join_timeout=60,last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=8" % is_host
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:%d" % port, "--rdzv-conf", conf]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *jobs.script("torch_regrouped.py", 6, 2, 4)]
    settings = {"P3_SNAPSHOT_DIR": str(folder / "snapshots"), "P3_SNAPSHOT_EVERY": "2", "P3_SECRET": SECRET}
    settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or torch 2.13 lets a host that comes later wait for ever
    settings["P3S_FORK_SERVERS"] = ""  # the worker of a mortal one kills its parent
    return Process(command, {**forked.environment(), **settings, **variables}, folder)


def read_until(process, text):
    """What it says up to there; pytest's own time-out is the deadline."""
    lines = []
    while text not in (lines or [""])[-1]:
        assert process.popen.poll() is None, (lines, process.wait(1))
        lines.append(process.read_line())
    return "\n".join(lines)


@pytest.mark.timeout(240)
def test_torchrun_goes_on_without_a_host_and_with_it_when_it_is_back(tmp_path, processes):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes.append(agent(tmp_path, port, 1))
    processes.append(agent(tmp_path, port, 0, mortal="1"))
    alone = read_until(processes[0], "alone behind 4")
    assert processes[1].wait(30).code == -9
    assert said(alone, "at 2 of 2").keys() == {0}
    processes.append(agent(tmp_path, port, 0))
    ended = [processes[0].wait(100), processes[2].wait(100)]
    assert [one.code for one in ended] == [0, 0], ended
    resumed, done = (said(ended[0].out + ended[1].out, when) for when in ("at 4 of 1", "behind 6"))
    assert resumed.keys() == done.keys() == {0, 1}, ended
    assert resumed[0] == resumed[1] and done[0] == done[1], ended


def test_who_asks_hears_of_this_start_whatever_earlier_ones_have_left(monkeypatch):
    from p3.launch.launchers.torch_store import StoreChannel

    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # As torchrun has it: its agent serves the store, and each start of the workers finds it again.
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
           "WORLD_SIZE": "2", "RANK": "0"}  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    def channel(rank, timeout_s):
        place = Place("torchrun", rank, 2, 0, 1, 2, str(rank), "torchrun-0123")
        return StoreChannel(Settings(rendezvous_timeout_s=timeout_s), place, env)

    with ThreadPoolExecutor(1) as pool:
        for start in ("1", "2"):
            server.set("p3//address/1", "one who has died")
            asking = pool.submit(channel(1, 10).read, 10)
            channel(0, 10).publish(start)
            assert asking.result() == start
    with pytest.raises(RendezvousError, match="rank 1 has not asked"):
        channel(0, 1).publish("3")
    with pytest.raises(RendezvousError, match="rank 0 has not said"):
        channel(1, 10).read(0.1)
