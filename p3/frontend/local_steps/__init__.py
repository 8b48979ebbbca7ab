"""Local steps: every worker trains by itself, and only now and then they exchange what has become of their weights.

DiLoCo (arXiv 2311.08105) and, in fragments that overlap with training, Streaming DiLoCo (arXiv 2501.18512). For each
weight there is a global value, the same on all workers, which the servers keep. When its fragment is due, a worker
sends what says how far its local weight is from that; the servers average, take a step of the outer optimizer, and
send the new global value. `delay` steps later each worker merges it:

    local = alpha * local + (1 - alpha) * global

Without compression the local weight itself is sent, from which the servers take the difference ("outer_sgd" of their
rules): so with an outer learning rate of 1 and no momentum the global value is the workers' mean, to the bit. With
compression it is global - local, as the codecs encode what is small, and keep what they leave out ("torch_sgd").

Each weight is a key of its own, with one round for each exchange. Urgency goes by rounds first, so priorities are the
deadlines: of what waits to leave, the fragment that training needs first goes first.
"""
