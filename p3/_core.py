"""Stands in where the C++ core is not built. Once it is, Python prefers the extension module of this name."""

import os
import sys

from p3.errors import NotBuilt

_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_pip = "%s -m pip install " % sys.executable
if os.path.exists(os.path.join(_folder, "Makefile")):
    _remedy = "make -C %s (for the Python in its .venv), or: %s%s" % (_folder, _pip, _folder)
else:
    _remedy = _pip + "--force-reinstall --no-deps WHEEL   # one of P3 for this Python: docs/wheels.md"
_version = "%d.%d" % sys.version_info[:2]
raise NotBuilt("P3's C++ core is not built in %s for Python %s. Run: %s" % (_folder, _version, _remedy))
