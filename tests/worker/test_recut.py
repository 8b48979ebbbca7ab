"""Another strategy between two rounds: the same sums to the bit, and nothing of the former cut on the servers."""

import json
import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("p3._core", reason="the extension is not built")

from p3.plan.strategy import Cut, Strategy
from p3.worker.session import Session

ROUNDS = 9
CHANGES = [
    [0, {"version": 1, "default": {"servers": [1]}}],
    [2, {"version": 1, "default": {"servers": [2, 0, 2]}, "keys": {"last": {"servers": [0]}}}],
    [3, {"version": 1}],
    [6, {"version": 1, "default": {"servers": [0, 1]}, "keys": {"first": {"slice": 7}}}],
]


def run(*changes, workers=2, **variables):
    variables.setdefault("P3_LOCAL_AGGREGATION", "0")
    status, output = jobs.run_p3(workers, 3, jobs.python("recut.py", ROUNDS, *map(json.dumps, changes)), **variables)
    assert status == 0, output
    return json.loads(next(line[line.index("{"):] for line in output.splitlines() if '"landed"' in line))


@pytest.mark.parametrize("variables", [
    {}, {"P3_TLS": "1", "P3_CHECKSUM": "1"}, {"P3_SERVER_THREADS": "2"}, {"P3_LOCAL_AGGREGATION": "1"},
    {"P3_ON_WORKER_LOSS": "continue", "P3_MAX_WORKERS": "4"}, {"P3_PRIORITY": "off"},
], ids=str)  # fmt: skip
def test_sums_and_norms_stay_the_same_through_several_changes(variables):
    usual, changed = run(**variables), run(*CHANGES, **variables)
    assert changed["landed"] == usual["landed"]
    assert changed["servers"]["0 second"] == [0, 1] and usual["servers"]["0 second"] == []
    assert sum(changed["held"]) == pytest.approx(sum(usual["held"]), rel=0.1), "the former cuts are gone"
    assert changed["held"][2] < 0.1 * usual["held"][2], "rows and norms alone"


def test_three_workers_and_a_change_in_each_round():
    turns = [[2], [0, 1], [1, 2, 2], [0]]
    changes = [[number, {"version": 1, "default": {"servers": turns[number % 4]}}] for number in range(ROUNDS)]
    assert run(*changes, workers=3)["landed"] == run(workers=3)["landed"]


def test_it_is_for_servers_that_only_sum():
    with Session.open() as session:
        session.set_optimizer(0, {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False})
        with pytest.raises(ValueError, match="store 0: another strategy while a job trains and plain SGD on the serv"):
            session.change_strategy([0], Strategy())
        keeping = {"value_compression": {"type": "int4"}}
        session.declare("w", (100, 100), "float32", 1, options=keeping)
        with pytest.raises(ValueError, match="key 'w': another strategy while a job trains and compression of what"):
            session.change_strategy([1], Strategy())


def test_alone_there_is_one_server_and_slices_may_change():
    import numpy as np

    with Session.open() as session:
        key, landing = session.declare("w", (1000,), "float32"), np.zeros(1000, "float32")
        session.init(key, landing, landing).wait(10)
        for number in range(4):
            assert session.change_strategy([0], Strategy(Cut(slice=100 + number)))
            assert not session.change_strategy([0], None)
            session.pushpull(key, np.full(1000, number, "float32"), landing).wait(10)
            assert (landing == number).all()
        assert session.server_counters()[0]["keys"] == 1
        with pytest.raises(ValueError, match="server 1 is named"):
            session.change_strategy([0], Strategy(Cut(servers=(1,))))


def test_workers_that_rest_behind_other_rounds_are_named():
    script = (
        "import numpy as np; from p3.worker.session import Session; from p3.plan.strategy import Strategy\n"
        "with Session.open() as session:\n"
        "    key, landing = session.declare('w', (9,), 'float32'), np.zeros(9, 'float32')\n"
        "    session.init(key, landing if session.is_first else None, landing).wait(60)\n"
        "    stores = [0] if session.rank == 0 else [0, 1]\n"
        "    session.change_strategy(stores, Strategy())\n"
    )
    status, output = jobs.run_p3(2, 2, [sys.executable, "-c", script])
    assert status != 0
    text = "worker 0 (127.0.0.1) and worker 1 (127.0.0.1) disagree about the stores and rounds behind which a strategy"
    assert text in output, output
