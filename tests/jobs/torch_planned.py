"""Steps as a script asks for them, or a strategy; worker 0 prints the weights' digest, and what each key has become:
torch_planned.py OPTIONS [OPTIONS...], in JSON, of each worker or of all: what DistributedOptimizer takes, and in
"optimizer" the class, in "groups" entries of the param groups, in "factors" what p3.torch.factors takes."""

import json
import sys
import zlib

import torch

import p3.torch
from p3.torch.start import job

options = json.loads(sys.argv[1 + p3.torch.rank() % (len(sys.argv) - 1)])
kind, groups = options.pop("optimizer", "SGD"), options.pop("groups", [{}, {}])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20), torch.nn.Linear(20, 2))
parameters = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
if "factors" in options:
    p3.torch.factors(model, **options.pop("factors"))
optimizer = getattr(torch.optim, kind)([{**one, **more} for one, more in zip(parameters, groups)], lr=0.1)
p3.torch.DistributedOptimizer(optimizer, model, **options)
for step in range(3):
    optimizer.zero_grad()
    torch.manual_seed(10 * p3.torch.rank() + step)
    model(torch.randn(4, 40)).square().sum().backward()
    optimizer.step()
optimizer.synchronize()
weights = torch.cat([one.detach().reshape(-1) for one in model.parameters()]).numpy()
keys = job.current().keys
plans = {key.name: keys.wait_for(key).plan for key in keys.all()}
axes = {name: [plan.codec, plan.value_codec, plan.staleness, plan.parts] for name, plan in plans.items()}
if p3.torch.rank() == 0:
    print(json.dumps({"digest": zlib.crc32(weights), "axes": axes}))
