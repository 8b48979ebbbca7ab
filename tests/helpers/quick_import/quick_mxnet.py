"""MXNet's import takes a quarter of its time: it makes and imports only what tests use.

It makes each operator's Python function, with MXNet's own code, when that is first called: of six thousand a test's
process calls a few dozen. Before the first call a function has no documentation, and its signature is
(*args, **kwargs). And while it runs, libraries that MXNet would import where it finds them are hidden from it; scripts
have them.
"""

import sys
import types

_to_make = []  # by the number in a function's code


def _make(number, args, kwargs):
    make, names, function = _to_make[number]
    made = make(*names)
    function.__code__, function.__defaults__ = made.__code__, made.__defaults__
    return function(*args, **kwargs)


_UNMADE = (lambda *args, **kwargs: _make(-1, args, kwargs)).__code__


def _when_called(make):
    """`make`: MXNet's, of a handle, an operator's name and the function's."""

    def make_later(*names):
        code = _UNMADE.replace(co_consts=tuple(len(_to_make) if one == -1 else one for one in _UNMADE.co_consts))
        function = type(make)(code, make.__globals__, names[-1])
        function.__doc__ = ""
        _to_make.append((make, names, function))
        return function

    make.__globals__["_make"] = _make
    return make_later


def _change(base):
    """In mxnet.base: the functions that make all of an operator module's functions."""
    for name in ("_init_op_module", "_init_np_op_module"):

        def init(*arguments, make_op_func=None, of_mxnet=getattr(base, name), **others):
            *arguments, make = arguments if make_op_func is None else (*arguments, make_op_func)
            of_mxnet(*arguments, make_op_func=_when_called(make), **others)

        setattr(base, name, init)


# For its optimizers of scikit-learn, for statistics, and for downloads, which no test makes but which it must find.
_HIDDEN = {"sklearn": None, "scipy": None, "requests": types.ModuleType("requests")}


def _load_without_what_is_hidden(load, module):
    hidden = {name: found for name, found in _HIDDEN.items() if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        load(module)
    finally:
        for name in hidden:
            del sys.modules[name]


def _load_base(load, module):
    load(module)
    _change(module)


LOADS = {"mxnet": _load_without_what_is_hidden, "mxnet.base": _load_base}
