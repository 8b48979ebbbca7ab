"""Random programs of what scripts do around an optimizer: as in plain torch, or an error that names what to do.

tests/torch/programs has them; a program that fails here is printed as JSON, for `python -m programs --replay FILE`
with PYTHONPATH=.:tests/torch:tests/helpers.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")
sys.path.insert(0, str(Path(__file__).resolve().parent))
from programs.known import KNOWN
from programs.machine import Finding, Machine
from programs.search import search

SECONDS, SEED = 20, 1  # `make fuzz` takes another seed each time, and hours


@pytest.fixture(scope="module")
def machine():
    with Machine([1, 2]) as machine:
        yield machine


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_program_does_as_in_plain_torch(machine, name, workers):
    machine.check(KNOWN[name], workers)


@pytest.mark.timeout(600)  # to make a finding small
@pytest.mark.parametrize("workers", [1, 2])
def test_random_programs_do_as_in_plain_torch(machine, workers):
    before = machine.programs, machine.operations, machine.compared
    search(machine, workers, SECONDS, SEED)
    after = machine.programs, machine.operations, machine.compared
    programs, operations, compared = (now - then for now, then in zip(after, before))
    assert programs > 10 and compared > 0.6 * operations, machine.summary()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_not_the_same_is_found(machine, workers):
    program = dict(KNOWN["broadcast after a step"], operations=[["distribute", {}], ["mistake", {}]])
    with pytest.raises(Finding, match="differs at operation 2, the end: .model.a.weight is .* off"):
        machine.check(program, workers)
