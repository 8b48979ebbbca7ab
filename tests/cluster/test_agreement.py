"""What nodes agree on: rank 0's word decides, contradictions name both workers, nobody waits for the gone."""

import math
import random
import re

import pytest

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.codecs import Ways
from p3.errors import DisagreementError, ProtocolError
from p3.plan.key_plan import UNBOUNDED, KeyPlan
from p3.plan.strategy import Cut, Strategy
from p3.worker.store_options import told_of

WORKERS = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
SERVERS = [Node("server", rank, "s%d" % rank) for rank in range(2)]


class Job:
    """An Agreement whose servers answer when told to, and what each node was sent."""

    def __init__(self, slice_elements=10, partitions="auto", strategy=Strategy()):
        self.agreement = Agreement(WORKERS, SERVERS, slice_elements, partitions, strategy)
        self.sent = {node: [] for node in WORKERS + SERVERS}

    def say(self, node, kind, **fields):
        for receiver, message in self.agreement.receive(node, messages.check(dict(fields, kind=kind))):
            self.sent[receiver].append(messages.check(message))

    def announce(self, rank, name, shape=(2, 3), dtype="float32", store=0, defaults=(), sparse=False, staleness=0,
                 gathered=False, norm=False, **options):  # fmt: skip
        fields = dict(store=store, name=name, shape=list(shape), dtype=dtype, defaults=list(defaults), sparse=sparse,
                      staleness=staleness, gathered=gathered, norm=norm, options=options)
        self.say(WORKERS[rank], "announce", **fields)

    def set_option(self, rank, option, store=0, **value):
        self.say(WORKERS[rank], "option", store=store, name=option, value=value)

    def answer_all(self):
        for server in SERVERS:
            for message in self.sent[server]:
                if message["kind"] == "define":
                    self.say(server, "defined", wire_key=message["wire_key"])
                elif message["kind"] == "set_option":
                    self.say(server, "option_set", store=message["store"], name=message["name"])
                elif message["kind"] == "drop_store":
                    self.say(server, "dropped", store=message["store"])
            self.sent[server] = []

    def kinds(self, node):
        return [message["kind"] for message in self.sent[node]]


@pytest.mark.parametrize("num_servers, elements", [(1, 50000), (2, 50000), (3, 16000), (100, 2500)])
def test_slices_are_smaller_with_more_servers(num_servers, elements):
    servers = [Node("server", rank, "s%d" % rank) for rank in range(num_servers)]
    announced = dict(kind="announce", store=0, name="w", shape=[96000], dtype="float32", defaults=[], sparse=False)
    announced.update(staleness=0, gathered=False, norm=False, options={})
    sent = Agreement(WORKERS[:1], servers).receive(WORKERS[0], announced)
    assert [message["slice_elements"] for _, message in sent] == [elements] * num_servers


def test_a_strategy_decides_where_slices_are_and_how_large():
    job = Job(10, strategy=Strategy(Cut((1, 0, 1), 4), {"w": Cut((1,)), "7": Cut(slice=6), "gone": Cut()}))
    for name in ("w", 7, "other"):
        job.announce(0, name)
    job.announce(0, "rows", (8, 2), sparse=True)
    plans = [KeyPlan.of(message) for message in job.sent[SERVERS[0]]]
    assert [(plan.servers, plan.slice_elements) for plan in plans[:3]] == [((1,), 4), ((1, 0, 1), 6), ((1, 0, 1), 4)]
    assert [plans[2].server_of(number, 2) for number in range(plans[2].slices)] == [0, 1]  # one slice was before
    assert (plans[3].servers, plans[3].partitions) == ((1, 0, 1), 3)
    job.answer_all()
    assert KeyPlan.of(job.sent[WORKERS[2]][0]) == plans[0]
    assert job.agreement.entries_unused() == ["gone"]


def test_norms_are_on_all_servers_whatever_the_strategy():
    job = Job(10, strategy=Strategy(Cut((0,), 4)))
    job.announce(0, "norm", (2, 2), "float64", norm=True)
    plan = KeyPlan.of(job.sent[SERVERS[1]][0])
    assert (plan.servers, plan.slice_elements, plan.slices) == ((), 2, 2)


def test_an_entry_that_does_not_fit_its_key_is_refused_by_name():
    job = Job(10, strategy=Strategy(keys={"rows": Cut(slice=4), "w": Cut(partitions=2)}, path="s.json"))
    with pytest.raises(DisagreementError, match="s.json has a slice for key 'rows', whose gradients.*sparse.*Take it"):
        job.announce(0, "rows", (8, 2), sparse=True)
    with pytest.raises(DisagreementError, match="s.json has partitions for key 'w', whose gradients are dense"):
        job.announce(0, "w")
    routes = {"rows": Cut(route="dense"), "w": Cut(route="rows"), "f": Cut(route="factors")}
    job = Job(10, strategy=Strategy(Cut(route="rows"), routes, "s.json"))
    job.announce(0, "f")
    with pytest.raises(DisagreementError, match="another route than 'rows' for key 'rows', .* makes sparse. Take it"):
        job.announce(0, "rows", (8, 2), sparse=True)
    with pytest.raises(DisagreementError, match="the route 'rows' for key 'w', .* makes dense. Take it"):
        job.announce(0, "w")


@pytest.mark.parametrize("of_job", ["auto", 3])
def test_a_strategy_says_into_how_many_partitions_rows_are_cut(of_job):
    cuts = {"few": Cut(partitions=1), "many": Cut((1,), partitions=100), "dense": Cut()}
    job = Job(10, of_job, Strategy(Cut(partitions=4), cuts))
    for name in ("few", "many", "other"):
        job.announce(0, name, (8, 2), sparse=True)
    job.announce(0, "dense")
    plans = [KeyPlan.of(message) for message in job.sent[SERVERS[0]]]
    assert [(plan.partitions, plan.servers) for plan in plans] == [(1, ()), (8, (1,)), (4, ()), (0, ())]


def test_a_key_that_does_not_follow_its_own_entry_is_refused_by_name():
    int8 = {"type": "int8"}
    entries = {"w": Cut(codec=Ways(int8)), "exact": Cut(codec=Ways())}
    job = Job(10, strategy=Strategy(Cut(codec=Ways({"type": "bf16"})), entries, "s.json", True))
    job.announce(0, "other")
    job.announce(0, "w", compression=int8)
    with pytest.raises(DisagreementError, match="s.json has the codec none for key 'exact', .* with {.*int8.*Take it"):
        job.announce(0, "exact", value_compression=int8)
    job.set_option(0, "compression", 1, **int8)
    job.announce(0, "w", store=1)
    with pytest.raises(DisagreementError, match="s.json has the codec {.*int8.* for key 'w', .* declares with none"):
        job.announce(0, "w", store=2)
    job = Job(10, strategy=Strategy(keys={"w": Cut(staleness=math.inf), "v": Cut(staleness=2)}, path="s.json"))
    job.announce(0, "w", staleness=UNBOUNDED)
    with pytest.raises(DisagreementError, match="s.json has the staleness 2 for key 'v', .* declares with 0"):
        job.announce(0, "v")


def give_strategy(job, rank, strategy, store=0, **changed):
    told = {"sha256": strategy.sha256}
    if rank == 0:
        told.update(text=strategy.text(), path=strategy.path)
    job.set_option(rank, "strategy", store, **{**told, **changed})


def test_a_script_gives_a_store_a_strategy_of_which_no_server_hears():
    job, mine = Job(10), Strategy(Cut((1,), 4), path="s.json")
    give_strategy(job, 1, mine)
    assert not any(job.sent.values())
    give_strategy(job, 0, mine)
    (agreed,) = job.sent[WORKERS[2]]
    assert agreed == {"kind": "option_agreed", "store": 0, "name": "strategy", "value": {"sha256": mine.sha256}}
    assert not job.sent[SERVERS[0]]
    assert job.agreement._past() == [agreed]
    for store in (0, 1):
        job.announce(0, "w", store=store)
    plans = [KeyPlan.of(message) for message in job.sent[SERVERS[0]]]
    assert [(plan.servers, plan.slice_elements) for plan in plans] == [((1,), 4), ((), 10)]
    assert job.agreement.entries_unused() == []
    with pytest.raises(DisagreementError, match="disagree about the strategy of store 0: sha256 is .* and not set on"):
        job.announce(2, "w", defaults=["strategy"])


def test_a_strategy_is_gone_with_its_store():
    job = Job(10)
    give_strategy(job, 0, Strategy(Cut((1,))))
    for worker in WORKERS:
        job.say(worker, "release", store=0)
    job.answer_all()
    assert job.agreement._claim_bytes[WORKERS[0]] == 0
    job.announce(0, "w")
    assert KeyPlan.of(job.sent[SERVERS[0]][0]).servers == ()


def test_a_strategy_comes_before_the_key_that_it_is_for():
    job = Job(10)
    job.announce(0, "w", defaults=["strategy"])
    with pytest.raises(DisagreementError, match="the strategy of store 0: sha256 is not set .* and [0-9a-f]{64} on"):
        give_strategy(job, 0, Strategy(Cut((1,))))


def test_a_scripts_strategy_and_the_jobs_say_the_same_or_the_difference_is_named():
    of_job = Strategy(Cut((1,)), {"w": Cut(slice=4)}, "/etc/job.json")
    job = Job(10, strategy=of_job)
    give_strategy(job, 0, of_job._replace(path="s.json"))
    job.announce(0, "w")
    assert job.agreement.entries_unused() == []
    with pytest.raises(DisagreementError) as caught:
        give_strategy(job, 0, of_job._replace(keys={}, path="s.json"), store=1)
    assert str(caught.value) == (
        "worker 0 (w0) gives store 1 the strategy s.json, and P3_STRATEGY gives the job /etc/job.json: they differ in "
        "key 'w'. Leave one of them out"
    )


@pytest.mark.parametrize("changed, problem", [
    ({"text": "{"}, "the strategy s.json is no JSON"),
    ({"text": 7}, "without its text"),
    ({"path": None}, "without its text"),
    ({"sha256": "0f" * 32}, "with the sha256 of another"),
    ({"text": Strategy(Cut((2,))).text(), "sha256": Strategy(Cut((2,))).sha256}, "server 2 is named"),
])  # fmt: skip
def test_what_rank_0_gives_is_checked_again(changed, problem):
    with pytest.raises(ProtocolError, match=r"^worker 0 \(w0\) set the strategy of store 0.*" + problem):
        give_strategy(Job(), 0, Strategy(path="s.json"), **changed)


def test_a_gathered_key_has_a_part_of_each_worker():
    job = Job(10)
    job.announce(0, "w", (3, 5), gathered=True)
    plan = KeyPlan.of(job.sent[SERVERS[0]][0])
    assert (plan.parts, plan.elements, plan.slices) == (3, 15, 6)
    assert plan.sizes() == [8, 7] * 3  # of about one size, so that round robin gives every server as much
    with pytest.raises(DisagreementError, match="gathered is True on the first and False on the second"):
        job.announce(1, "w", (3, 5))


@pytest.mark.parametrize("wrong, problem", [
    ({"shape": (0, 5)}, "the key of factors 'w' without elements"),
    ({"dtype": "float16"}, r"factors and a type other than float32 \(float16\) exclude each other"),
    ({"sparse": True}, "factors and rows exclude each other"),
    ({"staleness": 1}, "staleness and factors exclude each other"),
])  # fmt: skip
def test_what_cannot_be_gathered_is_refused(wrong, problem):
    with pytest.raises(ProtocolError, match=r"worker 0 .* announced .*%s" % problem):
        Job().announce(0, "w", **{"shape": (3, 5), "gathered": True, **wrong})


def test_rank_0_decides_and_workers_hear_when_every_server_knows():
    job = Job()
    job.announce(1, "w")
    assert not any(job.sent.values())
    job.announce(0, "w")
    define = job.sent[SERVERS[0]][0]
    assert (define["wire_key"], define["first_slice"], define["elements"]) == (0, 0, 6)
    job.say(SERVERS[0], "defined", wire_key=0)
    assert not job.sent[WORKERS[0]]
    job.say(SERVERS[1], "defined", wire_key=0)
    for worker in WORKERS:
        (agreed,) = job.sent[worker]
        assert (agreed["kind"], agreed["name"], agreed["wire_key"], agreed["slice_elements"]) == ("agreed", "w", 0, 10)


def test_slices_are_counted_over_all_keys():
    job = Job(slice_elements=10)
    for name, shape in (("a", (25,)), ("empty", (0, 5)), ("scalar", ()), ("b", (10,)), ("c", (11,))):
        job.announce(0, name, shape)
    assert [m["first_slice"] for m in job.sent[SERVERS[0]]] == [0, 3, 4, 5, 6]
    assert [m["wire_key"] for m in job.sent[SERVERS[0]]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("partitions, counts", [("auto", [2, 1, 1]), (5, [4, 1, 1])])
def test_a_sparse_key_has_partitions_for_slices_at_most_one_for_each_row(partitions, counts):
    job = Job(10, partitions)
    for name, shape in (("a", (4, 2, 5)), ("b", (1, 7)), ("c", (0, 2))):
        job.announce(0, name, shape, sparse=True)
    job.announce(0, "dense", (25,))
    defines = job.sent[SERVERS[0]]
    assert [m["partitions"] for m in defines] == counts + [0]
    assert [m["row_elements"] for m in defines] == [10, 7, 2, 0]
    assert [m["first_slice"] for m in defines] == [sum(counts[:i]) for i in range(4)]


def test_sparse_and_dense_contradict():
    job = Job()
    job.announce(0, "w")
    with pytest.raises(DisagreementError, match="key 'w': sparse is False on the first and True on the second"):
        job.announce(1, "w", sparse=True)


@pytest.mark.parametrize("shape", [(), (3, 0)])
def test_a_sparse_key_has_rows(shape):
    with pytest.raises(ProtocolError, match="without rows"):
        Job().announce(0, "w", shape, sparse=True)


def test_a_sparse_key_is_cut_anew_and_its_former_plan_dropped_when_all_have_left_it():
    job = Job(10)
    job.announce(0, "dense", (25,))
    job.announce(0, "w", (8, 2), sparse=True)
    job.answer_all()
    job.say(WORKERS[0], "repartition", store=0, name="w", partitions=5)
    define = job.sent[SERVERS[1]][-1]
    assert (define["wire_key"], define["predecessor"], define["first_slice"]) == (2, 1, 3 + 2)
    assert (define["partitions"], define["row_elements"], define["elements"]) == (5, 2, 16)
    with pytest.raises(ProtocolError, match="have 5 partitions of key 'w' now"):  # before the servers have answered
        job.say(WORKERS[0], "repartition", store=0, name="w", partitions=5)
    job.answer_all()
    for worker in WORKERS:
        assert job.sent[worker][-1]["kind"] == "repartitioned" and job.sent[worker][-1]["wire_key"] == 2
    with pytest.raises(ProtocolError, match="have 4 partitions of key 'w' now"):  # before all have moved
        job.say(WORKERS[0], "repartition", store=0, name="w", partitions=4)
    for worker in WORKERS[:-1]:
        job.say(worker, "moved", wire_key=1)
    with pytest.raises(ProtocolError, match="did not use"):
        job.say(WORKERS[0], "moved", wire_key=1)
    assert not job.sent[SERVERS[0]]
    job.say(WORKERS[-1], "moved", wire_key=1)
    assert job.sent[SERVERS[0]] == [{"kind": "drop", "wire_key": 1}]
    assert {job.kinds(worker)[-1] for worker in WORKERS} == {"settled"}
    job.say(WORKERS[0], "repartition", store=0, name="w", partitions=1)


@pytest.mark.parametrize(
    "rank, name, partitions",
    [(1, "w", 2), (0, "w", 0), (0, "w", 9), (0, "dense", 2), (0, "stale", 2), (0, "?", 2)],
)
def test_only_rank_0_cuts_anew_and_only_sparse_keys_and_their_rows(rank, name, partitions):
    job = Job(10)
    job.announce(0, "dense", (25,))
    job.announce(0, "w", (8, 2), sparse=True)
    job.announce(0, "stale", (8, 2), sparse=True, staleness=1)
    job.answer_all()
    with pytest.raises(ProtocolError, match="partitions of key"):
        job.say(WORKERS[rank], "repartition", store=0, name=name, partitions=partitions)


def test_slice_count_is_the_cores():
    core = pytest.importorskip("p3._core", reason="the extension is not built")
    for elements in (0, 1, 9, 10, 11, 12345678):
        for slice_elements in (1, 10, 50000):
            plan = KeyPlan(0, "float32", elements, 0, slice_elements)
            assert plan.slices == core.slice_count(elements, slice_elements) == len(plan.sizes())


def test_the_same_plan_comes_out_in_whatever_order_the_others_announce():
    plans = []
    for seed in range(10):
        job, turns = Job(), [(rank, name) for rank in (1, 2) for name in "abc"]
        random.Random(seed).shuffle(turns)
        for name in "abc":  # rank 0 keeps its order, the others come in between
            for rank, other in turns[:2]:
                job.announce(rank, other)
            turns = turns[2:]
            job.announce(0, name)
        job.answer_all()
        plans.append(sorted((m["name"], m["wire_key"], m["first_slice"]) for m in job.sent[WORKERS[2]]))
    assert all(plan == plans[0] for plan in plans)


def test_names_1_and_one_are_different_keys_and_so_are_stores():
    job = Job()
    for name, store in ((1, 0), ("1", 0), (1, 1)):
        job.announce(0, name, store=store)
    assert len(job.sent[SERVERS[0]]) == 3


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)])
def test_another_shape_names_both_workers_the_key_and_both_values(first, second):
    job, shapes = Job(), {0: (2, 3), 1: (3, 2)}
    job.announce(first, "w", shapes[first])
    with pytest.raises(DisagreementError) as caught:
        job.announce(second, "w", shapes[second])
    assert str(caught.value) == (
        "worker 0 (w0) and worker 1 (w1) disagree about key 'w': "
        "shape is (2, 3) on the first and (3, 2) on the second"
    )


def test_another_type_is_a_disagreement():
    job = Job()
    job.announce(0, 7)
    with pytest.raises(DisagreementError, match="key 7: dtype is float32 on the first and float64 on the second"):
        job.announce(2, 7, dtype="float64")


def test_a_key_has_its_own_compression_in_place_of_its_stores():
    job = Job()
    job.set_option(0, "compression", type="fp16")
    job.announce(0, "v")
    job.announce(0, "w", compression={"type": "int8"}, value_compression={"type": "bf16"})
    job.announce(0, "x", compression={})
    defined = [message for message in job.sent[SERVERS[0]] if message["kind"] == "define"]
    assert [one["codec"] for one in defined] == [{"type": "fp16"}, {"type": "int8"}, {}]
    assert [one["value_codec"] for one in defined] == [{}, {"type": "bf16"}, {}]


@pytest.mark.parametrize("mine, shown", [({}, "none"), (None, "not set"), ({"type": "bf16"}, "{'type': 'bf16'}")])
def test_another_compression_of_a_key_is_a_disagreement(mine, shown):
    job = Job()
    job.announce(0, "w", compression={"type": "int8"})
    with pytest.raises(DisagreementError) as caught:
        job.announce(1, "w", **({} if mine is None else {"compression": mine}))
    assert str(caught.value) == (
        "worker 0 (w0) and worker 1 (w1) disagree about key 'w': "
        "compression is {'type': 'int8'} on the first and %s on the second" % shown
    )


@pytest.mark.parametrize("options, said", [
    ({"compression": {"type": "int9"}}, "compression: type is 'int9'"),
    ({"value_compression": {"type": "dgc"}}, "value_compression: type is 'dgc'"),
    ({"reduction": {"type": "mean"}}, "option 'reduction' is of stores; a key has compression, value_compression"),
    ({"c" * 200: {}}, "option 'c{99} is of stores; a key has"),
])  # fmt: skip
def test_a_key_of_options_that_there_are_not_is_refused(options, said):
    with pytest.raises(ProtocolError, match="worker 0 .* announced key 'w' with %s" % said):
        Job().announce(0, "w", **options)


NORM = {"name": "(norm)", "shape": (2, 2), "dtype": "float64", "norm": True}


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("rank_0_is_first", [True, False])
@pytest.mark.parametrize("store", [0, 3])
def test_who_clips_alone_is_found_at_the_first_key(alone, rank_0_is_first, store):
    job = Job()
    first, second = (0, 1) if rank_0_is_first else (1, 0)
    said = [NORM if rank == alone else {"name": "w"} for rank in (first, second)]
    job.announce(first, store=store, **said[0])
    words = ("asked for", "not set") if alone == 0 else ("not set", "asked for")
    problem = (r"worker 0 \(w0\) and worker 1 \(w1\) disagree about the norm to clip the gradients of store %d by, "
               r"which all workers ask for or none \(.*\): it is %s on the first and %s on the second"
               % (store, *words))  # fmt: skip
    with pytest.raises(DisagreementError, match=problem):
        job.announce(second, store=store, **said[1])


def test_stores_have_norms_or_not_each_for_itself():
    job = Job()
    for rank in (1, 0, 2):
        for store in (0, 1):
            if store == 0:
                job.announce(rank, **NORM)
            for name in ("w", "b"):
                job.announce(rank, name, store=store)
    assert job.kinds(SERVERS[0]) == ["define"] * 5


def test_a_norm_is_of_all_keys_of_its_store():
    job = Job()
    job.announce(0, "w")
    with pytest.raises(ProtocolError, match="the key of norms of store 0 behind other keys"):
        job.announce(0, **NORM)


def test_a_key_announced_again_changes_nothing():
    job = Job()
    job.announce(0, "w")
    job.announce(0, "w")
    assert len(job.sent[SERVERS[0]]) == 1


def test_options_are_agreed_like_keys():
    job = Job()
    job.set_option(1, "optimizer", name="sgd", momentum=0.9)
    assert not any(job.sent.values())
    job.set_option(0, "optimizer", name="sgd", momentum=0.9)
    assert job.sent[SERVERS[0]] == job.sent[SERVERS[1]] == [
        {"kind": "set_option", "store": 0, "name": "optimizer", "value": {"name": "sgd", "momentum": 0.9}}
    ]
    job.say(SERVERS[1], "option_set", store=0, name="optimizer")
    assert not job.sent[WORKERS[0]]
    job.say(SERVERS[0], "option_set", store=0, name="optimizer")
    for worker in WORKERS:
        (agreed,) = job.sent[worker]
        assert agreed == dict(job.sent[SERVERS[0]][0], kind="option_agreed")
    with pytest.raises(DisagreementError, match="the optimizer of store 0: momentum is 0.9 on the first and 0.8"):
        job.set_option(2, "optimizer", name="sgd", momentum=0.8)


def test_options_of_one_store_do_not_disturb_each_other_or_another_stores():
    job = Job()
    job.set_option(0, "compression", type="fp16")
    job.set_option(0, "reduction", type="average")
    job.set_option(0, "reduction", type="sum", store=1)
    job.announce(0, "w", store=1, defaults=["compression"])
    job.answer_all()
    agreed = [(m["store"], m["name"], m["value"]["type"]) for m in job.sent[WORKERS[2]] if m["kind"] != "agreed"]
    assert sorted(agreed) == [(0, "compression", "fp16"), (0, "reduction", "average"), (1, "reduction", "sum")]


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)])
def test_another_type_of_an_option_is_what_the_disagreement_names(first, second):
    job, values = Job(), {0: {"type": "fp16"}, 1: {"threshold": 0.5, "type": "2bit"}}
    job.set_option(first, "compression", **values[first])
    with pytest.raises(DisagreementError) as caught:
        job.set_option(second, "compression", **values[second])
    assert str(caught.value) == (
        "worker 0 (w0) and worker 1 (w1) disagree about the compression of store 0: "
        "type is fp16 on the first and 2bit on the second"
    )


@pytest.mark.parametrize("setter, other", [(0, 1), (1, 0)])
@pytest.mark.parametrize("set_first", [True, False])
def test_a_worker_that_declares_keys_without_an_option_that_another_set_is_found_at_once(setter, other, set_first):
    # Worker 1 waits for the agreement on its option before it declares any key, so keys alone would not tell.
    job = Job()
    steps = [
        lambda: job.set_option(setter, "compression", type="2bit", threshold=0.5),
        lambda: job.announce(other, "w", defaults=["compression", "reduction"]),
    ]
    (first, last) = steps if set_first else steps[::-1]
    first()
    shown = ("2bit", "not set") if setter == 0 else ("not set", "2bit")
    with pytest.raises(DisagreementError) as caught:
        last()
    assert str(caught.value) == (
        "worker 0 (w0) and worker 1 (w1) disagree about the compression of store 0: "
        "type is %s on the first and %s on the second" % shown
    )


@pytest.mark.parametrize("setter, other", [(0, 1), (1, 0)])
@pytest.mark.parametrize("set_first", [True, False])
def test_a_worker_that_pushes_without_the_optimizer_that_another_set_is_found_at_once(setter, other, set_first):
    job = Job()
    steps = [lambda: job.set_option(setter, "optimizer", name="sgd"), lambda: job.set_option(other, "optimizer")]
    (first, last) = steps if set_first else steps[::-1]
    first()
    shown = ("sgd", "not set") if setter == 0 else ("not set", "sgd")
    with pytest.raises(DisagreementError) as caught:
        last()
    assert str(caught.value) == (
        "worker 0 (w0) and worker 1 (w1) disagree about the optimizer of store 0: "
        "name is %s on the first and %s on the second" % shown
    )


def test_workers_that_push_without_an_optimizer_trouble_no_server():
    job = Job()
    for rank in (1, 0):
        job.set_option(rank, "optimizer")
    job.say(WORKERS[0], "bye")  # a word that needs no answer keeps nobody waiting
    job.set_option(2, "optimizer")
    assert not any(job.sent.values())


def test_an_option_cannot_come_after_the_key_that_settled_it():
    job = Job()
    job.announce(1, "w", defaults=["reduction"])
    with pytest.raises(DisagreementError, match="the reduction of store 0: type is not set .* and average"):
        job.set_option(1, "reduction", type="average")


def test_every_worker_gets_the_counters_of_all_servers_that_it_asked_for_and_nobody_elses():
    job = Job()
    job.say(WORKERS[2], "count", number=1)
    job.say(WORKERS[1], "count", number=1)
    job.say(WORKERS[2], "count", number=2)
    for number, rank in ((2, 1), (1, 0), (1, 1), (2, 0)):  # servers answer in any order
        counters = {"rounds": 10 * number + rank}
        job.say(SERVERS[rank], "counted", worker=2, number=number, counters=counters)
    assert job.sent[WORKERS[2]] == [
        {
            "kind": "counters",
            "number": number,
            "servers": [{"rounds": 10 * number + rank, "label": "server %d (s%d)" % (rank, rank)} for rank in (0, 1)],
        }
        for number in (1, 2)
    ]
    assert not job.sent[WORKERS[0]] and not job.sent[WORKERS[1]]


def test_a_count_is_answered_once_by_each_server_and_asked_for_once():
    job = Job()
    job.say(WORKERS[0], "count", number=1)
    with pytest.raises(ProtocolError, match="asked twice for count 1"):
        job.say(WORKERS[0], "count", number=1)
    job.say(SERVERS[0], "counted", worker=0, number=1, counters={})
    with pytest.raises(ProtocolError, match=r"sent 'counted' for \(0, 1\), which nobody asked for"):
        job.say(SERVERS[0], "counted", worker=0, number=1, counters={})


def test_a_store_is_gone_when_all_workers_have_done_with_it_and_all_servers_have_dropped_it():
    job = Job()
    for life in range(3):  # of one store, beside another
        store = 0
        for rank in (2, 0, 1):
            job.set_option(rank, "reduction", type="mean")
            job.announce(rank, "w", shape=(7 + life, 2), sparse=life == 1)
            job.announce(rank, "v", store=1)
        job.answer_all()
        job.say(WORKERS[0], "order", store=store, names=["w"])
        claimed = dict(job.agreement._claim_bytes)
        if life == 1:  # no round has begun it, nor will one
            job.say(WORKERS[0], "repartition", store=store, name="w", partitions=3)
        job.sent.update((worker, []) for worker in WORKERS)
        for done, rank in enumerate((1, 2, 0), 1):
            job.say(WORKERS[rank], "release", store=store)
            assert job.kinds(SERVERS[0])[-1:] == (["drop_store"] if done == 3 else job.kinds(SERVERS[0])[-1:])
            assert job.sent[WORKERS[2]][-1] == {"kind": "releasing", "store": store, "worker": rank}
        assert "released" not in job.kinds(WORKERS[1])
        job.answer_all()
        for worker in WORKERS:
            assert job.sent[worker][-1] == {"kind": "released", "store": store}
        assert all(job.agreement._claim_bytes[worker] < claimed[worker] for worker in WORKERS)
        assert [told["name"] for told in job.agreement._past() if told["kind"] == "agreed"] == ["v"]
        assert not job.agreement._leaving
    assert all(count == job.agreement._claim_bytes[WORKERS[0]] for count in job.agreement._claim_bytes.values())


def test_a_released_store_may_have_a_norm_the_next_time():
    job = Job()
    job.announce(0, "w")
    job.answer_all()
    for rank in range(3):
        job.say(WORKERS[rank], "release", store=0)
    job.answer_all()
    for rank in range(3):
        job.announce(rank, **NORM)
        job.announce(rank, "w")


def test_who_has_released_a_store_says_no_more_of_it_and_nobody_waits_for_who_has_left():
    job = Job()
    job.say(WORKERS[1], "release", store=0)
    for store, text in ((0, "sent a 'release' message of store 0, which it has"), (1, "released store 1 before")):
        with pytest.raises(ProtocolError, match=text):
            job.say(WORKERS[1], "release", store=store)
    with pytest.raises(ProtocolError, match="'announce' message of store 0, which it has released"):
        job.announce(1, "w")
    job.announce(1, "w", store=3)
    with pytest.raises(ProtocolError, match="which nobody asked for"):
        job.say(SERVERS[0], "dropped", store=0)
    with pytest.raises(DisagreementError, match=r"worker 2 \(w2\) left the job while worker 1 \(w1\) waits for all"):
        job.say(WORKERS[2], "bye")


def test_the_order_of_rank_0_goes_to_all_and_nobody_elses_does():
    job = Job()
    job.say(WORKERS[0], "order", store=0, names=["b", 1])
    assert all(job.sent[worker][0]["names"] == ["b", 1] for worker in WORKERS)
    with pytest.raises(ProtocolError, match="only worker 0"):
        job.say(WORKERS[1], "order", store=0, names=[])


def test_a_barrier_opens_when_the_last_arrives():
    job = Job()
    for worker in WORKERS[:2]:
        job.say(worker, "barrier", number=1, mark=None)
    assert not any(job.sent.values())
    job.say(WORKERS[2], "barrier", number=1, mark=None)
    assert [job.kinds(worker) for worker in WORKERS] == [["barrier_done"]] * 3
    with pytest.raises(ProtocolError, match="out of turn"):
        job.say(WORKERS[0], "barrier", number=1, mark=None)


def test_servers_are_stopped_when_the_last_worker_leaves():
    job = Job()
    for worker in WORKERS:
        assert not job.sent[SERVERS[0]]
        job.say(worker, "bye")
    assert job.kinds(SERVERS[0]) == job.kinds(SERVERS[1]) == ["stop"]


@pytest.mark.parametrize("leave_first", [True, False])
def test_nobody_waits_in_a_barrier_for_one_who_left(leave_first):
    job, steps = Job(), [(WORKERS[1], "bye", {}), (WORKERS[0], "barrier", {"number": 1, "mark": None})]
    (first, last) = steps if leave_first else steps[::-1]
    job.say(first[0], first[1], **first[2])
    with pytest.raises(DisagreementError, match=r"worker 1 \(w1\) left the job while worker 0 .* in barrier 1"):
        job.say(last[0], last[1], **last[2])


@pytest.mark.parametrize("leave_first", [True, False])
def test_nobody_waits_for_a_key_that_rank_0_left_without(leave_first):
    job = Job()
    steps = [lambda: job.say(WORKERS[0], "bye"), lambda: job.announce(1, "extra")]
    (first, last) = steps if leave_first else steps[::-1]
    first()
    with pytest.raises(DisagreementError, match=r"worker 1 \(w1\) declared key 'extra', but worker 0 \(w0\) left"):
        last()


def test_nobody_waits_for_an_option_that_rank_0_left_without():
    job = Job()
    job.set_option(1, "reduction", type="average", store=2)
    with pytest.raises(DisagreementError) as caught:
        job.say(WORKERS[0], "bye")
    assert str(caught.value) == "worker 1 (w1) set the reduction of store 2, but worker 0 (w0) left without doing so"


@pytest.mark.parametrize(
    "node, kind, fields",
    [
        (SERVERS[0], "bye", {}),
        (SERVERS[0], "barrier", {"number": 1, "mark": None}),
        (WORKERS[0], "defined", {"wire_key": 0}),
        (SERVERS[0], "defined", {"wire_key": 0}),
        (SERVERS[0], "option_set", {"store": 0, "name": "optimizer"}),
        (SERVERS[0], "count", {"number": 1}),
        (SERVERS[0], "counted", {"worker": 0, "number": 1, "counters": {}}),
        (WORKERS[0], "counted", {"worker": 0, "number": 1, "counters": {}}),
        (WORKERS[0], "abort", {"text": "x"}),
        (WORKERS[0], "agreed", {"store": 0, "name": "w", "shape": [], "dtype": "float32", "wire_key": 0,
                                "first_slice": 0, "slice_elements": 1, "row_elements": 0, "partitions": 0,
                                "parts": 0, "staleness": 0,
                                "codec": {}, "reduction": "sum", "update": "servers"}),
    ],
)
def test_what_a_node_may_not_say_is_refused(node, kind, fields):
    with pytest.raises(ProtocolError):
        Job().say(node, kind, **fields)


def test_who_has_left_says_no_more():
    job = Job()
    job.say(WORKERS[0], "bye")
    with pytest.raises(ProtocolError):
        job.announce(0, "w")


# Another strategy while the job trains


def rest(job, rank, rounds, strategy=None, stores=(0,)):
    told = {} if strategy is None else told_of("", 0, strategy)
    job.say(WORKERS[rank], "replan", stores=list(stores), strategy=told, **messages.columns(rounds))


def two_keys():
    job = Job(4)
    for name in ("a", "b"):
        for rank in range(3):
            job.announce(rank, name)
    job.answer_all()
    return job


def test_a_strategy_changes_when_all_rest_and_servers_come_before_workers():
    job, rounds = two_keys(), {0: 5, 1: 4}
    rest(job, 1, rounds)
    rest(job, 0, rounds, Strategy(Cut((1,)), {"b": Cut((0, 1))}))
    assert not job.sent[SERVERS[0]]
    rest(job, 2, rounds)
    recut = job.sent[SERVERS[0]][-1]
    assert job.sent[SERVERS[1]][-1] == recut
    cuts = [(one["predecessor"], one["wire_key"], one["round"], one["servers"]) for one in recut["keys"]]
    assert cuts == [(0, 2, 5, [1]), (1, 3, 4, [0, 1])]
    job.say(SERVERS[0], "recut_done", number=1)
    assert "replanned" not in job.kinds(WORKERS[0])
    job.say(SERVERS[1], "recut_done", number=1)
    for worker in WORKERS:
        told = job.sent[worker][-1]
        assert [(one["name"], KeyPlan.of(one).servers) for one in told["keys"]] == [("a", (1,)), ("b", (0, 1))]
    assert [told["wire_key"] for told in job.agreement._past()] == [2, 3], "what who comes later hears"
    for rank in range(3):
        job.announce(rank, "c")
    assert job.sent[SERVERS[0]][-1]["servers"] == [1], "a later key as well"


def test_what_is_cut_so_already_stays_and_without_the_first_workers_word_all_does():
    job, rounds = two_keys(), {0: 5, 1: 4}
    for rank in range(3):
        rest(job, rank, rounds, Strategy())
    assert job.sent[WORKERS[2]][-1] == {"kind": "replanned", "number": 1, "keys": []}
    for rank in (2, 1):
        rest(job, rank, rounds)
    assert job.agreement.depart(WORKERS[0])[:2] == [
        (worker, {"kind": "replanned", "number": 2, "keys": []}) for worker in WORKERS[1:]
    ]


@pytest.mark.parametrize("other, problem", [
    (dict(rounds={0: 5, 1: 5}), "behind which a strategy changes: key 1 is 4 on the first and 5 on the second"),
    (dict(stores=(0, 1)), "behind which a strategy changes: stores is (0,) on the first and (0, 1) on the second"),
    (dict(strategy=Strategy(Cut((0,)))), "the strategy to change to: sha256"),
])  # fmt: skip
def test_workers_that_rest_elsewhere_or_want_another_strategy_are_named(other, problem):
    job, usual = two_keys(), dict(rounds={0: 5, 1: 4}, strategy=Strategy(Cut((1,))))
    rest(job, 0, **usual)
    rest(job, 1, **usual)
    with pytest.raises(DisagreementError, match=re.escape(problem)):
        rest(job, 2, **{**usual, **other})


def test_nobody_rests_for_one_who_has_left_nor_twice():
    job = two_keys()
    rest(job, 0, {0: 5, 1: 4})
    with pytest.raises(ProtocolError, match="worker 0 .* rests twice"):
        rest(job, 0, {0: 5, 1: 4})
    with pytest.raises(DisagreementError, match="worker 1 .* left the job while worker 0 .* waits for all workers to"):
        job.say(WORKERS[1], "bye")


def test_a_server_that_the_job_lacks_ends_it():
    job = two_keys()
    for rank in (1, 2):
        rest(job, rank, {0: 5, 1: 4})
    with pytest.raises(ProtocolError, match="worker 0 .* set the strategy of store 0: .* server 7 is named"):
        rest(job, 0, {0: 5, 1: 4}, Strategy(Cut((7,))))
