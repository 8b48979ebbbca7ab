"""An experiment is known by its entry in the table alone: nothing else of what measures asks for one by its name."""

import ast
from pathlib import Path

import lab_results as made
import p3.measure
from p3.measure.bench import experiments, report
from p3.measure.results import records

ROOT = Path(p3.measure.__file__).parent
TABLE = ROOT / "bench" / "experiments.py"
NAMES = {one.name for one in experiments.EXPERIMENTS}


def constants(nodes):
    return [node.value for node in nodes if isinstance(node, ast.Constant)]


def asks_by_name(program):
    """Lines that compare something with an experiment's name, or collect nothing but such names."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Compare) and NAMES.intersection(constants([node.left, *node.comparators])):
            yield node.lineno
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            members = node.keys if isinstance(node, ast.Dict) else node.elts
            if len(members) > 1 and len(constants(members)) == len(members) and NAMES.issuperset(constants(members)):
                yield node.lineno


def test_a_comparison_is_found():
    assert list(asks_by_name('run.experiment == "dgc"')) == [1]
    assert list(asks_by_name('_WATCHED = ("dgc", "factors")')) == [1]
    assert list(asks_by_name('_ROWS = {"scale": 1,\n "slices": 2}')) == [1]
    assert not list(asks_by_name('setting(one, ("model", "rate", "compute"))'))


def test_nothing_but_the_table_asks_for_an_experiment_by_its_name():
    found = [
        "%s:%d" % (path.relative_to(ROOT), line)
        for path in sorted(ROOT.glob("**/*.py"))
        if path != TABLE
        for line in asks_by_name(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_an_experiment_of_another_version_is_still_told():
    found = records.of_records([made.settings("guess"), made.run("guess")])
    (table,) = report.tables(found)
    assert table.title.startswith("guess: ") and table.rows[1][1].startswith("1.10")
