"""Jobs of several torchrun agents, each of which P3 takes for a host of its own."""

import socket
import sys

_ALL = 'for _ in $(seq $0); do "$@" & started="$started $!"; done; for one in $started; do wait $one || exit; done'


def agents(number, *options):
    """The beginning of a command that starts so many on this machine, each with a worker."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = "127.0.0.1:%d" % free.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=%d" % number, "--nproc-per-node=1",
             "--rdzv-backend=c10d", "--rdzv-endpoint=" + at, "--local-addr=127.0.0.1", *options]  # fmt: skip
    return ["sh", "-c", _ALL, str(number), *agent]
