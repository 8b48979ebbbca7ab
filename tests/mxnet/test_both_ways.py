"""What comes back encoded, through MXNet's stores of real processes."""

import re
import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("mxnet")
from optimizer_cases import OPTIMIZERS


def run(workers, *arguments, **variables):
    status, output = jobs.run_p3(workers, 2, jobs.python("mxnet_both_ways.py", *arguments), **variables)
    assert status == 0, output
    return output


@pytest.mark.parametrize("mode", ["values", "sums"])
@pytest.mark.parametrize("workers, up, down", [(1, "int8", "int8"), (3, "fp16", "int8"), (2, "none", "bf16")])
def test_what_lands_is_what_numpy_encodes_of_a_plain_store(workers, up, down, mode):
    assert run(workers, mode, up, down).count("%s are those of NumPy" % mode) == workers


def test_over_tls_and_with_every_optimizer_that_servers_run():
    output = run(2, "optimizers", "none", "int8", P3_TLS="1")
    assert output.count("values are those of NumPy") == 2 * len(OPTIMIZERS)


@pytest.mark.parametrize("way", ["int8", "none"])
def test_rows_come_back_as_they_are_and_so_does_all_with_staleness(way):
    assert run(2, "whole", way, "int8").count("all comes back whole") == 2


def test_the_leader_of_a_machine_decodes_for_the_others():
    for mode in ("values", "sums"):
        assert run(3, mode, "none", "int8", P3_LOCAL_AGGREGATION="1").count("are those of NumPy") == 3


@pytest.mark.parametrize("workers, servers", [(2, 2), (3, 2)])
def test_a_net_learns_and_all_workers_end_with_the_same_weights(workers, servers):
    digests = re.findall(r"digest (\w{16})", run(workers, "trainer", "int8", "int8"))
    assert len(digests) == workers and len(set(digests)) == 1
    again = run(workers, "trainer", "int8", "int8", P3_SERVER_THREADS="2")
    assert re.findall(r"digest (\w{16})", again) == digests


def trainer(params, **more):
    arguments = ", ".join("%s=%r" % one for one in {"compression_params": params, **more}.items())
    return [sys.executable, "-c", (
        "import p3, mxnet as mx; from mxnet.contrib import amp; amp.init('float16', target_precision_ops=[]); "
        "net = mx.gluon.nn.Dense(2, in_units=2); net.initialize(); "
        "trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore='p3_sync', %s); "
        "amp.init_trainer(trainer); trainer._init_kvstore(); print('begins')" % arguments
    )]  # fmt: skip


def test_a_loss_scaler_goes_with_codecs_that_keep_nothing():
    status, output = jobs.run(trainer({"down": "int8"}))
    assert status != 0 and re.search(r"Trainer: compression .* keeps what it leaves out \(int8\) and a loss", output)
    status, output = jobs.run(trainer({"type": "int8", "down": "bf16"}))
    assert status == 0 and "begins" in output, output


def test_what_comes_back_cannot_be_steps():
    script = "import p3, mxnet as mx; mx.kv.create('p3_sync').set_gradient_compression({'type': 'fp16', 'down': 'dgc'})"
    status, output = jobs.run([sys.executable, "-c", script])
    assert status != 0 and "value_compression: type is 'dgc'" in output
