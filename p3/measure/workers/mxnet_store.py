"""The end of a training whose workers may be rounds apart: all have pushed all, and each gets what came of it."""


def meet(mx, store, outs) -> None:
    """`outs`: by key, what the weights are pulled into; a store of P3's pulls into what it pulled to last. On every
    worker. Waits for all."""
    if hasattr(store, "join"):
        return store.join()
    mx.nd.waitall()
    store._barrier()
    for key, out in enumerate(outs):
        store.pull(key, out=out)
    mx.nd.waitall()
