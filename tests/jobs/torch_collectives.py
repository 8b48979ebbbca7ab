"""P3's own small collectives, and torch's process group beside them: python torch_collectives.py."""

import torch
import torch.distributed as dist

import p3.torch


def message(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return "no error"


rank, size = p3.torch.rank(), p3.torch.size()
ranks = range(size)

given = torch.tensor([[0.1 * (rank + 1), -2.0, float(rank)]], dtype=torch.float32)
total = p3.torch.all_reduce(given)
assert torch.equal(total, torch.tensor([[sum(0.1 * (one + 1) for one in ranks), -2.0 * size, sum(ranks)]])), total
assert given[0, 2] == rank, "the argument was changed"
mean = p3.torch.all_reduce(torch.full((5,), float(rank), dtype=torch.bfloat16), "mean")
assert mean.dtype == torch.bfloat16 and torch.equal(mean.float(), torch.full((5,), sum(ranks) / size)), mean
assert p3.torch.all_reduce(torch.tensor(2**40 + rank)) == size * 2**40 + sum(ranks)
assert p3.torch.all_reduce(torch.empty(0)).shape == (0,)
assert p3.torch.all_reduce(torch.ones(1000)).sum() == 1000 * size

value = {"list": [1, -0.5, "ü", None, True], "empty": {}, "large": 2**60, "infinite": float("inf")}
assert p3.torch.broadcast_object(value if rank == 0 else object()) == value
assert p3.torch.broadcast_object(["last"] if rank == size - 1 else None, src=size - 1) == ["last"]
assert p3.torch.all_gather_object("x" * rank) == ["x" * one for one in ranks]

for wrong in ((1,), {1: 2}, {"a": [object()]}, torch.ones(1), float):
    assert "can be sent" in message(p3.torch.all_gather_object, wrong), wrong
assert "['a'][0] is a object" in message(p3.torch.all_gather_object, {"a": [object()]})
assert "the workers are 0 to" in message(p3.torch.broadcast_object, 1, size)
assert "'sum' and 'mean'" in message(p3.torch.all_reduce, torch.ones(1), "max")
assert "the mean of floating-point numbers alone" in message(p3.torch.all_reduce, torch.tensor([1]), "mean")

if size > 1:
    said = message(p3.torch.all_gather_object, object() if rank == 1 else 1)
    assert ("can be sent" if rank == 1 else "worker 1 has given a value that cannot be sent") in said, said
    for unlike in (torch.ones(5 + rank), torch.ones(2) if rank else torch.ones(2, dtype=torch.int64)):
        assert "tensors of one shape and type" in message(p3.torch.all_reduce, unlike)

model = torch.nn.Linear(2, 1)
optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
p3.torch.process_group()
p3.torch.process_group()  # a second time it is there
assert dist.is_initialized() == (size > 1)
if size > 1:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    summed = torch.tensor([float(rank)])
    dist.all_reduce(summed)
    assert summed == sum(ranks)
    ddp = torch.nn.parallel.DistributedDataParallel
    said = message(ddp, torch.nn.Sequential(model))
    assert "P3 trains its parameter weight already. Take DistributedDataParallel away" in said, said
    ddp(torch.nn.Linear(2, 1))  # of no model of P3's
    model(torch.ones(1, 2) * rank).sum().backward()
    optimizer.step()  # beside the group
    optimizer.synchronize()
    weights = p3.torch.all_gather_object(model.weight.tolist())
    assert weights == [weights[0]] * size
    optimizer.release()
    ddp(model)  # P3's no longer
    dist.destroy_process_group()
print("worker %d of %d: all is well" % (rank, size))
