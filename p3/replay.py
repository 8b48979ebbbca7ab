"""`python -m p3.replay`: one worker of p3/measure/replay/worker.py."""

import sys

from p3.measure.replay.worker import main

if __name__ == "__main__":
    sys.exit(main())
