"""Jobs of several torchrun agents, each of which P3 takes for a host of its own."""

import socket
import sys

_ALL = 'for _ in $(seq $0); do "$@" & started="$started $!"; done; for one in $started; do wait $one || exit; done'


def agent(number, *options):
    """The beginning of a command that starts one of so many on this machine, each with a worker; the same for all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = "127.0.0.1:%d" % free.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=%d" % number, "--nproc-per-node=1",
            "--rdzv-backend=c10d", "--rdzv-endpoint=" + at, "--local-addr=127.0.0.1", *options]  # fmt: skip


def agents(number, *options):
    """Of one that starts them all."""
    return ["sh", "-c", _ALL, str(number), *agent(number, *options)]
