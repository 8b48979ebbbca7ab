"""Random programs for stores and Trainers: what MXNet does in one process with all workers' gradients is the reference.

    PYTHONPATH=.:tests/mxnet:tests/helpers python -m store_programs --seconds 600

draw.py and draw_trainers.py draw programs. In each worker machine.py runs them, on pairs of P3 and the reference:
store_pair.py and trainer_pair.py.
"""

from pathlib import Path

COMMAND = "PYTHONPATH=.:tests/mxnet:tests/helpers python -m store_programs"
# {name: (workers, servers, settings)}. Slices are short, so that small arrays have several, on both servers.
JOBS = {
    "alone": (1, 0, {}),
    "together": (2, 2, {}),
    "apart": (2, 2, {"P3_LOCAL_AGGREGATION": "0"}),
    "groups": (2, 2, {"P3_LOCAL_AGGREGATION": "0", "P3_GROUPS": "2"}),
}


def make_runner(job):
    import forked
    from random_programs import Runner

    workers, servers, settings = JOBS[job]
    command = forked.command(str(Path(__file__).with_name("worker.py")))
    settings = {"P3_SLICE_ELEMENTS": "7", "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0", **settings}
    return Runner(command, workers, servers, **settings)
