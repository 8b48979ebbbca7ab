"""Two workers, one of which is late with all keys but the last: that one's weight can be read before the others' values
have come. Were copies to weights to wait for each other, worker 0 would wait for ever."""

import p3  # noqa: F401
import mxnet as mx

LATE = 8  # more than MXNet has of anything that copies could share

kv = mx.kv.create("p3_sync")
weights = [mx.nd.zeros((10, 10)) for _ in range(LATE + 1)]
gradient = mx.nd.ones((10, 10))
for key, weight in enumerate(weights):
    kv.broadcast(key, weight, out=weight)
mx.nd.waitall()
kv._barrier()
late, in_time = range(LATE), LATE
if kv.rank == 0:
    for key in (*late, in_time):
        kv.pushpull(key, gradient, out=weights[key])
    weights[in_time].wait_to_read()
    kv._barrier()
else:
    kv.pushpull(in_time, gradient, out=weights[in_time])
    kv._barrier()
    for key in late:
        kv.pushpull(key, gradient, out=weights[key])
assert all((weight.asnumpy() == 2).all() for weight in weights)
print("worker %d has all" % kv.rank)
