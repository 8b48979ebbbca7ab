"""Local steps by p3.torch.LocalSteps in a plain loop, for scripts that compare what a trainer makes of them."""

import p3.torch
import torch

OPTIONS = {"every": 3, "fragments": 2, "delay": 2}
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


def weights(net):
    return [one.detach().double().sum().item() for one in net.parameters()]
