"""How a worker uses MXNet's own stores and P3's alike."""

from __future__ import annotations

from p3.mxnet import hooks


def import_mxnet(store: str):
    """MXNet for a worker of that store: with P3 in it, or as it is for a store of its own."""
    if store.lower() not in hooks.NAMES:
        hooks.withdraw()
    import mxnet

    return mxnet


def meet(mx, store, outs) -> None:
    """The end of a training whose workers may be rounds apart: all have pushed all, and each gets what came of it.

    `outs`: by key, what the weights are pulled into; a store of P3's pulls into what it pulled to last. On every
    worker. Waits for all."""
    if hasattr(store, "join"):
        return store.join()
    mx.nd.waitall()
    store._barrier()
    for key, out in enumerate(outs):
        store.pull(key, out=out)
    mx.nd.waitall()
