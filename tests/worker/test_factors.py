"""Sufficient factors: the rule, the bytes of a card, and sessions of real jobs."""

import re

import numpy as np
import plugin_jobs as jobs
import pytest
from processes import ROOT

from p3.plan.key_plan import SliceSize
from p3.placement import Placement
from p3.frontend.factors import MARGIN, Rule, checked
from p3.plan.factor_shape import FactorShape


def test_with_a_worker_and_a_server_on_each_machine_the_rule_is_poseidons():
    """Zhang's thesis, Table 3.4 and Algorithm 2: 2K(P - 1)(M + N) against 2MN(2P - 2)/P. But for headers."""
    for machines in (2, 4, 8):
        rule = Rule(Placement.one_of_each(machines), SliceSize(10_000, machines))
        for outputs, inputs in ((4096, 4096), (1000, 4096)):
            even = 2 * outputs * inputs / (machines * (outputs + inputs))
            assert even / MARGIN == pytest.approx(rule.most_rows(outputs, inputs), rel=0.01)


def test_where_servers_are_few_or_machines_have_several_workers_batches_are_smaller_or_larger():
    """Of 4096 x 4096: what the busiest card carries, in elements, divided by K(M + N) and by MN."""
    shared, apart = (0, 0, 0, 0, 1, 1, 1, 1), tuple(range(8))
    for workers, servers, aggregates, of_factors, of_dense in (
        # A server's card: 7 of its machine's, half of what 6 others send, to all but who sent it; and its worker's own.
        (apart, (0, 1), True, (7 + 7 * 6) / 2 + 1 / 2, 7 / 2 + 1 / 2),
        (shared, (0, 1), True, 4, 1),
        (shared, (0, 1), False, 4 / 2 + (4 * 4 + 4 * 3) / 2, 4),
        (shared, (2, 3), True, 4, 1),  # servers elsewhere
    ):
        rule = Rule(Placement(workers, servers, aggregates), SliceSize(50_000, len(servers)))
        most = 4096 * 4096 * of_dense / (8192 * of_factors * MARGIN)
        assert rule.most_rows(4096, 4096) == pytest.approx(most, rel=0.003), (workers, servers, aggregates)


def test_the_documentation_says_how_large_batches_may_be():
    apart, shared = tuple(range(8)), (0, 0, 0, 0, 1, 1, 1, 1)
    table = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8").split("| rows of each worker |")[1]
    told = re.findall(r"^\| (\d+) \|", table.split("\n\n")[0], re.M)
    for most, (workers, servers) in zip(told, ((apart, apart), (apart, (0, 1)), (apart, (0,)), (shared, (0, 1)))):
        rule = Rule(Placement(workers, servers), SliceSize("auto", len(servers)))
        assert int(most) == rule.most_rows(4096, 4096), (workers, servers)
    assert len(told) == 4


def test_why_a_layer_stays_dense_is_said():
    shape = FactorShape(32, 64, 64)
    two, four = (Rule(Placement.one_of_each(machines), SliceSize(50_000, machines)) for machines in (2, 4))
    assert two.why_dense("auto", shape._replace(rows=28)) == ""
    reason = "it has 32 rows, and with 4 workers, 4 servers and 4 machines factors pay up to "
    assert re.fullmatch(reason + r"1\d", four.why_dense("auto", shape))
    assert four.why_dense("factors", shape) == ""
    assert four.why_dense("factors", shape._replace(rows=33)) == "factors of 33 rows are larger than the gradient"
    assert two.why_dense("dense", shape) == "its route is 'dense'"
    alone = Rule(Placement((0, 0), (0, 0)), SliceSize(50_000, 2))
    assert alone.why_dense("auto", shape) == "the whole job is on one machine"


def test_options_are_checked():
    for batch_size, route in ((0, "auto"), (True, "auto"), (2.0, "auto"), (None, "fastest")):
        with pytest.raises(ValueError, match="it must be"):
            checked(batch_size, route)


@pytest.mark.parametrize("workers, servers", [(2, 2), (3, 2), (4, 4)])
def test_sums_are_exact_and_the_bytes_are_those_of_the_formula(workers, servers):
    status, output = jobs.run_p3(workers, servers, jobs.python("factors_with_numpy.py", "exact"))
    assert status == 0, output
    assert output.count("exact") == workers, output
    assert len(set(re.findall(r"digest (\w{16})", output))) == 1, output


@pytest.mark.parametrize("variables", [
    {"P3_TLS": "1", "P3_LOCAL_AGGREGATION": "0"}, {"P3_CHECKSUM": "1", "P3_SERVER_THREADS": "2"},
])  # fmt: skip
def test_they_work_with(variables):
    status, output = jobs.run_p3(3, 2, jobs.python("factors_with_numpy.py", "exact"), **variables)
    assert status == 0 and output.count("exact") == 3, output


def test_workers_with_other_batches_are_named():
    status, output = jobs.run_p3(2, 1, jobs.python("factors_with_numpy.py", "disagree"))
    assert status != 0
    expected = r"worker 0 .* and worker 1 .* disagree about key 'w \(factors\)': shape is \(3, 90\)"
    assert re.search(expected, output), output


def test_what_excludes_them_is_said(tmp_path):
    for variables in ({"P3_ON_WORKER_LOSS": "continue"}, {"P3_SNAPSHOT_DIR": str(tmp_path)}):
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
