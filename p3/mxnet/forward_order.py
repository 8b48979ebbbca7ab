"""The order in which the forward pass of a step first uses each parameter.

This is the order in which the next forward pass will wait for them, so it is the order of their priorities.
`watch()` wraps `gluon.Parameter.data` and `row_sparse_data`, through which every block, hybridized or not, fetches its
parameters; the first access of each in a step, while autograd records, is noted. So a step's order is complete before
its first gradient is pushed.

A parameter's step ends with its push. Counted at the first use: a parameter that several layers share. Known limit:
parameters registered on a parent block count as used before its children's.
"""

import functools
from weakref import WeakSet, WeakValueDictionary

from mxnet import autograd

noted = 0  # parameters so far: a sign that there are more to be found by their arrays
uses = 0  # that were the first of a step, of any parameter: the position of the next one

_parameters = WeakSet()  # those noted and still alive; each knows its position
_owners = WeakValueDictionary()  # id of an array -> its parameter, as of _owners_noted
_owners_noted = 0


def watch(gluon):
    """Starts noting, in the module `mxnet.gluon`."""
    gluon.Parameter._p3_position, gluon.Parameter._p3_is_used = None, False
    for name in ("data", "row_sparse_data"):
        setattr(gluon.Parameter, name, _noting(getattr(gluon.Parameter, name)))


def _noting(access):
    @functools.wraps(access)
    def noting_access(self, *arguments, **settings):
        global noted, uses
        array = access(self, *arguments, **settings)
        if not self._p3_is_used and autograd.is_recording():
            if self._p3_position is None:
                _parameters.add(self)
                noted += 1
            self._p3_position, self._p3_is_used = uses, True
            uses += 1
        return array

    return noting_access


def position(parameter):
    """The number of its last use that was the first of a step; None if it was never used while recording."""
    return getattr(parameter, "_p3_position", None)


def end_step(parameter):
    """The parameter's gradient is pushed: what uses it next is the next step."""
    if parameter is not None:
        parameter._p3_is_used = False


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
