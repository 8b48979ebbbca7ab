"""Random programs of what scripts do with stores and Trainers, with P3 and in MXNet alone, side by side."""

import sys
from pathlib import Path

import forked
import pytest

pytest.importorskip("mxnet")
pytest.importorskip("hypothesis")
import hypothesis.strategies as st
import random_programs

sys.path.insert(0, str(Path(__file__).resolve().parent))
import store_programs
from store_programs import draw, draw_trainers


@pytest.mark.timeout(180)  # a program that fails is made small
@pytest.mark.parametrize("job, seconds", [("alone", 10), ("together", 18), ("groups", 12)])
def test_programs_do_with_p3_what_mxnet_alone_does(job, seconds):
    again = "%s --job %s --replay" % (store_programs.COMMAND, job)
    with store_programs.make_runner(job) as runner:
        counts = random_programs.search(draw.programs(), runner, again, seconds)
    print(counts)
    assert counts["compared"] > counts["programs"] > 0, counts
    if counts["programs"] > 300:  # on a slow machine the rarest may be missing
        expected = {*draw.STORE_OPERATIONS, *draw_trainers.OPERATIONS} - {"wrong"}
        assert expected <= counts.keys(), expected - counts.keys()
        assert sum(name.startswith("refused: ") for name in counts) > 8, counts


def test_a_search_finds_what_fails_and_makes_it_small():
    class Runner:
        history = []

        def __call__(self, program):
            if sum(program["numbers"]) > 5:
                raise random_programs.Finding("too much")
            return {"added": 1}

        def start(self):
            pass

        end = start

    programs = st.fixed_dictionaries({"numbers": st.lists(st.integers(0, 9))})
    with pytest.raises(random_programs.Finding, match=r"(?s)too much.*\[\n +6\n +\]\n.*again x "):
        random_programs.search(programs, Runner(), "again x", 20)


def test_a_worker_that_dies_is_a_finding_and_the_next_program_has_another(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, random_programs\n"
        "random_programs.serve(sys.argv[1], 0, lambda dies: os._exit(3) if dies else random_programs.Answer())\n"
    )
    with random_programs.Runner(forked.command(str(script))) as runner:
        assert not runner(False)
        with pytest.raises(random_programs.Finding, match="worker 0 has died"):
            runner(True)
        assert runner.history == [False, True]
        assert not runner(False) and runner.history == [False]
