"""What the doctor tells of a model: the replay's bound at the rates that were measured, and a row of the docs."""

import math
import re

import pytest
from processes import ROOT

from p3 import cli
from p3.doctor import forecast, report
from p3.errors import ConfigError
from p3.measure.compressions import Compression
from p3.measure.replay import bound, models, recorded
from p3.plan import strategy
from p3.trace import lives

STRATEGIES = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")


def told(compute_s, rate_mbit, model=None):
    model = model or models.load("resnet50", 1.0)
    return forecast.forecast(model, compute_s, [rate_mbit] * 3, [rate_mbit] * 3, 0.1)


def test_the_bound_is_that_of_the_replay():
    found = told(0.5, 1000)
    expected = bound.bound(models.load("resnet50", 1.0), 0.5, bound.one_of_each(3, 1000), delay_s=1e-4)
    assert (found.bound_s, found.bound_reason) == (expected.seconds, expected.reason)
    assert found.serial_s == 0.5 + found.communication_s and found.compute_s <= found.bound_s <= found.serial_s
    assert 0 <= found.hidden <= 1 and found.predicted_s >= found.bound_s


@pytest.mark.parametrize("compute_s, strategy", [
    (20.0, forecast.EXACT), (0.6, forecast.COMPRESSED), (0.05, forecast.SPARSE),
])  # fmt: skip
def test_each_row_of_the_strategies_is_found_where_it_belongs(compute_s, strategy):
    assert told(compute_s, 1000).strategy == strategy
    assert "\n| %s |" % strategy in STRATEGIES


def test_bounds_with_codecs_are_by_their_own_formulas_and_told_where_they_matter():
    found, cluster = told(0.6, 1000), bound.one_of_each(3, 1000)
    assert found.compressed_s == {
        codec: bound.bound(models.load("resnet50", 1.0), 0.6, cluster, delay_s=1e-4,
                           compression=Compression(codec, codec)).seconds
        for codec in ("bf16", "int8", "lowrank")
    }  # fmt: skip
    assert found.bound_s > found.compressed_s["bf16"] > found.compressed_s["int8"] > found.compressed_s["lowrank"]
    slow, hidden = ("\n".join(report._forecast(told(compute_s, 1000), 3)) for compute_s in (0.6, 20.0))
    assert "with int8" in slow and "with bf16" in slow and "with " not in hidden.replace("with headers", "")


def test_a_plan_is_told_where_links_differ():
    model = models.load("resnet50", 0.2)
    alike, unlike = (
        forecast.forecast(model, 0.1, [200.0, 200.0, rate], [200.0, 200.0, rate], 0.1) for rate in (200.0, 50.0)
    )
    assert (alike.planned_s, alike.plan) == (None, "") and "with a plan" not in "\n".join(report._forecast(alike, 3))
    assert unlike.planned_s < 0.95 * unlike.predicted_s and unlike.planned_shares[2] < 0.1
    assert sum(unlike.planned_shares) == pytest.approx(1.0)
    assert strategy.parse(unlike.plan).default.servers
    text = "\n".join(report._forecast(unlike, 3))
    assert re.search("with a plan +%.4f s  servers hold" % unlike.planned_s, text)


def test_a_model_of_which_the_size_is_known():
    model = recorded.even_model(24_000_000)
    assert model.bytes == 96_000_000
    assert math.isclose(sum(layer.forward + layer.backward for layer in model.layers), 1.0)
    assert told(1.0, 1000, model).model_bytes == 96_000_000
    assert list(told(1.0, 1000, model).compressed_s) == ["bf16", "int8"]  # it has no matrices


def test_a_recorded_run_is_a_model(run_job, tmp_path, capsys):
    script = """
        import time
        import numpy as np
        from p3.worker.session import Session
        KEYS = {"first": 5000, "middle": 300, "last": 10}
        with Session.open() as session:
            keys = {name: session.declare(name, (count,), "float32") for name, count in KEYS.items()}
            arrays = {name: (np.ones(count, "float32"), np.zeros(count, "float32")) for name, count in KEYS.items()}
            session.wait([session.init(keys[name], *arrays[name]) for name in KEYS])
            for _ in range(3):
                operations = []
                for priority, name in enumerate(reversed(list(KEYS))):
                    time.sleep(0.05)
                    operations.append(session.pushpull(keys[name], *arrays[name], priority=priority))
                session.wait(operations)
        """
    finished = run_job(script, env={"P3_TRACE": str(tmp_path / "trace")})
    assert finished.code == 0, finished.err
    model, compute_s = recorded.recorded_model(lives.load(str(tmp_path / "trace")))
    assert [(layer.name, layer.bytes) for layer in model.layers] == [("first", 20000), ("middle", 1200), ("last", 40)]
    assert math.isclose(sum(layer.forward + layer.backward for layer in model.layers), 1.0)
    assert compute_s >= 1.5 * 0.15  # what was slept cannot have been less
    assert told(compute_s, 1000, model).model_bytes == model.bytes
    of_it = ["--recorded", str(tmp_path / "trace"), "--hosts", "3"]
    for command in (["plan", "--budget", "0"], ["simulate"]):
        assert cli.main([*command, *of_it]) == 0
        assert "the recorded run, 0.0 MB, P3: 3 hosts, 200 Mbit/s, %g s" % compute_s in capsys.readouterr().out
    assert cli.main(["simulate", *of_it, "--compute", "2", "--size", "0.1"]) == 1
    assert "a recorded run has its own" in capsys.readouterr().err


def test_a_trace_without_rounds_is_refused(run_job, tmp_path):
    script = "from p3.worker.session import Session\nwith Session.open(): pass"
    finished = run_job(script, env={"P3_TRACE": str(tmp_path)})
    assert finished.code == 0, finished.err
    with pytest.raises(ConfigError, match="holds no round"):
        recorded.recorded_model(lives.load(str(tmp_path)))
