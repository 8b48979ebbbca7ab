"""Which optimizers of former trainings P3 has released, for scripts that train one model behind the other."""

from p3.torch.rounds.released import Released


def released(optimizers):
    """Of each, with local steps or without: whether it is torch's own again."""
    return [not hasattr(one, "_p3_local") and isinstance(getattr(one, "_p3", None), (Released, type(None)))
            for one in optimizers]  # fmt: skip
