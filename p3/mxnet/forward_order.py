"""The order in which the forward pass first uses each parameter.

This is the order in which the next forward pass will wait for them, so it is the order of their priorities.
`watch()` wraps `gluon.Parameter.data` and `row_sparse_data`, through which every block, hybridized or not, fetches its
parameters; the first access of each while autograd records is noted. So the order is complete before the first gradient
is pushed.

Counted at the first use: a parameter that several layers share. Appended: one that is used for the first time in a
later iteration. Known limit: parameters registered on a parent block count as used before its children's.
"""

import functools
from weakref import WeakSet, WeakValueDictionary

from mxnet import autograd

# How many parameters were noted so far: the position of the next one, and a sign that the order has grown.
noted = 0

_parameters = WeakSet()  # those noted and still alive; each knows its position
_owners = WeakValueDictionary()  # id of an array -> its parameter, as of _owners_noted
_owners_noted = 0


def watch(gluon):
    """Starts noting, in the module `mxnet.gluon`."""
    gluon.Parameter._p3_position = None
    for name in ("data", "row_sparse_data"):
        setattr(gluon.Parameter, name, _noting(getattr(gluon.Parameter, name)))


def _noting(access):
    @functools.wraps(access)
    def noting_access(self, *arguments, **settings):
        global noted
        array = access(self, *arguments, **settings)
        if self._p3_position is None and autograd.is_recording():
            self._p3_position = noted
            _parameters.add(self)
            noted += 1
        return array

    return noting_access


def position(parameter):
    """How many parameters were used before this one; None if it was not used while recording."""
    return getattr(parameter, "_p3_position", None)


def owner_of(array):
    """The noted parameter whose value or gradient this very NDArray object is, or None."""
    global _owners_noted
    if _owners_noted != noted:
        _owners.clear()
        for parameter in _parameters:
            for candidate in _arrays_of(parameter):
                _owners[id(candidate)] = parameter
        _owners_noted = noted
    parameter = _owners.get(id(array))
    # A parameter may have been given new arrays since, and another object the old one's id.
    if parameter is not None and any(candidate is array for candidate in _arrays_of(parameter)):
        return parameter
    return None


def _arrays_of(parameter):
    return (parameter._data or []) + (parameter._grad or [])
