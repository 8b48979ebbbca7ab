"""The table of what goes together: every cell that it allows is trained, every other is refused with its text."""

import itertools
import re

import cells
import plugin_jobs as jobs
import pytest
from processes import ROOT

from p3 import codecs
from p3._core import P3Server
from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.errors import ConfigError, ProtocolError
from p3.plan import choices, combinations
from p3.plan.choices import AXES, Choice
from p3.plan.combinations import EXCLUSIONS
from p3.plan.key_plan import REDUCTIONS, UPDATES, KeyPlan
from p3.server.process import apply
from p3.settings import Settings
from p3.worker.session import Session


@pytest.fixture(scope="module")
def session():
    with Session.open(Settings(slice_elements=cells.SLICE_ELEMENTS)) as opened:
        yield opened


def allowed_cells():
    return [cell for cell in cells.every_cell() if not combinations.refusal(*cell.chosen)]


def texts_of(chosen):
    """All that the table says against these."""
    return [
        exclusion.text(next(one for one in chosen if one == exclusion.choice), other)
        for exclusion in EXCLUSIONS if exclusion.choice in chosen and not exclusion.yields
        for other in chosen if other in exclusion.others
    ]  # fmt: skip


# Cells


def test_every_allowed_cell_is_trained_as_the_reference_says_and_no_other_plan_is_allowed(session):
    trained = {(cell.cut, axes_of(cells.train(session, cell))) for cell in allowed_cells()}
    assert trained == {
        (cut_of(plan), axes_of(plan.axes)) for plan in every_plan() if not combinations.contradiction(plan)
    }


@pytest.mark.parametrize("aggregates, groups", ["11", "01", "02"])
def test_two_workers_train_every_allowed_cell_as_the_reference_says(aggregates, groups):
    settings = {"P3_LOCAL_AGGREGATION": aggregates, "P3_GROUPS": groups}
    settings["P3_SLICE_ELEMENTS"] = str(cells.SLICE_ELEMENTS)
    status, output = jobs.run_p3(2, 2, jobs.python("every_cell.py"), **settings)
    assert status == 0, output
    assert output.count("trained %d" % len(allowed_cells())) == 2, output


def test_workers_that_add_up_nothing_on_their_machine_train_what_is_gathered_as_the_reference_says():
    settings = {"P3_SLICE_ELEMENTS": str(cells.SLICE_ELEMENTS), "P3_LOCAL_AGGREGATION": "0"}
    status, output = jobs.run_p3(3, 2, jobs.python("every_cell.py", "factors"), **settings)
    assert status == 0, output
    assert output.count("trained %d" % len([one for one in allowed_cells() if one.cut == "factors"])) == 3, output


def test_every_other_cell_is_refused_with_the_text_of_the_table(session):
    refused = [cell for cell in cells.every_cell() if combinations.refusal(*cell.chosen)]
    for cell in refused:
        if cell.cut == "factors" and cell.staleness > 0:
            continue  # no session can ask for it: the next test does
        with pytest.raises(ValueError) as caught:
            cells.push(session, cell, cells.declared(session, cell), 0, cells.first_value())
        where, text = str(caught.value).split(": ", 2)[1:]
        assert text in texts_of(cell.chosen), (cell, text)
        assert re.fullmatch(r"worker 0 \(.*?\)|store \d+|key '(w|\(norm\))'", where), caught.value
    assert len(refused) + len(allowed_cells()) == len(cells.every_cell())


def axes_of(axes):
    return axes.staleness, axes.codec.get("type"), axes.reduction, axes.update, axes.value_codec.get("type")


def cut_of(plan):
    return "rows" if plan.row_elements else "factors" if plan.parts else "dense"


def every_plan():
    for staleness, codec, cut, reduction, update, down in itertools.product(
        (0, cells.STALENESS), (None, *codecs.codecs()), cells.CUTS, REDUCTIONS, UPDATES, cells.DOWN
    ):
        dtype, whole = ("float64", 2) if reduction == "norm" else ("float32", 70)
        yield KeyPlan(
            0, dtype, 300, 0, whole,
            row_elements=50 if cut == "rows" else 0,
            partitions=1 if cut == "rows" else 0,
            parts=1 if cut == "factors" else 0,
            staleness=staleness,
            codec=cells.complete(codec) or {},
            reduction=reduction,
            update=update,
            value_codec=cells.complete(down) or {},
        )  # fmt: skip


def test_a_server_defines_what_the_table_allows_and_refuses_the_rest_as_the_core_does():
    server = P3Server(0, 1, 1, "server 0 (here)")
    for number, plan in enumerate(every_plan()):
        plan = plan._replace(wire_key=number)
        text = combinations.contradiction(plan)
        if not text:
            assert apply(server, plan.define(number, "w", number)) == {"kind": "defined", "wire_key": number}
            continue
        with pytest.raises(ValueError) as caught:
            apply(server, plan.define(0, "w", number))
        assert str(caught.value) == "key 'w': " + text
        with pytest.raises(ValueError, match="key 'w' cannot have its plan"):
            server.define(plan, "w")
    server.stop()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_scheduler_takes_a_key_of_factors_only_as_the_table_says(dtype, sparse, staleness):
    worker = Node("worker", 0, "here")
    key = dict(dtype=dtype, sparse=sparse, staleness=staleness, gathered=True, norm=False)
    message = messages.check(dict(key, kind="announce", store=0, name="w", shape=[6, 50], defaults=[], options={}))
    agreement = Agreement([worker], [Node("server", 0, "here")])
    if (dtype, sparse, staleness) == ("float32", False, 0):
        assert agreement.receive(worker, message)
        return
    with pytest.raises(ProtocolError) as caught:
        agreement.receive(worker, message)
    text = str(caught.value).partition("announced key 'w': ")[2]
    assert text in [
        exclusion.text(one, other)
        for exclusion in EXCLUSIONS
        for one in choices.of_key(**key) if one == exclusion.choice
        for other in choices.of_key(**key) if other in exclusion.others
    ]  # fmt: skip


# The table itself


def test_each_pair_has_one_text_that_says_why_and_what_to_do():
    pairs = [frozenset((one.choice, other)) for one in EXCLUSIONS for other in one.others]
    assert len(pairs) == len(set(pairs))
    for one in EXCLUSIONS:
        assert one.why and one.instead[0].isupper() and not one.instead.endswith("."), one
        assert one.choice not in one.others


def test_of_several_exclusions_the_first_of_the_table_is_told_with_what_it_is_in_this_case():
    optimizer = choices.of_optimizer({"name": "adam"})
    text = combinations.refusal(choices.AVERAGE, optimizer, choices.DGC)
    assert text.startswith("dgc and averages exclude each other: ")
    assert combinations.refusal(choices.DGC, optimizer).startswith("dgc and another optimizer on the servers (adam) ")
    assert combinations.refusal(choices.STALE, choices.AVERAGE) == ""


def test_what_gives_way_is_no_refusal():
    chosen = choices.ENCODED.said("2bit"), choices.ROWS
    assert combinations.refusal(*chosen) == ""
    assert combinations.yielding(*chosen).startswith("compression (2bit) and rows exclude each other: ")


SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}
TORCH_SGD = {"name": "torch_sgd", "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False,
             "multi_precision": False}  # fmt: skip
ADAM = dict(SGD, name="adam", beta1=0.9, beta2=0.999, epsilon=1e-8)
del ADAM["momentum"]


@pytest.mark.parametrize("optimizer, why_not", [
    (SGD, ""),
    (TORCH_SGD, ""),
    (dict(SGD, momentum=0.0), ""),
    (dict(SGD, clip_gradient=0.0), "SGD with clip_gradient=0.0"),
    (ADAM, "adam"),
    (dict(SGD, clip_gradient=1.0), "SGD with clip_gradient=1.0"),
    (dict(TORCH_SGD, nesterov=True), "SGD with nesterov=True"),
    (dict(TORCH_SGD, dampening=0.5), "SGD with dampening=0.5"),
    (dict(TORCH_SGD, maximize=True), "SGD with maximize=True"),
])  # fmt: skip
def test_other_optimizers_than_plain_sgd_are_refused_by_name_and_the_core_knows_them_as_well(optimizer, why_not):
    text = combinations.refusal(choices.DGC, choices.of_optimizer(optimizer))
    assert text.startswith("dgc and another optimizer on the servers (%s) " % why_not) if why_not else text == ""
    server = P3Server(0, 1, 1, "server 0 (here)")
    codec = codecs.codecs()["dgc"].complete()
    server.define(KeyPlan(0, "float32", 300, 0, 70, codec=codec, update="steps"), "w")
    try:
        if why_not:
            with pytest.raises(ValueError, match="SGD with momentum alone"):
                server.set_optimizer(0, optimizer)
        else:
            server.set_optimizer(0, optimizer)
    finally:
        server.stop()


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"P3_ON_WORKER_LOSS": "continue", "P3_LOCAL_AGGREGATION": "1"})
    assert str(caught.value) == combinations.refusal(choices.LEAVING, choices.AGGREGATION)
    assert not Settings.from_env({"P3_ON_WORKER_LOSS": "continue"}).local_aggregation


def test_every_choice_is_of_an_axis_or_in_the_table():
    known = {choice for those in AXES.values() for choice in those}
    known |= {choice for one in EXCLUSIONS for choice in (one.choice, *one.others)}
    assert {choice for choice in vars(choices).values() if isinstance(choice, Choice)} == known


# docs/strategies.md


def test_the_tables_of_the_documentation_are_made_from_it():
    """To bring docs/strategies.md up to date: python -m p3.plan.combinations"""
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    (tables,) = re.findall(r"^<!-- combinations: .* -->\n(.*?)\n<!-- /combinations -->$", page, re.M | re.S)
    assert tables == combinations.tables()
