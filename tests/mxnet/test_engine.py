"""What P3 asks of MXNet's engine, beyond what single operations show."""

from importlib.util import find_spec

import pytest
from plugin_jobs import python, run_p3

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)


@pytest.mark.parametrize("turn", [1, 2])
def test_thousands_of_errors_at_a_time_leave_the_heap_whole(turn, tmp_path):
    """MXNet notes them without a lock (p3/mxnet/engine/completion.h): before P3 did something about it, every second
    run ended by SIGABRT."""
    perturbed = {"MALLOC_PERTURB_": "165", "MXNET_CPU_WORKER_NTHREADS": "4"}  # makes memory that is free useless
    status, output = run_p3(2, 2, python("many_errors.py", tmp_path / "mark"), **perturbed)
    assert status == 137 and "worker 0 has come to its end" in output, output
