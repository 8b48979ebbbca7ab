"""Jobs whose nodes are started one by one: they come together, and every bad input is a clear error on every process.

No wait here is longer than its deadline: bad input must be an error within 10 s everywhere.
"""

import os
import re
import resource
import signal
import socket

import pytest
from node_jobs import SOON_S, TRAIN, all_ended, assert_every_process_says, started

from p3.cluster import messages
from p3.cluster.connections import auth

# Trains round by round until it is told otherwise; the first line says that it is under way.
TRAIN_FOR_EVER = """
    import os
    import numpy as np
    from p3.worker.session import Session
    session = Session.open()
    landing = np.zeros(1000, np.float32)
    key = session.declare("w", landing.shape, "float32")
    session.init(key, landing if session.rank == 0 else None, np.zeros_like(landing)).wait(30)
    turn = 0
    while True:
        session.pushpull(key, landing.copy(), landing).wait(60)
        turn += 1
        if turn == 3:
            print("under way", os.getpid(), flush=True)
"""


@pytest.mark.parametrize("local", ["shm", "unix", "tcp"])
def test_nodes_come_together_train_and_leave(make_cluster, local):
    finished = all_ended(started(make_cluster(2, 2), [TRAIN, TRAIN], servers=2, P3_LOCAL=local), 60)
    for node in finished:
        assert (node.code, node.err) == (0, ""), node
    assert [node.out for node in finished[-2:]] == ["rank 0 has 9.0 9.0\n", "rank 1 has 9.0 9.0\n"]


def test_ranks_are_given_where_none_are_set(make_cluster):
    cluster = make_cluster(2, 1)
    nodes = [cluster.start("worker", TRAIN) for _ in range(2)] + [cluster.start("server"), cluster.start("scheduler")]
    finished = all_ended(nodes, 60)
    assert [node.code for node in finished] == [0, 0, 0, 0], finished
    assert sorted(node.out for node in finished[:2]) == ["rank 0 has 9.0 9.0\n", "rank 1 has 9.0 9.0\n"]


@pytest.mark.parametrize(
    "change, text",
    [
        (('(3, 40000)', '(40000, 3)'), "disagree about key 'w': shape is (3, 40000) on the first and (40000, 3)"),
        (('float32', 'float64'), "disagree about key 'w': dtype is float32 on the first and float64 on the second"),
    ],
)
def test_a_key_that_differs_between_workers(make_cluster, change, text):
    finished = all_ended(started(make_cluster(), [TRAIN, TRAIN.replace(*change)]))
    assert_every_process_says(finished, "worker 0 (127.0.0.1) and worker 1 (127.0.0.1) " + text)


def test_a_slice_size_that_differs_between_workers(make_cluster):
    finished = all_ended(started(make_cluster(), [TRAIN, TRAIN], env={1: {"P3_SLICE_ELEMENTS": "777"}}))
    text = "worker 1 (127.0.0.1) has P3_SLICE_ELEMENTS=777, but worker 0 (127.0.0.1) has P3_SLICE_ELEMENTS=auto"
    assert_every_process_says(finished, text)


def test_an_optimizer_that_differs_between_workers(make_cluster):
    script = """
        from p3.worker.session import Session
        session = Session.open()
        session.set_optimizer(0, {"name": "sgd", "momentum": 0.5 + session.rank / 4, "clip_gradient": -1.0,
                                  "multi_precision": False})
        session.barrier()
    """
    finished = all_ended(started(make_cluster(), [script, script]))
    text = "disagree about the optimizer of store 0: momentum is 0.5 on the first and 0.75 on the second"
    assert_every_process_says(finished, text)


def test_an_option_that_only_worker_1_sets_holds_nobody_up(make_cluster):
    # Without the word of worker 0 on it, worker 1 would wait for the option and worker 0 for worker 1.
    script = """
        import numpy as np
        from p3.worker.session import Session
        session = Session.open()
        if session.rank == 1:
            session.set_option(0, "reduction", {"type": "average"})
        key, landing = session.declare("w", (3,), "float32"), np.zeros(3, np.float32)
        session.pushpull(key, landing.copy(), landing).wait(60)
    """
    finished = all_ended(started(make_cluster(), [script, script]))
    text = "disagree about the reduction of store 0: type is not set on the first and average on the second"
    assert_every_process_says(finished, text)


def test_a_key_that_rank_0_never_declares(make_cluster):
    late = TRAIN + """
    extra = np.zeros(3, np.float32)
    session.pushpull(session.declare("extra", (3,), "float32"), extra.copy(), extra).wait(30)
    """
    finished = all_ended(started(make_cluster(), [TRAIN, late]))
    scheduler, server, _, waiting = finished
    for node in (scheduler, server, waiting):
        assert node.code != 0
        assert "worker 1 (127.0.0.1) declared key 'extra', but worker 0 (127.0.0.1) left without doing so" in node.err


@pytest.fixture
def little_address_space():
    """For the processes that a test starts: without a limit the kernel lends 128 TB, and is long in taking them
    back."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 38, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_key_too_large_for_the_server_is_named_on_every_process(make_cluster, little_address_space):
    vast = TRAIN.replace(
        "session.barrier()",
        'session.declare("vast", (1 << 38,), "float32")\n'
        "    while True: session.pushpull(key, landing.copy(), landing).wait(30)",
    )
    finished = all_ended(started(make_cluster(), [vast, vast], P3_SLICE_ELEMENTS=str(1 << 28)), 60)
    assert_every_process_says(finished, "server 0 (127.0.0.1): no memory for this server's part of key 'vast'")
    assert "server 0 (127.0.0.1): server 0" not in finished[1].err


def test_a_control_message_that_a_worker_cannot_follow_ends_the_job(make_cluster):
    broken = TRAIN.replace("landing = np", "session.keys.apply = lambda *_: [].pop(); landing = np", 1)
    # The key is agreed on once worker 1 has declared it; else its own declare() might be what cannot follow.
    broken = broken.replace("session.init(", "session.barrier(); session.init(", 1)
    waiting = TRAIN.replace("key = session", "session.barrier(); key = session", 1)
    finished = all_ended(started(make_cluster(), [waiting, broken]))
    assert_every_process_says(finished, "worker 1 (127.0.0.1): a control message could not be applied: IndexError")


def test_a_failure_after_the_last_wait_of_a_script_is_still_told(make_cluster):
    unfinished = TRAIN.replace("session.barrier()", "session.pushpull(key, landing.copy(), landing)")
    killed = TRAIN.replace("session.barrier()", "import os; os._exit(7)")
    last = all_ended(started(make_cluster(), [unfinished, killed]))[2]
    # On a slow machine the failure may come before the push, which then raises it.
    assert "p3: the job failed: " in last.err or "P3Error: " in last.err, last
    assert "worker 1 (127.0.0.1)" in last.err, last


def test_an_exception_in_one_script_is_told_to_all(make_cluster):
    broken = TRAIN.replace("session.barrier()", "raise ValueError('the disk is full')")
    finished = all_ended(started(make_cluster(), [TRAIN, broken]))
    assert_every_process_says(finished[:3], "worker 1 (127.0.0.1): the script ended with ValueError: the disk is full")
    assert "the disk is full" in finished[3].err


def test_a_worker_that_leaves_in_the_middle_of_a_barrier(make_cluster):
    finished = all_ended(started(make_cluster(), [TRAIN, TRAIN.replace("session.barrier()", "")]))
    for node in finished[:3]:
        assert node.code != 0
        assert "worker 1 (127.0.0.1) left the job while worker 0 (127.0.0.1) waits in barrier 1" in node.err


def test_a_wrong_secret_is_refused_and_both_sides_say_so(make_cluster):
    cluster = make_cluster(1, 1)
    server, stranger = cluster.start("server"), cluster.start("worker", TRAIN, P3_SECRET="another secret altogether")
    cluster.until_called_by(2)
    scheduler = cluster.start("scheduler", P3_RENDEZVOUS_TIMEOUT_S="4")
    stranger = stranger.wait(SOON_S + 10)
    assert stranger.code != 0
    assert "refused our proof" in stranger.err and "P3_SECRET or P3_SECRET_FILE must be the same" in stranger.err
    for node in all_ended([scheduler, server]):
        assert node.code != 0
        assert "1 of 1 worker (rank 0) did not join within 4 s" in node.err
        assert re.search(r"\d connections? w(as|ere) refused", node.err), node.err


def test_the_secret_is_in_no_output(make_cluster):
    for node in all_ended(started(make_cluster(1, 1), [TRAIN], P3_LOG="debug"), 60):
        assert node.code == 0, node
        assert "a secret that only tests use" not in node.out + node.err


def test_who_is_missing_is_named(make_cluster):
    cluster = make_cluster(3, 2)
    worker = cluster.start("worker", TRAIN, P3_RANK="1")
    cluster.until_called_by(1)
    nodes = [cluster.start("scheduler", P3_RENDEZVOUS_TIMEOUT_S="3"), worker]
    text = "2 of 3 workers (rank 0, 2) and 2 of 2 servers (rank 0, 1) did not join within 3 s"
    assert_every_process_says(all_ended(nodes), text)


def test_no_scheduler_at_all(make_cluster):
    cluster = make_cluster()
    cluster.listener.close()
    nodes = [cluster.start(role, TRAIN, P3_RENDEZVOUS_TIMEOUT_S="1") for role in ("server", "worker")]
    text = "no scheduler at 127.0.0.1:%d for 1 s (connection refused)" % cluster.port
    assert_every_process_says(all_ended(nodes), text)


def test_a_port_in_use(make_cluster):
    """A program that is no scheduler holds the port, and never answers."""
    cluster = make_cluster(1, 1)
    patience = {"P3_RENDEZVOUS_TIMEOUT_S": "5"}
    nodes = [cluster.start("scheduler", inherits=False), cluster.start("server", **patience)]
    scheduler, server, worker = all_ended([*nodes, cluster.start("worker", TRAIN, **patience)])
    assert "cannot listen on 127.0.0.1, DMLC_PS_ROOT_PORT=%d: Address already in use" % cluster.port in scheduler.err
    for node in (server, worker):
        assert "is another program using that port?" in node.err
    assert all(node.code != 0 for node in (scheduler, server, worker))


@pytest.mark.parametrize("variable", ["DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"])
def test_a_missing_variable(make_cluster, variable):
    cluster = make_cluster(1, 1)
    for role in ("scheduler", "server", "worker"):
        inherits = variable != "DMLC_PS_ROOT_PORT"
        node = cluster.start(role, TRAIN, inherits, **{variable: ""}).wait(SOON_S)
        assert node.code == 1 and variable in node.err and "not set" in node.err, node


@pytest.mark.parametrize("variable", ["DMLC_NUM_SERVER", "DMLC_NUM_WORKER"])
def test_a_count_of_0(make_cluster, variable):
    cluster = make_cluster(1, 1)
    for role in ("scheduler", "server", "worker"):
        node = cluster.start(role, TRAIN, **{variable: "0"}).wait(SOON_S)
        assert node.code == 1 and "%s='0': it must be a whole number from 1" % variable in node.err, node


def test_a_missing_secret(make_cluster):
    cluster = make_cluster(1, 1)
    for role in ("scheduler", "server", "worker"):
        node = cluster.start(role, TRAIN, P3_SECRET="").wait(SOON_S)
        assert node.code == 1 and "the job has no secret: set P3_SECRET or P3_SECRET_FILE" in node.err, node


def test_an_address_that_does_not_resolve(make_cluster):
    cluster = make_cluster(1, 1)
    nowhere = {"DMLC_PS_ROOT_URI": "nowhere.invalid", "P3_RENDEZVOUS_TIMEOUT_S": "1"}
    nodes = [cluster.start(role, TRAIN, **nowhere) for role in ("server", "worker")]
    assert_every_process_says(all_ended(nodes), "DMLC_PS_ROOT_URI=nowhere.invalid does not resolve to an address")


def test_too_many_workers(make_cluster):
    cluster = make_cluster(1, 1)
    nodes = [cluster.start("scheduler")] + [cluster.start("worker", TRAIN) for _ in range(2)]
    assert_every_process_says(all_ended(nodes), "is one too many: the job has 1 worker already")


def test_a_rank_given_twice(make_cluster):
    cluster = make_cluster(2, 1)
    nodes = [cluster.start("scheduler")] + [cluster.start("worker", TRAIN, P3_RANK="1") for _ in range(2)]
    text = "worker 1 (127.0.0.1) and worker 1 (127.0.0.1) both have P3_RANK=1"
    assert_every_process_says(all_ended(nodes), text)


def test_a_latecomer_is_refused_and_the_job_goes_on(make_cluster, tmp_path):
    cluster = make_cluster(1, 1)
    gate = tmp_path / "gate"
    os.mkfifo(str(gate))
    waits = TRAIN.replace("session.barrier()", "print('under way', flush=True); open(%r).read()" % str(gate))
    nodes = started(cluster, [waits])
    assert nodes[-1].read_line() == "under way"
    latecomer = cluster.start("worker", TRAIN).wait(SOON_S)
    assert latecomer.code != 0 and "is one too many" in latecomer.err
    gate.write_text("go on\n")
    assert [node.code for node in all_ended(nodes)] == [0, 0, 0]


@pytest.mark.parametrize("victim", ["worker", "server", "scheduler"])
def test_a_killed_node_is_an_error_on_all_others(make_cluster, victim):
    nodes = started(make_cluster(2, 2), [TRAIN_FOR_EVER] * 2, servers=2)
    by_name = {"scheduler": nodes[0], "server": nodes[2], "worker": nodes[4]}
    for worker in nodes[3:]:
        assert worker.read_line().startswith("under way")
    by_name[victim].signal(signal.SIGKILL)
    for node in nodes:
        finished = node.wait(SOON_S)
        assert finished.code != 0
        if node is not by_name[victim]:
            assert victim in finished.err and "127.0.0.1" in finished.err, finished


@pytest.mark.parametrize("victim", ["worker", "server", "scheduler"])
def test_a_frozen_node_is_an_error_on_all_others(make_cluster, victim):
    nodes = started(make_cluster(2, 1), [TRAIN_FOR_EVER] * 2, P3_TIMEOUT_S="2")
    frozen = {"scheduler": nodes[0], "server": nodes[1], "worker": nodes[3]}[victim]
    for worker in nodes[2:]:
        assert worker.read_line().startswith("under way")
    frozen.signal(signal.SIGSTOP)
    for node in nodes:
        if node is not frozen:
            finished = node.wait(SOON_S)
            assert finished.code != 0
            assert victim in finished.err and "2 s" in finished.err, finished


def test_strangers_are_refused_and_disturb_nobody(make_cluster):
    cluster = make_cluster(1, 1)
    nodes = started(cluster, [TRAIN_FOR_EVER])
    assert nodes[-1].read_line().startswith("under way")
    with socket.create_connection(("127.0.0.1", cluster.port), 5) as silent:
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(10000)):
            with socket.create_connection(("127.0.0.1", cluster.port), 5) as stranger:
                stranger.settimeout(SOON_S)
                stranger.sendall(greeting)
                try:
                    assert stranger.recv(1000) == b""  # closed, and nothing learnt
                except ConnectionResetError:
                    pass
        silent.settimeout(SOON_S)
        assert silent.recv(1000) == b""  # after the handshake's deadline
    assert nodes[-1].popen.poll() is None
    nodes[-1].signal(signal.SIGINT)
    for node in nodes:
        assert "KeyboardInterrupt" in node.wait(SOON_S).err


def test_a_member_that_knows_the_secret_but_talks_nonsense_is_refused(make_cluster):
    cluster = make_cluster(1, 1)
    nodes = started(cluster, [TRAIN_FOR_EVER])
    assert nodes[-1].read_line().startswith("under way")
    for body in (b"\xff\xff\xff\xff", b"\x02\x00\x00\x00{}", messages.encode({"kind": "bye"})):
        with socket.create_connection(("127.0.0.1", cluster.port), 5) as sock:
            sock.settimeout(SOON_S)
            connector = auth.Connector(b"a secret that only tests use", "worker", auth.CONTROL, "scheduler")
            sock.sendall(connector.hello)
            sock.sendall(connector.proof(sock.recv(auth.CHALLENGE_BYTES, socket.MSG_WAITALL)))
            connector.verify(sock.recv(32, socket.MSG_WAITALL))
            sock.sendall(body)
            try:
                assert sock.recv(1000) == b""
            except ConnectionResetError:
                pass
    assert nodes[-1].popen.poll() is None
