"""What the front ends have in common, over a Session (p3/worker/session.py): none of it knows a framework.

    order       in which order forward passes use the keys: how urgent each gradient is
    rounds      the rounds of one key: when one may begin, whose result is waited for, also with staleness
    steps       how many workers take each step, and join() of one that has no batches left
    serving     join() where each key has rounds of its own
    states      an optimizer's state on the servers, of many keys at once
    snapshots   of trainers, as an optimizer or a model's weights, which they say of themselves
    weights     all of these for a framework whose steps are functions of NumPy arrays
    local_steps  workers that train by themselves, and exchange weights now and then; p3.LocalSteps, for arrays
    waiting     how a script waits for its job
    factors     which fully connected layers send their gradients as factors
    compression  how each key is compressed: as all, or as a function says
    loss_scale  what compression has left out of gradients whose loss is scaled
    partitions  into how many the rows of a sparse key are cut: the search while a job trains
    pieces      how a gradient that comes from a device is cut
"""
