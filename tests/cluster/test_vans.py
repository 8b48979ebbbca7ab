"""Data connections: which way they take, and whom a server lets in. Both ends run in this process."""

import asyncio
import os
import socket

import pytest

from p3.cluster.connections import auth, channel
from p3.cluster.connections.vans import DoorStep, accept_workers, admit_workers, connect
from p3.cluster.node import Node, machine_id
from p3.errors import RendezvousError
from p3.settings import Settings

pytest.importorskip("p3._core", reason="the extension is not built")

SECRET = b"0123456789abcdef"
WORKER = Node("worker", 0, "127.0.0.1")


async def connect_to_server(settings, secret, node, rank, address):
    return await connect(settings, secret, node, Node("server", rank, address["host"]), address)


def run(test, num_workers=1):
    """Runs `test(address, accepting)` beside a server's door; ends both."""

    async def main():
        door = DoorStep.open(Settings(), "127.0.0.1")
        address = {"host": "127.0.0.1", "port": door.port, "local": door.local, "machine": machine_id()}
        accepting = asyncio.ensure_future(accept_workers(door, SECRET, "server 0", range(num_workers)))
        try:
            await asyncio.wait_for(test(address, accepting), 20)
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(
    "local, same_machine, family, descriptors",
    [
        ("shm", True, socket.AF_UNIX, 5),
        ("unix", True, socket.AF_UNIX, 0),
        ("tcp", True, socket.AF_INET, 0),
        ("shm", False, socket.AF_INET, 0),
    ],
)
def test_only_a_worker_of_the_same_machine_takes_the_local_way(local, same_machine, family, descriptors):
    async def test(address, accepting):
        if not same_machine:
            address["machine"] = "another"
        ours = await connect_to_server(Settings(local=local), SECRET, WORKER, 0, address)
        theirs = (await accepting)[0]
        assert ours.socket.family == theirs.socket.family == family
        assert len(ours.ring) == len(theirs.ring) == descriptors
        for mine, yours in zip(ours.ring, theirs.ring):
            assert mine != yours and os.path.sameopenfile(mine, yours)
        # Nothing has been read ahead of what the core will read.
        ours.socket.setblocking(True)
        theirs.socket.setblocking(True)
        theirs.socket.sendall(b"first bytes")
        assert ours.socket.recv(100) == b"first bytes"
        ours.close()
        theirs.close()

    run(test)


def test_every_worker_gets_its_place():
    async def test(address, accepting):
        workers = [Node("worker", rank, "127.0.0.1") for rank in (2, 0, 1)]
        ours = [await connect_to_server(Settings(), SECRET, worker, 0, address) for worker in workers]
        theirs = await accepting
        assert sorted(theirs) == [0, 1, 2]
        for van in ours + list(theirs.values()):
            van.close()

    run(test, num_workers=3)


@pytest.mark.parametrize("local", ["shm", "tcp"])
def test_a_rank_is_taken_once_and_only_if_it_exists(local):
    async def test(address, accepting):
        settings = Settings(local=local)
        first = await connect_to_server(settings, SECRET, WORKER, 0, address)
        for rank in (0, 2):
            with pytest.raises(RendezvousError, match=r"worker %d .* cannot connect to server 5 \(127.0.0.1\)" % rank):
                await connect_to_server(settings, SECRET, Node("worker", rank, "127.0.0.1"), 5, address)
        assert not accepting.done()
        first.close()

    run(test, num_workers=2)


def test_a_wrong_secret_is_refused():
    async def test(address, accepting):
        with pytest.raises(RendezvousError, match="refused our proof"):
            await connect_to_server(Settings(), b"fedcba9876543210", WORKER, 0, address)
        assert not accepting.done()

    run(test)


@pytest.mark.parametrize("role, purpose", [("server", auth.DATA), ("worker", auth.WATCH), ("worker", auth.CONTROL)])
def test_another_role_or_purpose_is_refused(role, purpose):
    async def test(address, accepting):
        sock = socket.create_connection(("127.0.0.1", address["port"]))
        sock.setblocking(False)
        await channel.prove_to_acceptor(sock, SECRET, role, purpose, "server")
        with pytest.raises(OSError):
            await channel.read_exactly(sock, 1)
        assert not accepting.done()
        sock.close()

    run(test)


def test_descriptors_are_only_taken_over_a_local_socket_and_in_full():
    async def offer(address, family, ring, descriptors):
        sock = socket.socket(family)
        sock.connect("\0" + address["local"] if family == socket.AF_UNIX else ("127.0.0.1", address["port"]))
        sock.setblocking(False)
        await channel.prove_to_acceptor(sock, SECRET, "worker", auth.DATA, "server")
        await channel.send_message(sock, {"kind": "van", "rank": 0, "ring": ring})
        if descriptors:
            await channel.send_descriptors(sock, descriptors)
        with pytest.raises(OSError):
            await channel.read_exactly(sock, 1)
        sock.close()

    async def test(address, accepting):
        await offer(address, socket.AF_INET, 5, [])
        await offer(address, socket.AF_UNIX, 3, [])
        await offer(address, socket.AF_UNIX, 5, [0, 1, 2])
        await offer(address, socket.AF_UNIX, 5, [0, 1, 2, 0, 1, 2])
        assert not accepting.done()

    run(test)


def test_a_process_that_is_lost_again_while_it_connects_does_not_arrive():
    """Nor does it keep the one out that comes after it."""

    async def main():
        door = DoorStep.open(Settings(), "127.0.0.1")
        address = {"host": "127.0.0.1", "port": door.port, "local": door.local, "machine": machine_id()}
        awaited, arrived = {0: object()}, asyncio.Queue()
        admitting = asyncio.ensure_future(
            admit_workers(door, SECRET, "server 0", awaited, lambda rank, van: arrived.put_nowait((rank, van)))
        )
        first = socket.socket(socket.AF_UNIX)
        first.connect("\0" + door.local)
        first.setblocking(False)
        await channel.prove_to_acceptor(first, SECRET, "worker", auth.DATA, "server")
        await channel.send_message(first, {"kind": "van", "rank": 0, "ring": 5})
        with pytest.raises(RendezvousError):  # one process of a rank at a time
            await connect_to_server(Settings(local="unix"), SECRET, WORKER, 0, address)
        del awaited[0]  # it is lost
        awaited[0] = object()  # and another one is waited for
        second = await connect_to_server(Settings(local="unix"), SECRET, WORKER, 0, address)
        rank, van = await arrived.get()
        assert rank == 0 and awaited == {}
        descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
        await channel.send_descriptors(first, descriptors)
        with pytest.raises(OSError):  # no answer but the end, or the answer and then the end
            while True:
                await channel.read_exactly(first, 1)
        assert arrived.empty()
        admitting.cancel()
        await asyncio.gather(admitting, return_exceptions=True)
        for descriptor in descriptors:
            os.close(descriptor)
        for one in (second, van):
            one.close()
        first.close()
        door.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("local, descriptors", [("shm", 5), ("unix", 0), ("tcp", 0)])
def test_workers_reach_the_leader_of_their_machine_through_its_local_door_alone(local, descriptors):
    async def main():
        door = DoorStep.open(Settings(), None)
        assert door.port == 0
        leader = {"host": "127.0.0.1", "local": door.local, "machine": machine_id()}
        accepting = asyncio.ensure_future(accept_workers(door, SECRET, "worker 0", [2, 5], "worker"))
        here, nobody = Node("worker", 0, "127.0.0.1"), Node("worker", 3, "127.0.0.1")
        with pytest.raises(RendezvousError, match="cannot connect to worker 0 .*, its local socket: "):
            await connect(Settings(local=local), SECRET, nobody, here, leader)
        workers = [Node("worker", rank, "127.0.0.1") for rank in (5, 2)]
        ours = [await connect(Settings(local=local), SECRET, worker, here, leader) for worker in workers]
        theirs = await accepting
        assert sorted(theirs) == [2, 5]
        for van in ours + list(theirs.values()):
            assert van.socket.family == socket.AF_UNIX and len(van.ring) == descriptors
            van.close()

    asyncio.run(asyncio.wait_for(main(), 20))
