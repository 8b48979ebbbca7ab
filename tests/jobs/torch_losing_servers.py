"""torch_losing_servers.py MODE: workers of PyTorch whose servers die (struck.py), and who train on. Each prints a
digest of its weights. MODE is one of MODES. P3S_MARKS: servers come back, as struck.py has it."""

import hashlib
import sys

import struck
import torch

import p3.torch
from p3.worker import session

STEPS = 12
MODES = {
    "by itself": (torch.optim.Adam, {"lr": 0.01}, {}),
    "clipping": (torch.optim.AdamW, {"lr": 0.01}, {"max_grad_norm": 0.1}),
    "synchronous": (torch.optim.SGD, {"lr": 0.1, "nesterov": True, "momentum": 0.9}, {"synchronous": True}),
    "bf16": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"compression": "bf16", "max_grad_norm": 0.1}),
    "int4": (torch.optim.SGD, {"lr": 0.01}, {"compression": {"up": "int4", "down": "fp16"}}),
}


def main(mode):
    rank = p3.torch.rank()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 900), torch.nn.Tanh(), torch.nn.Linear(900, 30))
    kind, settings, options = MODES[mode]
    optimizer = p3.torch.DistributedOptimizer(kind(model.parameters(), **settings), model, **options)
    marks = struck.key_of_marks(session.current())
    struck.begin(session.current())
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if struck.MARKS and step % struck.MARKS == 0:
            struck.until_all_are_back(session.current(), marks, step, p3.torch.members)
        inputs, targets = torch.randn(8, 20, generator=generator), torch.randn(8, 30, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        assert p3.torch.all_reduce(torch.tensor([1.0])).item() == session.current().num_workers, step
    if struck.MARKS:
        struck.until_all_are_back(session.current(), marks, STEPS, p3.torch.members)
    optimizer.synchronize()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print("worker %d: %s" % (rank, digest.hexdigest()), flush=True)
    p3.torch.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
