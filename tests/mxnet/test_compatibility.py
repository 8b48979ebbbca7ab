"""The column of p3_sync in docs/compatibility.md is what runs; and the page is what its results yield."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("mxnet")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from compatibility import run, table
from compatibility.registry import CASES, STORES

RESULTS = table.load()


@pytest.fixture(scope="module")
def cells():
    """{case: cell} of p3_sync, all of them run now."""
    return dict(run.run_store("p3_sync", list(CASES)))


@pytest.mark.timeout(600)  # the first of them runs all the jobs
@pytest.mark.parametrize("name", CASES)
def test_p3_sync_does_what_the_table_says(cells, name):
    assert cells[name]["outcome"] == RESULTS["cells"][name]["p3_sync"]["outcome"], cells[name]["reason"]


def test_every_case_ran_with_every_store():
    assert {name: list(row) for name, row in RESULTS["cells"].items()} == {name: list(STORES) for name in CASES}


def test_page_is_what_the_results_yield():
    assert table.PAGE.read_text(encoding="utf-8") == table.page(RESULTS)
