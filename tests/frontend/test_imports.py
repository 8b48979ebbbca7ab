"""p3.frontend stands below the frameworks: it works where none is installed."""

import subprocess
import sys

FRAMEWORKS = ("torch", "mxnet", "jax")


def test_frontend_imports_no_framework():
    script = (
        "import importlib, pkgutil, sys\n"
        "sys.modules.update(dict.fromkeys(%r))\n"  # to import one is ImportError
        "import p3.frontend\n"
        "names = [one.name for one in pkgutil.walk_packages(p3.frontend.__path__, 'p3.frontend.')]\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "assert 'p3.frontend.order' in names, names\n"
        "assert not [name for name in sys.modules if name.startswith(('p3.torch', 'p3.mxnet.'))\n"
        "            and name != 'p3.mxnet.hooks'], sorted(sys.modules)\n" % (FRAMEWORKS,)
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
