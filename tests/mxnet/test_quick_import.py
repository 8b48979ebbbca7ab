"""What makes MXNet's import quick in tests' jobs (tests/helpers/quick_import) takes nothing from their scripts."""

import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("mxnet")

HIDDEN = ("requests", "scipy", "sklearn")


def output_of(code):
    status, output = jobs.run([sys.executable, "-c", code])
    assert status == 0, output
    return output


@pytest.mark.parametrize("imports", ["mxnet", "p3, mxnet"])
def test_mxnet_imports_none_of_the_hidden_libraries_and_a_script_has_them(imports):
    for name in HIDDEN:
        pytest.importorskip(name)
    code = "import %s, sys; print([name for name in %r if name in sys.modules]); import %s; print(scipy.__version__)"
    first, second = output_of(code % (imports, HIDDEN, ", ".join(HIDDEN))).splitlines()
    assert first == "[]" and second[0].isdigit()


def test_what_a_script_has_imported_stays():
    pytest.importorskip("scipy")
    assert output_of("import scipy, mxnet, sys; print(sys.modules['scipy'] is scipy)") == "True\n"


def test_an_operators_function_is_made_when_it_is_called_first():
    code = "import mxnet as mx; at = mx.nd.relu; print(bool(at.__doc__), at(mx.nd.array([-1, 2])).asnumpy().tolist())"
    assert output_of(code + "; print(at.__code__.co_varnames[0])") == "False [0.0, 2.0]\ndata\n"
