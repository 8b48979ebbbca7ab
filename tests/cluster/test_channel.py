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


def test_a_connection_that_comes_while_accepting_ends_is_no_error():
    said = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: said.append(context))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            accepting = loop.create_task(loop.sock_accept(listener))
            await asyncio.sleep(0)  # it waits
            with socket.create_connection(listener.getsockname()):
                await asyncio.sleep(0)  # the loop has seen that it can accept, and goes on here before it does
                await channel.stop_accepting(accepting, listener)

    asyncio.run(main())
    assert said == []
