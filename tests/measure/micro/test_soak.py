"""The soak itself, briefly: exact sums, and nothing grows while processes die; and that it notices what is wrong."""

import subprocess
import sys

import numpy as np
import pytest
from processes import clean_environment

from p3.measure.micro import soak
from p3.measure.micro.processes import soak_worker


def run_soak(*arguments):
    command = [sys.executable, "-m", "p3", "bench", "soak", "--delay", "0.5", "--set", "P3_CHECKSUM=1", *arguments]
    return subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, timeout=100, text=True)


# Where servers die there are no rows; local aggregation excludes all deaths.
@pytest.mark.parametrize(
    "arguments, deaths",
    [
        (["--seconds", "5", "--every", "1", "--workers", "3"], True),
        (["--seconds", "5", "--every", "1", "--workers", "3", "--servers", "2", "--kill", "worker,scheduler"], True),
        (["--seconds", "2", "--kill", "none", "--set", "P3_LOCAL_AGGREGATION=1"], False),
    ],
)
def test_a_short_soak_has_exact_sums_and_nothing_grows(arguments, deaths):
    finished = run_soak(*arguments)
    assert finished.returncode == 0, finished.stdout
    table, conclusion = finished.stdout.splitlines()[:-1], finished.stdout.splitlines()[-1]
    assert conclusion.endswith("deaths: sums exact, all flat")
    assert (int(table[-1].split()[1]) > 0) == deaths


def sample(megabytes):
    return dict.fromkeys((*soak.BYTES, *soak.COUNTS), 0) | {"worker_bytes": megabytes << 20, "threads": megabytes}


def test_what_rises_to_the_end_is_noticed_and_a_warm_up_is_not():
    assert not soak.growth([sample(size) for size in (10, 20, 50, 50, 50, 50, 50, 50, 50, 50)])
    assert set(soak.growth([sample(size) for size in range(50, 100, 5)])) == {"worker_bytes", "threads"}


def part(*bits, mask=-1, number=0):
    return soak_worker.Part("w", number, np.array(bits, np.int64), mask)


def test_a_sum_may_lack_whole_slices_of_the_worker_that_was_lost_and_from_then_on_must():
    whole = part(7, 7, 7)
    assert soak_worker.look([whole, whole], 7, 1) == (7, 0)
    assert soak_worker.look([whole, part(5, 5), whole], 7, 1) == (5, 1)  # of the round in which worker 1 is lost
    assert soak_worker.look([part(5, 5), part(5)], 5, 2) == (5, 0)
    for wrong, present in ((part(7, 5), 7), (whole, 5), (part(8), 7)):  # half a slice, one who was lost, a stranger
        with pytest.raises(AssertionError, match="key 'w' is wrong in round 3, slice 0"):
            soak_worker.look([part(5), wrong], present, 3)


def test_of_rows_each_worker_s_are_looked_at_alone():
    of_first, of_second = part(1, 1, mask=1), part(2, 2, 2, mask=2)
    assert soak_worker.look([of_first, of_second, part(mask=4)], 7, 1) == (7, 0)  # the third has touched none
    assert soak_worker.look([of_first, part(0, 0, mask=2), part(2, mask=2)], 7, 1) == (5, 1)
    with pytest.raises(AssertionError, match=r"gradients of the workers \[1\], and of \[0, 1\] it"):
        soak_worker.look([part(2, 0, mask=2)], 3, 1)


def test_a_sum_of_another_round_or_place_is_none():
    total = soak_worker.pattern(7, 4) * 5
    assert (soak_worker.bits_of(total, soak_worker.pattern(7, 4), 4, 7) == 5).all()
    for wrong in (soak_worker.pattern(6, 4) * 5, np.roll(total, 1)):
        with pytest.raises(AssertionError, match="key 4 is wrong in round 7: it is none of gradients of that round"):
            soak_worker.bits_of(wrong, soak_worker.pattern(7, 4), 4, 7)
