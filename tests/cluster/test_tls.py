"""P3_TLS=1: what crosses the network can neither be read nor altered, and results are those without it."""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from processes import HELPERS, ROOT
from relay import Relay

from p3.cluster.connections import auth, channel, encryption
from p3.cluster.member import Member
from p3.cluster.node import listen
from p3.cluster.scheduler import Scheduler
from p3.errors import ProtocolError, RendezvousError
from p3.settings import Settings

core = pytest.importorskip("p3._core", reason="the extension is not built")
if not core.TLS_BUILT_IN:
    pytest.skip("the extension was built without OpenSSL (libssl-dev)", allow_module_level=True)

SECRET = b"0123456789abcdef"
KEY = bytes(range(32))
KNOWN = b"\xcd\xcc\x8c\x3f" * 64  # float32 1.1, as a weight lies in a frame
TRAIN = """
    import hashlib, os
    import numpy as np
    from p3.worker.session import Session
    session = Session.open()
    landing = np.zeros((3, 40000), np.float32)
    key = session.declare("a_key_with_a_name", landing.shape, "float32")
    session.init(key, np.full_like(landing, 1.1) if session.rank == 0 else None, landing).wait(30)
    gradient = np.random.RandomState(session.rank).rand(*landing.shape).astype(np.float32)
    for turn in range(int(os.environ.get("TURNS", "5"))):
        session.pushpull(key, gradient + landing, landing).wait(60)
        if turn == 1:
            print("under way", flush=True)
    session.barrier()
    print(hashlib.sha256(landing.tobytes()).hexdigest())
"""


@pytest.fixture
def relays():
    made = []

    def make(port):
        made.append(Relay(port))
        return made[-1]

    yield make
    for relay in made:
        relay.close()


# A server that tells the scheduler the port of a relay in front of its own: workers then come through that.
SERVER_BEHIND_RELAY = """
import sys
sys.path.insert(0, %r)
from p3.cluster.connections import vans
from p3.cli import main
from relay import Relay
opened = vans.DoorStep.open.__func__
relays = []
def open_behind_relay(cls, settings, host):
    door = opened(cls, settings, host)
    relays.append(Relay(door.port))
    return door._replace(port=relays[0].port)
vans.DoorStep.open = classmethod(open_behind_relay)
import threading
def obey():
    if sys.stdin.readline():
        relays[0].alter.set()
threading.Thread(target=obey, daemon=True).start()
code = main(["exec"])
seen = bytes(relays[0].seen)
# Four bytes turn up by chance in one of some hundred jobs; so often, never.
print(len(seen), seen.count(b"P3dW") > 10, b"a_key_with_a_name" in seen, %r in seen)
sys.exit(code)
"""


@pytest.fixture
def start_server_behind_relay(tmp_path):
    started = []

    def start(cluster, **settings):
        script = tmp_path / "server.py"
        script.write_text(SERVER_BEHIND_RELAY % (str(HELPERS), KNOWN))
        env = cluster.env(DMLC_ROLE="server", **settings)
        env["PYTHONPATH"] = str(ROOT)
        started.append(subprocess.Popen([sys.executable, str(script)], env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def through_relays(cluster, relays, start_server, script=TRAIN, **settings):
    """A job of one server and two workers, whose every byte over TCP passes a relay: (processes, scheduler's relay)."""
    relay = relays(cluster.port)
    scheduler = cluster.start("scheduler", **settings)
    settings = dict(settings, DMLC_PS_ROOT_PORT=str(relay.port), P3_LOCAL="tcp", P3_LOCAL_AGGREGATION="0")
    server = start_server(cluster, **settings)
    return [scheduler, server] + [cluster.start("worker", script, P3_RANK=str(r), **settings) for r in range(2)], relay


@pytest.fixture(scope="module")
def plain_result():
    return {}


@pytest.mark.parametrize("tls", ["0", "1"])
def test_nothing_that_crosses_is_readable_and_the_sums_are_the_same(
    make_cluster, relays, start_server_behind_relay, plain_result, tls
):
    # LOCAL_AGGREGATION is a common setting, which the scheduler alone need not know.
    nodes, relay = through_relays(make_cluster(2, 1), relays, start_server_behind_relay, P3_TLS=tls)
    out, err = nodes[1].communicate(timeout=60)
    finished = [node.wait(60) for node in nodes[:1] + nodes[2:]]
    assert [node.code for node in finished] == [0, 0, 0], (finished, err)
    assert not err and not any(node.err for node in finished)
    sent, *readable = out.decode().split()
    assert int(sent) > 2 * 5 * 2 * 480000
    control = [text in bytes(relay.seen) for text in (b"P3dW", b"a_key_with_a_name", b"welcome")]
    # The same eyes see everything without TLS: that is what they are for.
    assert readable == ["False"] * 3 if tls == "1" else readable == ["True", "False", "True"]
    assert control == [tls == "0"] * 3
    plain_result[tls] = {node.out for node in finished[1:]}
    assert len(plain_result[tls]) == 1
    if len(plain_result) == 2:
        assert plain_result["0"] == plain_result["1"]


def test_what_is_altered_on_its_way_is_an_error_that_names_the_peer(
    make_cluster, relays, start_server_behind_relay
):
    cluster = make_cluster(2, 1)
    nodes, _ = through_relays(cluster, relays, start_server_behind_relay, P3_TLS="1", TURNS="1000000")
    assert nodes[2].read_line() == "under way"
    nodes[1].stdin.write(b"alter\n")
    nodes[1].stdin.flush()
    finished = [node.wait(30) for node in nodes[:1] + nodes[2:]]
    _, err = nodes[1].communicate(timeout=30)
    assert nodes[1].returncode == 1 and all(node.code == 1 for node in finished)
    named = r"lost (server 0|worker \d) \(127.0.0.1\) \(TLS refuses what came from it: altered on the way\)"
    for text in [err.decode()] + [node.err for node in finished]:
        assert re.search(named, text), text


@pytest.mark.parametrize("lacking", ["scheduler", "worker"])
def test_a_node_with_and_a_node_without_it_say_so(make_cluster, lacking):
    cluster, nodes = make_cluster(1, 1), {}

    def start(role, **settings):
        nodes[role] = cluster.start(role, TRAIN, P3_TLS=str(int(role != lacking)), **settings)

    if lacking == "worker":
        start("scheduler", P3_LOG="info")
        start("server")
        while b" joined\n" not in (line := nodes["scheduler"].popen.stderr.readline()):
            assert line, nodes["scheduler"].wait(10)
        start("worker")
    else:
        for role in ("server", "worker"):  # the later one may find no scheduler any more
            start(role, P3_RENDEZVOUS_TIMEOUT_S="8")
        cluster.until_called_by(1)
        start("scheduler")
    finished = {role: node.wait(20) for role, node in nodes.items()}
    if lacking == "worker":
        assert "P3_TLS=1, but here P3_TLS=0: set it to the same value" in finished["worker"].err
        assert "P3_TLS=0, but here P3_TLS=1: set it to the same value" in finished["server"].err
    else:
        assert "P3_TLS=0, but here P3_TLS=1: set it to" in finished["worker"].err + finished["server"].err
    assert "set it to the same value on all nodes" in finished["scheduler"].err
    assert [node.code for node in finished.values()] == [1, 1, 1]


def test_p3_run_encrypts_when_asked_to(run_job):
    script = TRAIN + "    print(os.environ['P3_TLS'])\n"
    job = run_job(script, 2, 2, {"P3_LOCAL": "tcp", "P3_LOG": "info"}, ["--tls"])
    assert job.code == 0, job
    assert job.out.count("[worker 0] 1\n") == job.out.count("[worker 1] 1\n") == 1
    assert "a connection is encrypted" in job.out


# Two ends in this process


def run(test):
    async def main():
        ends = socket.socketpair(socket.AF_UNIX)  # TLS does not mind what carries it
        for end in ends:
            end.setblocking(False)
        await asyncio.wait_for(test(*ends), 20)

    asyncio.run(main())


async def both(ours, theirs, our_key=KEY, their_key=KEY):
    results = await asyncio.gather(
        encryption.secure(ours, our_key, True),
        encryption.secure(theirs, their_key, False),
        return_exceptions=True,
    )
    return results


def test_another_key_is_refused_on_both_ends():
    async def test(ours, theirs):
        for result in await both(ours, theirs, their_key=bytes(32)):
            assert isinstance(result, ProtocolError) and "TLS" in str(result)

    run(test)


def test_an_end_with_a_certificate_instead_of_the_key_is_refused(tmp_path):
    """Whoever stands in between and does not know the secret can answer only like this."""
    import ssl

    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=p3",
         "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")], capture_output=True)
    if made.returncode:
        pytest.skip("no openssl command here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")

    async def test(ours, theirs):
        theirs.setblocking(True)

        def impostor():
            with contextlib.suppress(OSError):
                context.wrap_socket(theirs, server_side=True).recv(1)
            theirs.close()

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        with pytest.raises(ProtocolError, match="TLS"):
            await encryption.secure(ours, KEY, True)
        thread.join(10)

    run(test)


def test_a_tunnel_carries_both_ways_and_ends_each_way_by_itself():
    async def test(ours, theirs):
        a, b = [encryption.Tunnel(tls) for tls in await both(ours, theirs)]
        big = bytes(range(256)) * 40000
        sending = asyncio.ensure_future(channel.send(a.socket, big))
        assert await channel.read_exactly(b.socket, len(big)) == big
        await sending
        a.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            await channel.read_exactly(b.socket, 1)
        await channel.send(b.socket, b"still here")
        assert await channel.read_exactly(a.socket, 10) == b"still here"
        for tunnel in (a, b):
            tunnel.socket.close()
            tunnel.close()

    run(test)


def test_a_peer_that_goes_with_bytes_unread_is_an_end_and_no_warning(caplog):
    """As it is on a bare socket: whoever reads knows whether it may end. What came before is not lost."""

    async def test(*ends):
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # TCP, which knows a reset
            theirs = stack.enter_context(socket.create_connection(listener.getsockname()))
            ours = stack.enter_context(listener.accept()[0])
            ours.setblocking(False), theirs.setblocking(False)
            tls, peer = await both(ours, theirs)
            tunnel = encryption.Tunnel(tls)
            await channel.send(tunnel.socket, b"never read")
            assert peer.write(b"last words") == 10
            await channel.until_ready(peer.read_fd, "read")
            peer.close()
            assert await channel.read_exactly(tunnel.socket, 10) == b"last words"
            with contextlib.suppress(OSError):  # goes nowhere
                await channel.send(tunnel.socket, b"still there?")
            with pytest.raises(ConnectionResetError):
                await channel.read_exactly(tunnel.socket, 1)
            tunnel.socket.close()
            tunnel.close()

    run(test)
    assert not caplog.records


def test_a_key_is_for_one_connection_one_subject_and_one_end():
    def proved():
        ours = auth.Connector(SECRET, "worker", auth.DATA, "server", True)
        theirs = auth.Acceptor(SECRET, "server", ours.hello, True)
        ours.verify(theirs.accept(ours.proof(theirs.challenge)))
        theirs.agree()
        return ours, theirs

    ours, theirs = proved()
    assert ours.key("data") == theirs.key("data") != ours.key("other data")
    assert ours.key("data") != proved()[0].key("data") and len(ours.key("data")) == 32


def test_a_scheduler_that_dies_in_the_handshake_leaves_who_joins_to_the_next_one():
    async def main():
        listener = listen("127.0.0.1")
        job = Settings(root_host="127.0.0.1", root_port=listener.getsockname()[1], num_workers=1, num_servers=1,
                       secret=KEY.hex(), tls=True, on_worker_loss="continue")  # fmt: skip
        wants = replace(job, role="worker", join_s=20.0, num_workers=None, num_servers=None)
        joining = asyncio.ensure_future(Member.join(wants))
        with (await asyncio.get_running_loop().sock_accept(listener))[0] as dying:
            await channel.prove_to_connector(dying, job.job_secret(), "scheduler", True)
        running = asyncio.ensure_future(Scheduler(job, listener).run())
        try:
            with pytest.raises(RendezvousError, match="wants to join a job that does not run yet"):
                await joining
        finally:
            await channel.cancel(running)

    asyncio.run(asyncio.wait_for(main(), 30))
