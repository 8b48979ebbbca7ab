"""ray_train.py FOLDER WORKERS: p3.torch in Ray Train's TorchTrainer, with nothing but the optimizer's line.

Each worker writes FOLDER/RANK: its weights after STEPS steps. Rank 1 is killed in the first start after step 5, and the
next one resumes from the snapshots in FOLDER/snapshots.
"""

import json
import os
import signal
import sys

STEPS = 7


def make():
    import torch

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model, worker, step):
    import torch

    generator = torch.Generator().manual_seed(100 * worker + step)
    return model(torch.randn(8, 6, generator=generator)).square().mean()


def alone(workers):
    """What one process of plain torch makes of all workers' batches: the weights, as lists."""
    model, optimizer = make()
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, worker, step) for worker in range(workers)) / workers).backward()
        optimizer.step()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def train(config):
    import p3.torch
    from p3.torch.start.job import current

    first, _ = p3.torch.resume()
    model, optimizer = make()
    optimizer = p3.torch.DistributedOptimizer(optimizer, model)

    rank, folder = p3.torch.rank(), config["folder"]
    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        p3.torch.snapshot(step + 1)
        if first == 0 and step == 4:
            current().snapshots.finish()
            p3.torch.barrier()  # rank 0 has written the manifest
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    told = {"weights": {name: value.tolist() for name, value in model.state_dict().items()}, "size": p3.torch.size(),
            "node": os.environ["NODE_RANK"], "first": first, "servers": current().num_servers}  # fmt: skip
    with open(os.path.join(folder, str(rank)), "w") as file:
        json.dump(told, file)


def main():
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder, workers = sys.argv[1], int(sys.argv[2])
    variables = {"P3_SNAPSHOT_DIR": os.path.join(folder, "snapshots"), "P3_SNAPSHOT_EVERY": "2"}
    ray.init(address="auto", runtime_env={"env_vars": variables})
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=os.path.join(folder, "ray"), failure_config=FailureConfig(max_failures=1)),
    ).fit()


if __name__ == "__main__":
    main()
