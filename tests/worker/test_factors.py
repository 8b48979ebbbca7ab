"""Sufficient factors: the rule, the bytes of a card, and sessions of real jobs."""

import re

import numpy as np
import plugin_jobs as jobs
import pytest

from p3.key_plan import KeyPlan
from p3.worker.factors import break_even, card_bytes, checked, most_rows, why_dense
from p3.worker.key import FactorShape


def test_the_rule_is_poseidons():
    """Zhang's thesis, Table 3.4 and Algorithm 2: 2K(P1 - 1)(M + N) against 2MN(P1 + P2 - 2)/P2."""
    for workers, servers in ((2, 2), (8, 8), (8, 4), (3, 1)):
        for outputs, inputs in ((4096, 4096), (1000, 4096)):
            dense = 2 * outputs * inputs * (workers + servers - 2) / servers
            even = break_even(outputs, inputs, workers, servers)
            assert 2 * even * (workers - 1) * (outputs + inputs) <= dense
            assert 2 * (even + 1) * (workers - 1) * (outputs + inputs) > dense
            assert most_rows(outputs, inputs, workers, servers) == int(0.9 * even)
    assert break_even(4096, 4096, 8, 8) == 4096 // 8  # as many servers as workers: K <= 2MN/(P(M + N))


def test_why_a_layer_stays_dense_is_said():
    shape = FactorShape(32, 64, 64)
    assert why_dense("auto", shape._replace(rows=28), 2, 2) == ""
    assert why_dense("auto", shape, 4, 4) == "it has 32 rows, and with 4 workers factors pay up to 14"
    assert why_dense("factors", shape, 4, 4) == ""
    assert why_dense("factors", shape._replace(rows=33), 4, 4) == "factors of 33 rows are larger than the gradient"
    assert why_dense("auto", shape, 1, 1) == "there is one worker"
    assert why_dense("dense", shape, 2, 2) == "its route is 'dense'"


def test_options_are_checked():
    for batch_size, route in ((0, "auto"), (True, "auto"), (2.0, "auto"), (None, "fastest")):
        with pytest.raises(ValueError, match="it must be"):
            checked(batch_size, route)


def test_a_card_carries_each_part_to_each_other_host_once():
    """(P - 1) K (M + N) elements each way, where the slices are shared out evenly (Zhang's thesis, Table 3.4)."""
    for hosts in (2, 4, 8):
        plan = KeyPlan(0, "float32", 8 * 100, 0, 100, parts=hosts)  # each part has 8 slices
        for host in range(hosts):
            sent, received = card_bytes(plan, host, hosts)
            headers = 80 * 8 * 2 * (hosts - 1)  # of each slice, from and to each worker elsewhere
            assert sent == received == (hosts - 1) * 4 * 800 + headers


@pytest.mark.parametrize("workers, servers", [(2, 2), (3, 2), (4, 4)])
def test_sums_are_exact_and_the_bytes_are_those_of_the_formula(workers, servers):
    status, output = jobs.run_p3(workers, servers, jobs.python("factors_with_numpy.py", "exact"))
    assert status == 0, output
    assert output.count("exact") == workers, output
    assert len(set(re.findall(r"digest (\w{16})", output))) == 1, output


@pytest.mark.parametrize("variables", [{"P3_TLS": "1"}, {"P3_CHECKSUM": "1", "P3_SERVER_THREADS": "2"}])
def test_they_work_with(variables):
    status, output = jobs.run_p3(3, 2, jobs.python("factors_with_numpy.py", "exact"), **variables)
    assert status == 0 and output.count("exact") == 3, output


def test_workers_with_other_batches_are_named():
    status, output = jobs.run_p3(2, 1, jobs.python("factors_with_numpy.py", "disagree"))
    assert status != 0
    expected = r"worker 0 .* and worker 1 .* disagree about key 'w \(factors\)': shape is \(3, 90\)"
    assert re.search(expected, output), output


def test_what_excludes_them_is_said(tmp_path):
    for variables in ({"P3_ON_WORKER_LOSS": "wait"}, {"P3_SNAPSHOT_DIR": str(tmp_path)}):
        status, output = jobs.run_p3(1, 1, jobs.python("factors_with_numpy.py", "exact"), **variables)
        assert status != 0 and "leave the layer out of p3.factors" in output, output


def test_an_array_of_another_size_is_refused():
    from p3.settings import Settings
    from p3.worker.session import Session

    with Session.open(Settings()) as session:
        key = session.declare_factors("w", FactorShape(2, 3, 4))
        weight = np.zeros((3, 4), "float32")
        session.init(key, None, weight).wait(30)
        with pytest.raises(ValueError):
            session.pushpull(key, np.zeros((2, 3), "float32"), weight)
        with pytest.raises(ValueError):
            session.pushpull(key, np.zeros((2, 7), "float32"), np.zeros((2, 7), "float32"))
