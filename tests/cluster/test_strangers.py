"""Whoever does not know the secret changes nothing, however it tries (helpers/strangers.py), and however often."""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import strangers
from processes import HELPERS, SECRET

from p3.cluster.connections import auth, channel
from p3.cluster.connections.strangers import LINES, MAX_UNPROVED, Gate, reset, source_of
from p3.cluster.connections.vans import DoorStep, accept_workers
from p3.cluster.node import connect_once, listen
from p3.errors import AuthenticationError
from p3.settings import Settings

TRAIN = """
    import numpy as np
    from p3.worker.session import Session
    session = Session.open()
    landing = np.zeros(30000, np.float32)
    key = session.declare("w", landing.shape, "float32")
    session.init(key, landing.copy() if session.rank == 0 else None, landing).wait(60)
    for turn in range(300):
        session.pushpull(key, np.full_like(landing, turn), landing).wait(60)
        assert (landing == turn).all()
        if turn == 10:
            print("under way", flush=True)
    print("done", landing[0])
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT_S", 0.5)


class Flood:
    """Goes on in a thread until the test is done with it."""

    def __init__(self, address):
        self.connections = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()

    def _run(self, address):
        while not self._over.is_set():
            self.connections += strangers.flood(address, 300, 150)

    def end(self):
        self._over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def descriptors_of(process):
    return len(os.listdir("/proc/%d/fd" % process.popen.pid))


def test_a_flood_from_the_jobs_own_address_neither_keeps_nodes_out_nor_spoils_the_training(make_cluster):
    cluster = make_cluster(1, 1)
    scheduler = cluster.start("scheduler")
    flood = Flood(("127.0.0.1", cluster.port))
    try:
        strangers.attack(("127.0.0.1", cluster.port), "http")  # it listens: the flood is under way
        server, worker = cluster.start("server"), cluster.start("worker", TRAIN)
        assert worker.read_line() == "under way"
        most = descriptors_of(scheduler)
        finished = worker.wait(60)
        before = flood.connections
    finally:
        flood.end()
    assert (finished.code, finished.out, finished.err) == (0, "done 299.0\n", "")
    assert before >= 300 and most < MAX_UNPROVED + 100
    ended = [node.wait(20) for node in (scheduler, server)]
    assert [node.code for node in ended] == [0, 0], ended
    lines = ended[0].err.splitlines()
    assert all("refused" in line for line in lines) and len(lines) < 12 * (LINES + 1) < before, lines
    assert ended[1].err == ""


@pytest.mark.parametrize("door", ["scheduler", "server", "leader"])
def test_an_attack_hears_at_most_a_challenge_and_the_listener_goes_on(door, impatient, caplog):
    """Each attack, then a node of the job, through the same door."""

    async def main():
        served, gate = [], Gate("here", logging.getLogger("p3.test"))

        async def handler(sock, source):
            try:
                served.append(await channel.prove_to_connector(sock, SECRET.encode(), "scheduler"))
            except Exception as error:
                gate.refused(source, error)
            finally:
                sock.close()

        if door == "scheduler":
            listener = listen("127.0.0.1")
            task = asyncio.ensure_future(gate.serve(listener, handler))
            address = listener.getsockname()
        else:
            steps = DoorStep.open(Settings(), "127.0.0.1" if door == "server" else None)
            task = asyncio.ensure_future(
                accept_workers(steps, SECRET.encode(), "here", [0], "server" if door == "server" else "worker")
            )
            address = ("127.0.0.1", steps.port) if door == "server" else "\0" + steps.local
        in_thread = asyncio.get_running_loop().run_in_executor
        said = await asyncio.gather(*(in_thread(None, strangers.attack, address, name) for name in strangers.ATTACKS))
        for name, heard in zip(strangers.ATTACKS, said):
            assert len(heard) == (33 if name in ("half_handshake", "wrong_proof") else 0), name
        # A node's whole handshake; then a stranger who has overheard it.
        ours = auth.Connector(SECRET.encode(), "worker", auth.DATA, door if door != "leader" else "worker")
        sock = strangers.connect(address)
        sock.setblocking(False)
        await channel.send(sock, ours.hello)
        proof = ours.proof(await channel.read_exactly(sock, auth.CHALLENGE_BYTES))
        await channel.send(sock, proof)
        ours.verify(await channel.read_exactly(sock, auth.PROOF_BYTES))
        sock.close()
        heard = await in_thread(None, strangers.replay, address, ours.hello + proof)
        assert len(heard) == 33, "a replayed handshake was taken for a new one"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if door == "scheduler":
            listener.close()
            assert len(served) == 1

    asyncio.run(asyncio.wait_for(main(), 30))
    assert "does not know this job's secret" in caplog.text or "more connections" in caplog.text
    assert SECRET not in caplog.text


async def knock(listener, host):
    """A connection from that address of this host's."""
    sock = socket.socket()
    sock.bind((host, 0))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, listener.getsockname())
    return sock


def test_a_quiet_address_keeps_its_place_while_a_loud_one_displaces_itself():
    async def main():
        gate, listener = Gate("here", logging.getLogger("p3.test")), listen("127.0.0.1")
        known = asyncio.Event()

        async def handler(sock, source):
            with sock:
                await channel.prove_to_connector(sock, SECRET.encode(), "scheduler")
                known.set()

        task = asyncio.ensure_future(gate.serve(listener, handler))
        loop = asyncio.get_running_loop()
        quiet = await knock(listener, "127.0.0.1")
        loud = [await knock(listener, "127.0.0.2") for _ in range(MAX_UNPROVED + 20)]
        with pytest.raises(ConnectionResetError):  # the oldest of the loud one's
            await asyncio.wait_for(loop.sock_recv(loud[0], 1), 20)
        await channel.prove_to_acceptor(quiet, SECRET.encode(), "worker", auth.CONTROL, "scheduler")
        await asyncio.wait_for(known.wait(), 20)
        assert len(gate.tasks) <= MAX_UNPROVED + 1
        for sock in [quiet, *loud]:
            sock.close()
        await channel.stop_accepting(task, listener)
        await gate.close(5)
        assert not gate.tasks

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_that_is_displaced_in_the_midst_of_its_proof_can_tell_that_from_a_refusal():
    """More addresses than places, one connection each: the oldest goes, whoever it is."""

    async def main():
        gate, listener = Gate("here", logging.getLogger("p3.test")), listen("127.0.0.1")

        async def handler(sock, source):
            with sock:
                await channel.prove_to_connector(sock, SECRET.encode(), "scheduler")

        task = asyncio.ensure_future(gate.serve(listener, handler))

        node = await knock(listener, "127.0.0.1")
        ours = auth.Connector(SECRET.encode(), "worker", auth.CONTROL, "scheduler")
        await channel.send(node, ours.hello)
        await channel.read_exactly(node, auth.CHALLENGE_BYTES)
        others = [await knock(listener, "127.0.%d.%d" % divmod(257 + turn, 256)) for turn in range(MAX_UNPROVED)]
        with pytest.raises(ConnectionResetError) as caught:
            await asyncio.wait_for(channel.read_exactly(node, auth.PROOF_BYTES), 20)
        assert caught.value.errno == errno.ECONNRESET
        for sock in [node, *others]:
            sock.close()
        await channel.stop_accepting(task, listener)
        listener.close()
        await gate.close(5)

    asyncio.run(asyncio.wait_for(main(), 30))


async def reach(serve, patience_s):
    """A worker connects, and tries for so long to prove itself to serve(listener), which ends when it has."""
    listener = listen("127.0.0.1")

    async def connect():
        sock, reason = await connect_once([(socket.AF_INET, listener.getsockname())])
        assert sock is not None, reason
        return sock

    serving, deadline = asyncio.ensure_future(serve(listener)), time.monotonic() + patience_s
    try:
        sock, _ = await channel.connect_and_prove(
            connect, SECRET.encode(), "worker", auth.CONTROL, "scheduler", deadline
        )
        sock.close()
        await serving
    finally:
        await channel.stop_accepting(serving, listener)
        listener.close()


def test_a_node_that_is_displaced_tries_again_until_its_deadline(caplog):
    async def main(displaced_s, patience_s):
        attempts, until = [], time.monotonic() + displaced_s

        async def serve(listener):
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                sock.setblocking(False)
                attempts.append(sock)
                with sock:
                    if time.monotonic() < until:
                        await channel.read_exactly(sock, auth.HELLO_BYTES)
                        await channel.send(sock, bytes(auth.CHALLENGE_BYTES))
                        reset(sock)
                    else:
                        return await channel.prove_to_connector(sock, SECRET.encode(), "scheduler")

        await reach(serve, patience_s)
        return len(attempts)

    assert asyncio.run(asyncio.wait_for(main(auth.PATIENCE_S + 0.5, 30), 60)) > 3
    assert "retrying a connection" in caplog.text  # said while it lasts
    with pytest.raises(auth.Dropped, match="broke off the handshake"):
        asyncio.run(asyncio.wait_for(main(60, 0.2), 60))


def test_a_scheduler_that_is_slow_to_start_is_asked_again(monkeypatch):
    """It listens, and takes up what it is sent much later than a handshake may last."""
    monkeypatch.setattr(auth, "CONNECTOR_TIMEOUT_S", 0.2)

    async def main(unheard, patience_s):
        async def serve(listener):
            for number in itertools.count():
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                with sock, contextlib.suppress(AuthenticationError):  # it has given up here, too
                    if number >= unheard:
                        return await channel.prove_to_connector(sock, SECRET.encode(), "scheduler")
                    await channel.read_exactly(sock, auth.HELLO_BYTES)
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""  # it has given up

        await reach(serve, patience_s)

    asyncio.run(asyncio.wait_for(main(2, 20), 60))
    with pytest.raises(auth.Dropped, match="did not answer the handshake within 0.2 s: is another program"):
        asyncio.run(asyncio.wait_for(main(1, 0), 60))


def test_log_lines_on_strangers_are_few_and_count_the_rest(caplog):
    async def main():
        gate = Gate("here", logging.getLogger("p3.test"))
        for _ in range(1000):
            gate.refused("10.0.0.9", "it is a stranger")
        await gate.close(1)

    asyncio.run(main())
    assert len(caplog.records) == LINES + 1
    assert caplog.records[-1].getMessage() == "here: refused %d more connections like that" % (1000 - LINES)


def test_a_network_of_64_bits_is_one_source_and_a_mapped_address_is_the_address():
    with socket.socket(socket.AF_INET6) as sock:
        assert source_of(sock, ("2001:db8::1", 1)) == source_of(sock, ("2001:db8::ffff:0:0:2", 1, 0, 0))
        assert source_of(sock, ("2001:db8::1", 1)) != source_of(sock, ("2001:db8:0:1::1", 1))
        assert source_of(sock, ("fe80::1%eth0", 1)) == "fe80::/64"
        assert source_of(sock, ("::ffff:10.0.0.7", 1)) == "10.0.0.7"


def test_a_process_of_another_user_cannot_even_begin_at_a_local_door(caplog):
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")

    async def main():
        door = DoorStep.open(Settings(), None)
        accepting = asyncio.ensure_future(accept_workers(door, SECRET.encode(), "worker 0", [1], "worker"))
        script = "import os, sys; sys.path.insert(0, %r); import strangers; os.setuid(65534);" \
                 "print(strangers.attack(chr(0) + %r, 'half_handshake'))" % (str(HELPERS), door.local)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        assert out == b"b''\n"
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert "another user's process" in caplog.text
