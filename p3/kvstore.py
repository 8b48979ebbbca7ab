"""The MXNet plugin under the name that scripts know: p3/mxnet/kvstore.py."""

from p3.mxnet.kvstore import P3KVStore

__all__ = ["P3KVStore"]
