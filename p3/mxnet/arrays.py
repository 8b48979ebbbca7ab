"""What kind of array one of MXNet's is, and the same content as another kind."""

from mxnet.ndarray import NDArray


def is_sparse(array):
    return type(array) is not NDArray and array.stype != "default"


def to_dense(array):
    return array.tostype("default") if is_sparse(array) else array


def classic(array):
    """MXNet's legacy operators take its NumPy-like arrays only under their classic type; the memory is the same."""
    return array if type(array) is NDArray or is_sparse(array) else array.as_nd_ndarray()
