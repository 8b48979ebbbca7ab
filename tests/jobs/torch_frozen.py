"""Jobs of p3.torch whose models are mostly frozen: torch_frozen.py NAME ARGUMENT..., one function for each."""

import os
import sys
import time
import zlib
from pathlib import Path

import torch
from torch import nn

import p3.torch
import this_job
from p3.torch.rounds import frozen
from p3.torch.start import job
from p3.worker import streams

PIECE = 1 << 20
BASE = 48 << 20  # bytes of the largest weights


def frozen_parameter(tensor):
    return nn.Parameter(tensor, requires_grad=False)


class Adapted(nn.Module):
    """A base of every kind of weights, which nobody trains, and a small layer."""

    def __init__(self, large=BASE):
        super().__init__()
        self.bfloats = frozen_parameter(torch.rand(large // 4).to(torch.bfloat16))
        self.numbers = frozen_parameter(torch.randint(-99, 99, (large // 32, 4), dtype=torch.int32))
        self.empty = frozen_parameter(torch.empty(0, 3))
        self.scalar = frozen_parameter(torch.rand(()))
        self.transposed = frozen_parameter(torch.rand(300, 7).t())
        self.mask = frozen_parameter(torch.rand(5) > 0.5)
        self.register_buffer("running", torch.rand(3))
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x + self.running + self.scalar)


def digest(model):
    found = 0
    for tensor in (*model.parameters(), *model.buffers()):
        found = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy(), found)
    return "%08x" % found


def peak_of(process):
    """Bytes of memory that a process has had at most."""
    lines = Path("/proc/%s/status" % process).read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def streamed(folder):
    """With one server, and snapshots: what is held where, and what every worker has then."""
    streams.PIECE_BYTES = PIECE
    round, _ = p3.torch.resume()
    rank, server, counters = p3.torch.rank(), this_job.server(), job.current().counters
    torch.manual_seed(rank + 10 * round)
    model = Adapted()
    expected = None
    if rank == 0:
        untrained = [one.detach().clone() for one in model.parameters() if not one.requires_grad]
        expected = [one.contiguous().view(-1).view(torch.uint8) for one in untrained]
    if rank == 1:
        write = frozen._Stream.write

        def late(*arguments):
            time.sleep(0.005)  # rank 0 must wait, or this worker would get later pieces
            write(*arguments)

        frozen._Stream.write = late
    processes = ["self", str(server)]
    for process in processes[:1]:
        Path("/proc/%s/clear_refs" % process).write_text("5")  # the peak begins anew
    before = [peak_of(process) for process in processes]
    optimizer, sent = torch.optim.SGD(model.layer.parameters(), lr=0.1, momentum=0.9), -counters()["bytes_sent"]
    optimizer = p3.torch.DistributedOptimizer(optimizer, model)
    sent += counters()["bytes_sent"]
    assert BASE < sent < 1.02 * BASE if rank == 0 else sent < 0.02 * BASE, sent
    grown = [peak_of(process) - was for process, was in zip(processes, before)]
    assert max(grown) < BASE // 2, grown
    if rank == 0:
        for one, was in zip((one for one in model.parameters() if not one.requires_grad), expected):
            assert torch.equal(one.detach().contiguous().view(-1).view(torch.uint8), was)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    p3.torch.snapshot(round + 1)
    optimizer.synchronize()
    job.current().snapshots.finish()
    p3.torch.barrier()
    (kept,) = job.current().server_counters()
    # weight and bias with their momenta; buffers, steps, number, and the empty key by which workers compare
    assert kept["keys"] == 2 + 4 and kept["value_bytes"] == 2 * 32 + 12 + 72 + 16, kept
    held = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    assert 0 < held < 100_000, held
    print("worker %d began at %d, grew by %s and has %s" % (rank, round, grown, digest(model)), flush=True)
    os._exit(3) if round == 0 and rank == 0 else None


def thawed():
    """What was frozen is trained next, and given back: it always is rank 0's."""
    rank = p3.torch.rank()
    torch.manual_seed(rank)
    model = Adapted(1 << 12)
    first = p3.torch.DistributedOptimizer(torch.optim.SGD(model.layer.parameters(), lr=0.1), model)
    print("worker %d has %s" % (rank, digest(model)), flush=True)
    scalar = torch.optim.SGD([model.scalar.requires_grad_()], lr=0.1)
    second = p3.torch.DistributedOptimizer(scalar, model)
    for optimizer in (first, second):
        optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    first.step()
    second.step()
    second.release()
    if rank == 1:
        with torch.no_grad():
            for tensor in (model.scalar, model.bfloats, model.transposed):
                tensor.zero_()
    first.broadcast()
    print("worker %d then %s" % (rank, digest(model)), flush=True)


def differing():
    model = Adapted(1 << 12 if p3.torch.rank() == 0 else 1 << 13)
    p3.torch.DistributedOptimizer(torch.optim.SGD(model.layer.parameters(), lr=0.1), model)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
