"""What cannot be a job is one clear error on each process, soon; and what only looks odd is none.

More of the kind, of keys, options and strangers: test_jobs.py.
"""

import os
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest
from node_jobs import SOON_S, TRAIN, all_ended, assert_every_process_says, started


def test_too_many_servers(make_cluster):
    cluster = make_cluster(1, 1)
    nodes = [cluster.start("scheduler")] + [cluster.start("server") for _ in range(2)]
    assert_every_process_says(all_ended(nodes), "is one too many: the job has 1 server already")


def test_a_server_that_is_missing(make_cluster):
    cluster = make_cluster(1, 2)
    nodes = [cluster.start("server", P3_RANK="0"), cluster.start("worker", TRAIN)]
    cluster.until_called_by(2)
    nodes.append(cluster.start("scheduler", P3_RENDEZVOUS_TIMEOUT_S="3"))
    assert_every_process_says(all_ended(nodes), "1 of 2 servers (rank 1) did not join within 3 s")


@pytest.mark.parametrize("stranger", ["worker", "server"])
def test_another_version_of_the_protocol(make_cluster, tmp_path, stranger):
    (tmp_path / "sitecustomize.py").write_text("import p3.cluster.messages as m; m.PROTOCOL_VERSION = 99")
    cluster = make_cluster(1, 1)
    other = {"PYTHONPATH": os.pathsep.join([str(tmp_path), cluster.env()["PYTHONPATH"]])}
    nodes = [cluster.start("scheduler")]
    for role in ("server", "worker"):
        nodes.append(cluster.start(role, TRAIN, P3_RENDEZVOUS_TIMEOUT_S="3", **(other if role == stranger else {})))
    finished = all_ended(nodes)
    text = "with control protocol 99, scheduler (127.0.0.1) has protocol"
    assert text in finished[0].err and "install the same version on all hosts" in finished[0].err
    for node in finished[1:]:
        assert node.code != 0
        # Who comes after the job has failed hears of its end, or finds no scheduler any more.
        assert text in node.err or "the job has ended already" in node.err or "no scheduler at" in node.err, node.err


@pytest.mark.parametrize("role", ["server", "worker", "scheduler"])
def test_a_wrong_secret_on_one_node(make_cluster, role):
    cluster = make_cluster(1, 1)
    wrong = {role: {"P3_SECRET": "another secret altogether"}}
    nodes = {name: cluster.start(name, TRAIN, **wrong.get(name, {})) for name in ("server", "worker")}
    cluster.until_called_by(2)
    nodes["scheduler"] = cluster.start("scheduler", P3_RENDEZVOUS_TIMEOUT_S="4", **wrong.get("scheduler", {}))
    finished = {name: node.wait(SOON_S + 10) for name, node in nodes.items()}
    refused = [role] if role != "scheduler" else ["server", "worker"]
    for name, node in finished.items():
        assert node.code != 0
        expected = "P3_SECRET or P3_SECRET_FILE must be the same" if name in refused else "did not join within"
        assert expected in node.err, (name, node.err)
        assert "another secret" not in node.err


@pytest.mark.parametrize(
    "variable, value, allowed",
    [
        ("DMLC_NUM_WORKER", "two", "a whole number from 1"),
        ("DMLC_PS_ROOT_PORT", "99999", "a whole number from 1 to 65535"),
        ("DMLC_ROLE", "master", "one of worker, server, scheduler"),
    ],
)
def test_a_malformed_variable(make_cluster, variable, value, allowed):
    cluster = make_cluster(1, 1)
    for role in ("scheduler", "server", "worker"):
        node = cluster.start(role, TRAIN, **{variable: value}).wait(SOON_S + 10)
        assert node.code == 1 and "%s=%r: it must be %s" % (variable, value, allowed) in node.err, node


def test_an_address_that_nobody_answers_at(make_cluster):
    cluster = make_cluster(1, 1)
    nowhere = {"DMLC_PS_ROOT_URI": "192.0.2.1", "P3_RENDEZVOUS_TIMEOUT_S": "1"}  # of TEST-NET-1: never anybody's
    nodes = [cluster.start(role, TRAIN, **nowhere) for role in ("server", "worker")]
    assert_every_process_says(all_ended(nodes), "no scheduler at 192.0.2.1:%d for 1 s" % cluster.port)


def test_a_server_that_workers_cannot_reach_is_named_on_every_process(make_cluster):
    cluster = make_cluster(1, 1)
    nodes = [cluster.start("scheduler"), cluster.start("server", DMLC_NODE_HOST="192.0.2.1", P3_LOCAL="tcp")]
    nodes.append(cluster.start("worker", TRAIN, P3_LOCAL="tcp"))
    assert_every_process_says(all_ended(nodes, 30), "server 0 (192.0.2.1)")


def test_ipv6(make_cluster):
    cluster = make_cluster(2, 2)
    cluster.listener.close()
    try:
        cluster.listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip("no IPv6 here: %s" % error)
    ipv6 = {"DMLC_PS_ROOT_URI": "::1", "DMLC_PS_ROOT_PORT": str(cluster.listener.getsockname()[1]), "P3_LOCAL": "tcp"}
    finished = all_ended(started(cluster, [TRAIN, TRAIN], servers=2, **ipv6), 60)
    for node in finished:
        assert (node.code, node.err) == (0, ""), node


def test_clocks_that_differ_do_not_matter(make_cluster, tmp_path):
    """One worker's wall clock is ten years ahead, and its monotonic clock eleven days."""
    cluster = make_cluster(2, 1)
    (tmp_path / "sitecustomize.py").write_text("import time; now = time.time; time.time = lambda: now() + 3e8")
    nodes = [cluster.start("scheduler"), cluster.start("server"), cluster.start("worker", TRAIN, P3_RANK="0")]
    script = tmp_path / "elsewhen.py"
    command = [sys.executable, str(script)]
    in_another_time = ["unshare", "--time", "--fork", "--monotonic", "1000000"]
    if shutil.which("unshare") and subprocess.run([*in_another_time, "true"], capture_output=True).returncode == 0:
        command = [*in_another_time, *command]
    launcher = "import subprocess, sys; sys.exit(subprocess.call(%r))" % (command,)
    nodes.append(
        cluster.start(
            "worker", launcher, P3_RANK="1", PYTHONPATH=os.pathsep.join([str(tmp_path), cluster.env()["PYTHONPATH"]])
        )
    )
    script.write_text(textwrap.dedent(TRAIN))
    for node in all_ended(nodes, 60):
        assert (node.code, node.err) == (0, ""), node


def test_a_directory_of_snapshots_that_cannot_be_written_is_named_on_every_process(run_job, tmp_path):
    (tmp_path / "file").touch()
    directory = str(tmp_path / "file" / "snapshots")
    script = """
    from p3.worker.session import Session
    session = Session.open()
    session.resume()
    session.barrier()
    """
    finished = run_job(script, env={"P3_SNAPSHOT_DIR": directory, "P3_SNAPSHOT_EVERY": "1"})
    assert finished.code == 1
    for node in ("worker 0", "worker 1", "server 0", "scheduler"):
        said = [line for line in finished.out.splitlines() if line.startswith("[%s]" % node) and directory in line]
        assert said, finished.out
