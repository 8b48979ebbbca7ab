"""`python -m p3.replay`: one worker."""

import sys

from p3.replay.worker import main

sys.exit(main())
