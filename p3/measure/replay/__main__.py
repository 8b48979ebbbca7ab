"""`python -m p3.measure.replay`: one worker."""

import sys

from p3.measure.replay.worker import main

sys.exit(main())
