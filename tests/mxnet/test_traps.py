"""Traps of MXNet 1.9.1 that P3 relies on having avoided."""

import sys

import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")


def run_code(code, **variables):
    status, output = jobs.run([sys.executable, "-c", code], **variables)
    assert status == 0, output
    return output


# Importing


def test_importing_p3_imports_neither_mxnet_nor_numpy_nor_the_core():
    code = "import p3, sys; print(sorted({'mxnet', 'numpy', 'p3._core', 'asyncio'} & set(sys.modules)), p3.__version__)"
    assert run_code(code).startswith("[] 0.1.0")


@pytest.mark.parametrize(
    "order",
    [
        "import p3, mxnet",
        "import mxnet, p3",
        "import p3; from mxnet import gluon; import mxnet",
        "import p3; p3.P3KVStore; import mxnet",
        "from p3.kvstore import P3KVStore; import mxnet",
    ],
)
def test_the_store_is_registered_whichever_is_imported_first(order):
    assert "dist_p3_sync" in run_code(f"{order}; print(mxnet.kv.create('p3_sync').type)")


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_nothing_is_hooked_in_a_server_or_scheduler(role):
    code = "import sys; before = list(sys.meta_path); import p3; print(sys.meta_path == before)"
    assert "True" in run_code(code, DMLC_ROLE=role)


def test_without_mxnet_only_what_needs_it_fails_and_says_how_to_get_it():
    code = (
        "import sys; sys.modules['mxnet'] = None\n"
        "import p3; p3.P3Worker, p3.P3Server, p3.Session, p3.P3Error\n"
        "try: p3.P3KVStore\n"
        "except ImportError as error: print(error)"
    )
    assert "pip install 'p3-training[mxnet]'" in run_code(code)


def test_failed_import_of_mxnet_is_mxnets_own_error(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise ImportError('broken on purpose')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import p3\n"
        "try: import mxnet\n"
        "except ImportError as error: print(error)"
    )
    assert "broken on purpose" in run_code(code)


# Bulks: a hybridized layer must not wait for the weights of the layers after it

FLAGS_OF_A_HYBRIDIZED_BLOCK = """
import {imports}
import mxnet as mx, os
wrapped = mx.ndarray.CachedOp.__mro__[1]
create = wrapped.__init__
def note(self, sym, flags=()):
    print(*("%s=%s" % flag for flag in flags if "bulk" in flag[0]))
    create(self, sym, flags)
wrapped.__init__ = note
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(4))
net.initialize()
net.hybridize({hybridize})
net(mx.nd.ones((1, 4))).wait_to_read()
print("for the rest:", os.environ.get("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"))
"""


def test_workers_do_not_bulk():
    output = run_code(FLAGS_OF_A_HYBRIDIZED_BLOCK.format(imports="p3", hybridize=""), DMLC_ROLE="worker")
    assert output.splitlines() == ["forward_bulk_size=1 backward_bulk_size=1", "for the rest: 1"]


def test_mxnet_imported_first_is_warned_about_and_hybridized_blocks_are_mended():
    output = run_code(FLAGS_OF_A_HYBRIDIZED_BLOCK.format(imports="mxnet, p3", hybridize=""), DMLC_ROLE="worker")
    assert output.count("MXNet was imported before p3") == 1
    assert "forward_bulk_size=1 backward_bulk_size=1\nfor the rest: None\n" in output


def test_bulk_sizes_that_the_user_set_are_kept():
    code = FLAGS_OF_A_HYBRIDIZED_BLOCK.format(imports="p3", hybridize="forward_bulk_size=7")
    output = run_code(code, DMLC_ROLE="worker", MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN="3")
    assert output.splitlines() == ["forward_bulk_size=7 backward_bulk_size=1", "for the rest: 3"]


def test_alone_and_in_other_processes_bulks_are_left_as_they_are():
    code = "import os, p3, mxnet as mx; print(mx.ndarray.CachedOp.__module__, os.environ.get({!r}))"
    assert run_code(code.format("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN")).split() == ["mxnet._ctypes.ndarray", "None"]


# Layouts


def test_inference_still_leaves_weights_in_a_layout_of_its_own():
    """If this fails, MXNet has changed, and the landing arrays may no longer be needed."""
    import ctypes

    layer = mx.gluon.nn.Conv2D(16, 3, in_channels=16)
    layer.initialize()
    layer(mx.nd.ones((4, 16, 12, 12))).wait_to_read()
    tensor = ctypes.c_void_p()
    assert mx.base._LIB.MXNDArrayToDLPack(layer.weight.data().handle, ctypes.byref(tensor)) == -1


def test_first_values_may_have_any_layout():
    code = """
import p3, mxnet as mx
layer = mx.gluon.nn.Conv2D(16, 3, in_channels=16)
layer.initialize()
layer(mx.nd.ones((4, 16, 12, 12))).wait_to_read()
weight = layer.weight.data()
expected = weight.copy().asnumpy()
layer(mx.nd.ones((4, 16, 12, 12))).wait_to_read()
out = mx.nd.zeros(weight.shape)
mx.kv.create("p3_sync").broadcast(0, weight, [out, weight])
print((out.asnumpy() == expected).all() and (weight.asnumpy() == expected).all())
"""
    assert run_code(code).strip() == "True"


# Processes and engines


@pytest.mark.parametrize("workers", [0, 2])  # 0: embedded
def test_fork_and_data_loader_while_rounds_are_under_way(workers):
    command = jobs.python("forks.py")
    status, output = jobs.run_p3(workers, 1, command) if workers else jobs.run(command)
    assert status == 0 and output.count("passed") == max(workers, 1), output


def test_naive_engine_works_and_is_warned_about():
    code = """
import p3, mxnet as mx
kv = mx.kv.create("p3_sync"); kv = mx.kv.create("p3_sync")
out = mx.nd.zeros(3)
kv.broadcast(0, mx.nd.ones(3), out)
kv.pushpull(0, mx.nd.ones(3) * 4, out=out)
print(out.asnumpy().tolist())
"""
    output = run_code(code, MXNET_ENGINE_TYPE="NaiveEngine")
    assert "[4.0, 4.0, 4.0]" in output and output.count("nothing overlaps") == 1


def test_naive_engine_raises_what_the_engine_itself_drops():
    code = """
import p3, mxnet as mx
kv = mx.kv.create("p3_sync")
kv.init(0, mx.nd.ones(3))
p3.worker.session.current().fail("on purpose")
try: kv.push(0, mx.nd.ones(3))
except mx.base.MXNetError as error: print(error)
"""
    assert "on purpose" in run_code(code, MXNET_ENGINE_TYPE="NaiveEngine")


def test_exit_with_rounds_under_way_is_orderly():
    code = """
import p3, mxnet as mx
kv = mx.kv.create("p3_sync")
kv.init(0, mx.nd.ones(3_000_000))
for _ in range(5): kv.push(0, mx.nd.ones(3_000_000))
"""
    assert run_code(code).strip() == ""


# Blocked layouts: an evaluation leaves a convolution's weight in one, the next training pass brings it back, and it
# does so in an operation that it queues while it runs, perhaps behind the script's wait for the weight

PULL_INTO_A_BLOCKED_WEIGHT = """
import sys, p3, mxnet as mx
kv = mx.kv.create("p3_sync")
convolution = mx.gluon.nn.Conv2D(8, 3, in_channels=8)
convolution.initialize()
def is_plain(array):
    array.wait_to_read()
    try:
        return mx.nd.to_dlpack_for_read(array) is not None
    except mx.base.MXNetError:
        return False
weight = convolution.weight.data()
kv.init("w", mx.nd.ones(weight.shape, dtype=sys.argv[1]))
convolution(mx.nd.ones((4, 8, 12, 12))).wait_to_read()
print("plain before", is_plain(weight))
kv.pull("w", weight)
print("plain after", is_plain(weight), weight.asnumpy().min(), weight.asnumpy().max())
"""


def test_a_pull_leaves_a_blocked_weight_in_the_plain_layout():
    status, output = jobs.run([sys.executable, "-c", PULL_INTO_A_BLOCKED_WEIGHT, "float32"])
    assert status == 0 and "plain before False\nplain after True 1.0 1.0" in output, output


EVALUATE_TRAIN_AND_READ = """
import p3, mxnet as mx
kv = mx.kv.create("p3_sync")
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(8, 3, in_channels=3), mx.gluon.nn.Conv2D(8, 3, in_channels=8), mx.gluon.nn.Dense(10))
net.initialize()
x = mx.nd.random.uniform(shape=(4, 3, 12, 12))
net(x).wait_to_read()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, kvstore=kv)
weights = [parameter.data() for parameter in net.collect_params().values()]
before = [weight.asnumpy() for weight in weights]
wrong = 0
for _ in range(1500):
    net(x).wait_to_read()
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
    trainer.step(1)
    wrong += sum((weight.asnumpy() != value).any() for weight, value in zip(weights, before))
print("wrong", wrong)
"""


def test_weights_can_be_read_at_once_after_an_evaluation_and_a_step():
    """MXNet's use of freed memory, which MALLOC_PERTURB_ shows, ended most of such runs with a segmentation fault."""
    assert "wrong 0" in run_code(EVALUATE_TRAIN_AND_READ, MALLOC_PERTURB_="77")
