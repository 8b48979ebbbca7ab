"""As `python -m p3.replay`, of a store of P3's: it can be forked with MXNet (tests/helpers/forked.py)."""

import sys

import mxnet  # noqa: F401  the replay imports it

from p3.measure.replay.worker import main

if __name__ == "__main__":
    sys.exit(main())
