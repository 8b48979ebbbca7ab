"""loaded_by_servers_torch.py STEPS: AdamW on the servers; as loaded_by_servers.py, of weights alone."""

import sys
import zlib

import torch

import p3.torch


def main(steps):
    step, _ = p3.torch.resume()
    torch.manual_seed(1)
    model = torch.nn.Linear(1000, 300)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    begun, sent = step, None
    for step in range(begun, steps):
        torch.manual_seed(10 * step + p3.torch.rank())
        optimizer.zero_grad()
        loss = model(torch.rand(4, 1000)).square().mean()
        if sent is None:  # the states leave before the first push
            sent = p3.torch.start.job.current().counters()["bytes_sent"]
        loss.backward()
        optimizer.step()
        p3.torch.snapshot(step + 1)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    p3.torch.start.job.current().snapshots.finish()
    p3.torch.start.job.current().barrier()
    print("from %d: %08x after %d bytes" % (begun, zlib.crc32(weights), sent), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
