"""Trains every cell that the table of combinations allows, one after the other, on every worker of a job:
every_cell.py [CUT]"""

import os
import sys

import cells

from p3.plan import combinations
from p3.settings import Settings
from p3.worker.session import Session

cuts = sys.argv[1:] or list(cells.CUTS)
with Session.open(Settings.from_env(os.environ)) as session:
    allowed = [one for one in cells.every_cell() if one.cut in cuts and not combinations.refusal(*one.chosen)]
    for cell in allowed:
        cells.train(session, cell)
    session.barrier()
    print("trained", len(allowed), flush=True)
