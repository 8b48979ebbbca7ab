"""One worker of a job: worker.py PATH runs the programs that come by the socket there."""

import faulthandler
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import p3  # noqa: F401
import mxnet as mx
import random_programs
from store_programs import machine

faulthandler.enable()
store = mx.kv.create("p3_sync")
random_programs.serve(sys.argv[1], store.rank, lambda program: machine.run(program, store.rank, store.num_workers))
os._exit(0)  # at once: a job that a test has done with need not end in good order
