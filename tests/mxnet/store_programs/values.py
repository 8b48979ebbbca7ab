"""The numbers of programs: small multiples of 1/8, so that sums of them are exact in whatever order, in float16 too."""

import mxnet as mx
import numpy as np


def values(seed, shape, dtype="float32"):
    return (np.random.RandomState(seed).randint(-8, 9, size=shape) / 8).astype(dtype)


def gradient_seed(seed, rank, device, position):
    return ((seed * 4 + position) * 4 + rank) * 4 + device


def rows_of(rows, shape, rank, device):
    """Which rows this device of this worker touches: others than its neighbours, but for some."""
    return sorted({(row + 2 * rank + device) % shape[0] for row in rows})


def dense(seed, spec, device=0):
    return mx.nd.array(values(seed, spec["shape"], spec["dtype"]), ctx=mx.cpu(device), dtype=spec["dtype"])


def row_sparse(seed, spec, rows, device=0):
    if not rows:
        return mx.nd.sparse.zeros("row_sparse", tuple(spec["shape"]), dtype=spec["dtype"], ctx=mx.cpu(device))
    content = values(seed, [len(rows), *spec["shape"][1:]], spec["dtype"])
    return mx.nd.sparse.row_sparse_array(
        (content, rows), shape=tuple(spec["shape"]), dtype=spec["dtype"], ctx=mx.cpu(device)
    )


def sum_of(arrays, spec, rows=None):
    """Of row_sparse arrays, a row_sparse one that has all rows that any of them has."""
    total = sum(array.asnumpy() for array in arrays)
    if arrays[0].stype == "default":
        return mx.nd.array(total, dtype=spec["dtype"])
    if rows is None:
        rows = sorted({int(row) for array in arrays for row in array.indices.asnumpy()})
    if not rows:
        return mx.nd.sparse.zeros("row_sparse", tuple(spec["shape"]), dtype=spec["dtype"])
    return mx.nd.sparse.row_sparse_array((total[rows], rows), shape=tuple(spec["shape"]), dtype=spec["dtype"])


def without_zero_rows(array, spec):
    """A row_sparse array without the rows that are zero; a dense one as it is. Where P3's workers update, they find the
    rows of a sum by their values: docs/mxnet.md, Limits."""
    if array.stype == "default":
        return array
    rows = [int(row) for row in array.indices.asnumpy() if array.asnumpy()[int(row)].any()]
    return sum_of([array], spec, rows)


TOLERANCES = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-12}  # of the largest: MXNet has several loops for a rule


def differ(got, expected):
    """What differs, in words; None if nothing does."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.dtype.kind == "U":
        return None if np.array_equal(got, expected) else "%s instead of %s" % (got.tolist(), expected.tolist())
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return "%s %s instead of %s %s" % (got.dtype, got.shape, expected.dtype, expected.shape)
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    tolerance = float(largest) * TOLERANCES.get(got.dtype.name, 0)
    same = np.isclose(got, expected, rtol=0, atol=tolerance, equal_nan=True)
    if same.all():
        return None
    place = tuple(np.argwhere(~same)[0])
    return "%r instead of %r at %s; got %s, not %s" % (
        got[place], expected[place], place, got.ravel()[:12].tolist(), expected.ravel()[:12].tolist(),
    )  # fmt: skip
