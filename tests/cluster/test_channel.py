"""A control connection that ends while it is in use."""

import asyncio
import socket
import time

from p3.cluster.connections import channel

_TCP_CLOSE = 7  # netinet/tcp.h, the state after a reset


def test_closing_a_connection_that_the_peer_has_reset_is_no_error():
    async def reset_and_close():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname())
            sock, _ = listener.accept()
        sock.setblocking(False)
        stream = await channel.Stream.over(sock)
        peer.close()
        assert await stream.receive() is None
        stream.send({"kind": "start"})  # answered by a reset, since nobody is there to read it
        deadline = time.monotonic() + 10
        while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE:
            assert time.monotonic() < deadline
        await stream.close(5)

    asyncio.run(reset_and_close())
