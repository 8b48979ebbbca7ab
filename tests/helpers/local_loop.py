"""Local steps by p3.torch.LocalSteps in a plain loop, for scripts that compare what a trainer makes of them."""

import copy

import p3.torch
import torch

OPTIONS = {"every": 3, "fragments": 2, "delay": 2}
MEAN = {"every": 2, "outer": {"lr": 1.0, "momentum": 0.0}}  # global weights are the mean of local ones
LR = 0.1
UNDER_WAY = 4  # behind this step both fragments are


def in_a_loop(net, optimizer, scheduler, steps, loss_of, evaluate, evaluate_at, clip=None):
    """`steps`: the batches of each of this worker's; `loss_of(net, batch, batches)`: what counts of one of a step's.
    `evaluate(net)` is asked behind the steps that `evaluate_at` names, with the global weights."""
    told = {"losses": [], "norms": [], "evaluated": []}
    p3.torch.LocalSteps(optimizer, net, **OPTIONS)
    for number, batches in enumerate(steps, 1):
        for batch in batches:
            loss = loss_of(net, batch, batches)
            loss.backward()
            told["losses"].append(loss.item())
        if clip is not None:
            told["norms"].append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number in evaluate_at:
            with optimizer.global_weights(), torch.no_grad():
                told["evaluated"].append(evaluate(net))
    optimizer.take_global()
    told["weights"] = weights(net)
    optimizer.release()
    return told


def in_one_process(net, steps, loss_of, count):
    """What MEAN makes of all workers' SGD, of which each counts by its samples. `steps`: of each worker, with the
    batches of each step; `count(batch)`: a batch's samples."""
    nets = [copy.deepcopy(net) for _ in steps]
    optimizers = [torch.optim.SGD(one.parameters(), LR) for one in nets]
    samples = [0.0] * len(nets)
    for number, of_workers in enumerate(zip(*steps), 1):
        for worker, batches in enumerate(of_workers):
            for batch in batches:
                loss_of(nets[worker], batch, batches).backward()
                samples[worker] += count(batch)
            optimizers[worker].step()
            optimizers[worker].zero_grad()
        if number % MEAN["every"] == 0:
            with torch.no_grad():
                for parameters in zip(*(one.parameters() for one in nets)):
                    mean = sum(one * share / sum(samples) for one, share in zip(parameters, samples))
                    for one in parameters:
                        one.copy_(mean)
            samples = [0.0] * len(nets)
    return weights(nets[0])


def weights(net):
    return [one.detach().double().sum().item() for one in net.parameters()]
