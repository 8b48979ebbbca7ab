"""Processes that join a running job of MXNet: from then on all workers have the same weights and states, to the bit."""

import os
import re
import signal
import sys
from collections import defaultdict
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

from joined_jobs import p3_join, p3_run, worker
from plugin_jobs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
import mxnet_joining as job


def train(folder, processes, cases, **env):
    """What all workers have said of a job in which a lost one is replaced, or to which a further one comes."""
    command = [str(SCRIPTS / "mxnet_joining.py"), ",".join(cases), str(folder)]
    if "grows" in cases:
        run = p3_run(folder, processes, job.WORKERS, command, "--max-workers", str(job.WORKERS + 1), **env)
        said = run.read_until("waits for go", times=job.WORKERS)
        joining = p3_join(folder, processes, run, command, **env)
    else:
        run = p3_run(folder, processes, job.WORKERS, command, "--rejoin", **env)
        said = run.read_until("waits for go", times=job.WORKERS - 1)
        joining = None
    if "waits to join the job" not in said:
        said += run.read_until("waits to join the job")
    (folder / "go").touch()
    ended = run.wait(100)
    assert ended.code == 0, (said, ended)
    if joining is not None:
        came = joining.wait(20)
        assert came.code == 0, came
        said += came.out
    return said + ended.out


def require_alike(said, cases):
    """All that workers have said of the same thing; and the newcomer took part."""
    names = [one for one in cases if one not in ("grows", "uneven", "exact", "loads", "resets", "snapshots")]
    came = job.WORKERS if "grows" in cases else 0
    told = defaultdict(dict)
    for rank, what, name, value in re.findall(r"worker (\d): (.*?) of ([^:]*): (.*)", said):
        told[name, what][int(rank)] = value
    all_of_them = set(range(job.WORKERS + ("grows" in cases)))
    wrong = []
    for name in names:
        for (of, what), values in told.items():
            if of != name:
                continue
            if what == "statistics":
                if values[came] != values[0 if came else 1]:
                    wrong.append((name, what, values))
            elif len(set(values.values())) != 1:
                wrong.append((name, what, values))
        for what in ["states", "counts", *("weights behind %d" % step for step in range(job.JOIN_AT - 1, job.STEPS))]:
            is_uneven = "uneven" in cases and what.startswith("weights") and int(what.rsplit(" ", 1)[1]) % 2 == 0
            if set(told[name, what]) != all_of_them and not is_uneven:
                wrong.append((name, what, "told by", sorted(told[name, what])))
    assert not wrong, (wrong, said)


@pytest.mark.parametrize(
    "cases",
    [
        ["sgd", "adam", "nadam", "ftml", "dcasgd", "half", "average"],
        ["adam here", "nadam here", "lamb", "lbsgd", "half here", "scaled", "clipping"],
        ["rows", "rows here", "sparse weights", "raw", "raw lamb", "raw behind"],
        ["fp16", "fp16 here", "2bit", "both ways"],
        ["uneven", "adam", "nadam", "lamb"],
        ["uneven", "nadam here"],
        ["uneven", "clipping"],
        ["resets", "adam", "adam here", "fp16", "lamb"],
        ["grows", "adam", "adam here", "named", "raw", "raw lamb"],
        ["loads", "adam", "adam here", "nadam", "raw adam", "raw lamb"],
    ],
    ids=", ".join,
)
def test_who_has_joined_has_the_weights_and_states_of_the_others_to_the_bit(tmp_path, processes, cases):
    require_alike(train(tmp_path, processes, cases), cases)


def test_who_joins_a_job_that_may_lose_servers(tmp_path, processes):
    cases = ["adam here", "nadam here", "fp16 here", "clipping"]
    require_alike(train(tmp_path, processes, cases, P3_ON_SERVER_LOSS="continue"), cases)


def test_a_job_that_resumes_repeats_what_was_trained_with_who_had_joined(tmp_path, processes):
    cases, names = ["snapshots", "adam", "adam here", "lamb", "raw adam"], ["adam", "adam here", "lamb", "raw adam"]
    env = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "9"}
    said = train(tmp_path, processes, cases, **env)
    require_alike(said, cases)
    command = [str(SCRIPTS / "mxnet_joining.py"), ",".join(cases), str(tmp_path)]
    again = p3_run(tmp_path, processes, job.WORKERS, command, **env).wait(60)
    assert again.code == 0, again
    what = r"worker \d: ((?:weights behind (?:9|10|11)|counts|states) of .*)"
    told, repeated = set(re.findall(what, said)), set(re.findall(what, again.out))
    assert told == repeated and len(told) == 5 * len(names), (told ^ repeated)


def test_sums_are_of_all_who_are_there(tmp_path, processes):
    said = train(tmp_path, processes, ["exact", "raw"])
    require_alike(said, ["exact", "raw"])
    weights = {key: np.zeros(4) for key in ("always", "third", "late", "rows")}
    for step in range(job.STEPS):
        there = range(job.DIE_AT <= step < job.JOIN_AT, job.WORKERS)
        due = {"always": True, "third": step % 3 == 0, "late": step >= job.LATE}
        for key in filter(due.get, due):
            weights[key] -= 0.5 * sum(4.0**rank for rank in there)
        for rank in there:
            weights["rows"][(step + rank) % 4] -= 0.5 * 4.0**rank
    told = set(re.findall("ends of raw: (.*)", said))
    assert told == {str([one.tolist() for one in weights.values()])}, (told, weights)


SCRIPT = """
import os, sys, time
import p3, mxnet as mx
from mxnet import gluon

class Own(mx.optimizer.SGD):
    pass

def trainer_of(kv, units=3, optimizer="sgd", **options):
    layer = gluon.nn.Dense(units, in_units=4)
    layer.initialize(mx.init.One())
    return layer, gluon.Trainer(layer.collect_params(), optimizer, {"learning_rate": 0.125}, kvstore=kv, **options)

def step_of(layer, trainer):
    with mx.autograd.record():
        loss = layer(mx.nd.ones((2, 4))).sum()
    loss.backward()
    trainer.step(2)

how = sys.argv[1]
first_kv, second_kv, ends = (mx.kv.create("p3_sync") for _ in range(3))
first = trainer_of(first_kv, 2 if how == "shape" else 3, "adam" if how == "rule" else "sgd")
second = trainer_of(second_kv, optimizer="nag" if how == "workers' rule" else "adam", update_on_kvstore=False)
begun, state = first_kv.resume(trainer=[] if how == "no trainer" else [first[1], second[1]])
if how != "no key":
    ends.init("end", mx.nd.zeros(1))
if how == "more":
    ends.init("more", mx.nd.zeros(1))
if how == "raises":
    raise ValueError("no such file")
if how == "step":
    step_of(*first)
if how == "join":
    first_kv.join()
if how == "store":
    mx.kv.create("p3_sync").init(0, mx.nd.ones(1))
if how == "states":
    first[1].load_states(sys.argv[0])
if how == "data":
    first[0].weight.set_data(mx.nd.ones((3, 4)))
if how == "sets":
    ends.set_optimizer(mx.optimizer.SGD())
if how == "sets own":
    ends.set_optimizer(Own())
for step in range(begun, 100_000):
    members = first_kv.members(step + (how == "round"), {"step": step})
    step_of(*first), step_of(*second)
    if step == begun:
        print("worker %d trains" % first_kv.rank, flush=True)
    flag = mx.nd.array([os.path.exists("end")])
    ends.pushpull("end", flag, out=flag)
    if flag.asscalar():
        break
    time.sleep(0.005)
print("ends with", list(members), [layer.weight.data().sum().asscalar() for layer, _ in (first, second)])
"""


REFUSED = {
    "shape": "disagree about key 0: shape",
    "rule": "has a Trainer that updates by Adam, and that of the others by SGD",
    "workers' rule": "has a Trainer that updates by NAG, and that of the others by Adam",
    "no trainer": "gives 0 Trainers to resume(), and that of the others 2",
    "no key": "has no key 'end' in store 2 at its first members()",
    "more": "which has no key 'more' in store 2",
    "raises": "no such file",
    "step": "a gradient of key 0 comes before its first members(",
    "join": "join() comes before its first members(",
    "store": "whose workers have no other store",
    "states": "load_optimizer_states() comes before its first members(",
    "data": "set_data() or load_parameters() of a Trainer that has keys comes before its first members(",
    "sets": "",
    "sets own": "has a store 2 with Own on the workers, and that of the others no optimizer",
    "round": "comes to members(",
}


def test_one_with_another_script_is_refused_by_name_and_the_job_goes_on(tmp_path, processes):
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    run = p3_run(tmp_path, processes, 2, [str(path), "others"], "--max-workers", "20")
    run.read_until(" trains", times=2)
    came = {how: p3_join(tmp_path, processes, run, [str(path), how]) for how in REFUSED}
    for how, why in REFUSED.items():
        ended = came[how].wait(60)
        assert ended.code == 1 and why in ended.err, (how, ended)
    last = p3_join(tmp_path, processes, run, [str(path), "others"])
    told = last.read_until(" trains")
    (tmp_path / "end").touch()
    ended, last = run.wait(60), last.wait(60)
    assert ended.code == 0 and last.code == 0, (ended, last)
    told = re.findall("ends with (.*)", told + ended.out + last.out)
    assert len(told) == 3 and len(set(told)) == 1, told


def test_who_has_joined_gives_to_others_when_it_has_become_the_first(tmp_path, processes):
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    run = p3_run(tmp_path, processes, 1, [str(path), "others"], "--max-workers", "4")
    run.read_until(" trains")
    joining = [p3_join(tmp_path, processes, run, [str(path), "others"])]
    joining[0].read_until(" trains")
    os.kill(worker(run, 0), signal.SIGKILL)
    run.read_until("The others go on without it")
    joining += [p3_join(tmp_path, processes, run, [str(path), "others"]) for _ in range(2)]
    for one in joining[1:]:
        one.read_until(" trains")
    (tmp_path / "end").touch()
    ended, came = run.wait(60), [one.wait(60) for one in joining]
    assert ended.code == 0 and all(one.code == 0 for one in came), (ended, came)
    told = re.findall("ends with (.*)", "".join(one.out for one in came))
    assert len(told) == 3 and len(set(told)) == 1, told


AT_FIRST = """
import os, sys, time
import p3, mxnet as mx
from mxnet import gluon

joins = "P3_JOIN" in os.environ
mx.random.seed(2 if joins else 1)
kv, other_kv = mx.kv.create("p3_sync"), mx.kv.create("p3_sync")
trained = []
for store, updates in ((kv, True), (other_kv, False)):
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(5, in_units=0 if joins else 4), gluon.nn.BatchNorm(), gluon.nn.Dense(2))
    net.initialize(mx.init.Xavier())
    if not joins:
        net(mx.nd.ones((2, 4)))
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=store, update_on_kvstore=updates)
    trained.append((net, trainer))
first, _ = kv.resume(trainer=[trainer for _, trainer in trained])
assert first == 0, first
print("waits for another one", flush=True)
while len(kv.members(0)) < 2:
    time.sleep(0.01)
def tell():
    for net, _ in trained:
        for name, one in sorted(net.collect_params(".*weight|.*bias|.*gamma|.*beta").items()):
            print("worker has", name, one.data().asnumpy().tobytes().hex())
tell()
for step in range(3):
    for net, trainer in trained:
        mx.random.seed(100 * step + kv.rank)
        with mx.autograd.record():
            loss = (net(mx.nd.random.uniform(shape=(3, 4))) ** 2).sum()
        loss.backward()
        trainer.step(3)
tell()
"""


def test_who_joins_before_the_first_step_begins_with_the_weights_of_the_others(tmp_path, processes):
    (tmp_path / "job.py").write_text(AT_FIRST)
    run = p3_run(tmp_path, processes, 1, [str(tmp_path / "job.py")], "--max-workers", "2")
    said = run.read_until("waits for another one")
    came = p3_join(tmp_path, processes, run, [str(tmp_path / "job.py")])
    ended, came = run.wait(60), came.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    told = [re.findall("worker has (.*)", said) for said in (said + ended.out, came.out)]
    assert told[0] == told[1] and len(told[0]) == 24, told


STATES = """
import os, time
import p3, mxnet as mx
from mxnet import gluon

class Odd(mx.optimizer.SGD):
    def create_state(self, index, weight):
        return object()

    def update(self, index, weight, grad, state):
        weight[:] -= grad

kv = mx.kv.create("p3_sync")
layer = gluon.nn.Dense(3, in_units=4)
layer.initialize(mx.init.One())
trainer = gluon.Trainer(layer.collect_params(), Odd(), kvstore=kv, update_on_kvstore=False)
first, _ = kv.resume(trainer=trainer)
for step in range(first, 100_000):
    kv.members(step)
    with mx.autograd.record():
        loss = layer(mx.nd.ones((2, 4))).sum()
    loss.backward()
    trainer.step(2)
    if step == 0:
        print("trains", flush=True)
    if os.path.exists("end"):
        break
    time.sleep(0.01)
print("is done")
"""


def test_states_that_nobody_can_hand_on_cost_only_who_wants_to_join(tmp_path, processes):
    (tmp_path / "job.py").write_text(STATES)
    run = p3_run(tmp_path, processes, 1, [str(tmp_path / "job.py")], "--max-workers", "2")
    run.read_until("trains")
    came = p3_join(tmp_path, processes, run, [str(tmp_path / "job.py")]).wait(60)
    (tmp_path / "end").touch()
    ended = run.wait(60)
    assert ended.code == 0 and "is done" in ended.out, ended
    assert came.code == 1 and "nobody can join this job: the optimizer's state" in came.err, came


MODULE = """
import os, sys, time
import p3, mxnet as mx

joins = "P3_JOIN" in os.environ
mx.random.seed(2 if joins else 1)
data = mx.sym.Variable("data")
net = mx.sym.FullyConnected(mx.sym.FullyConnected(data, num_hidden=6, name="first"), num_hidden=3, name="second")
net = mx.sym.LinearRegressionOutput(net, mx.sym.Variable("label"), name="out")
kv = mx.kv.create("p3_sync")
first, _ = kv.resume()
module = mx.mod.Module(net, data_names=["data"], label_names=["label"])
module.bind([("data", (4, 5))], [("label", (4, 3))])
module.init_params(mx.init.Xavier())
module.init_optimizer(kvstore=kv, optimizer=sys.argv[1], optimizer_params={"learning_rate": 0.125})
for step in range(first, 9):
    if step == 3:
        print("waits for another one", flush=True)
    while len(kv.members(step)) < 1 + (step >= 3):
        time.sleep(0.01)
    mx.random.seed(100 * step + kv.rank)
    module.forward(mx.io.DataBatch([mx.nd.random.uniform(shape=(4, 5))], [mx.nd.random.uniform(shape=(4, 3))]))
    module.backward()
    module.update()
    weights = [one.asnumpy().tobytes().hex() for _, one in sorted(module.get_params()[0].items())]
    print("worker", kv.rank, "behind", step, "has", weights)
"""


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_module_trains_on_with_who_joins(tmp_path, processes, optimizer):
    (tmp_path / "job.py").write_text(MODULE)
    run = p3_run(tmp_path, processes, 1, [str(tmp_path / "job.py"), optimizer], "--max-workers", "2")
    said = run.read_until("waits for another one")
    came = p3_join(tmp_path, processes, run, [str(tmp_path / "job.py"), optimizer])
    ended, came = run.wait(60), came.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    told = [re.findall(r"behind (\d) has (.*)", text) for text in (said + ended.out, came.out)]
    assert told[0][3:] == told[1] and len(told[1]) == 6, told


def test_nobody_joins_where_modules_update(tmp_path, processes):
    (tmp_path / "job.py").write_text(MODULE)
    env = {"MXNET_UPDATE_ON_KVSTORE": "0"}
    run = p3_run(tmp_path, processes, 1, [str(tmp_path / "job.py"), "adam"], "--max-workers", "2", **env)
    said = run.read_until("waits for another one")
    came = p3_join(tmp_path, processes, run, [str(tmp_path / "job.py"), "adam"], **env).wait(60)
    run.end()
    assert "processes that join and updates by Module itself (MXNET_UPDATE_ON_KVSTORE=0" in said, said
    assert came.code == 1 and "nobody can join this job: its workers have Modules that update" in came.err, came
