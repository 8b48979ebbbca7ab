"""What trainings of torch models have left, and how far apart it is."""

import torch


def load(folder, mode, rank, name):
    return torch.load(folder / f"{name}-{mode}-{rank}.pt", weights_only=True)


def leaves(content, path=""):
    """(where, tensor or number) of a state_dict. None is as good as nothing: older releases of torch save it."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from leaves(value, f"{path}[{number}]")
    elif content is not None:
        yield path.replace("._orig_mod", ""), content


def distance(content, reference, path=""):
    """The largest difference of any tensor, as a share of its largest value, or of any floating point number, such as a
    loss that LBFGS keeps; all else must be equal."""
    here, there = dict(leaves(content)), dict(leaves(reference))
    assert here.keys() == there.keys()
    worst = 0.0
    for where, value in there.items():
        if isinstance(value, float) and isinstance(here[where], float) and value != here[where]:
            worst = max(worst, abs(here[where] - value) / max(abs(value), 1e-3))
            continue
        if not isinstance(value, torch.Tensor):
            assert here[where] == value, where
            continue
        assert (here[where].shape, here[where].dtype) == (value.shape, value.dtype), where
        if value.numel():
            scale = max(value.abs().max().item(), 1e-3)
            worst = max(worst, (here[where].double() - value.double()).abs().max().item() / scale)
    return worst


def same_bits(content, other):
    others = dict(leaves(other))
    return all(torch.equal(value, others[where]) for where, value in leaves(content) if isinstance(value, torch.Tensor))
