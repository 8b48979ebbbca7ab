"""MODULE ARGUMENTS...: as `python -m` of one that imports torch, so that it can be forked (tests/helpers/forked.py)."""

import runpy
import sys

import torch  # noqa: F401  as the module does

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
