"""Options of a store: what makes no sense is refused with words that help, and a server passes the rest to its core."""

import pytest

from p3.plan.options import validate

SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}
DGC = {"type": "dgc", "ratio": 0.001, "warmup_steps": 0, "clip_norm": 0.0, "masking": True}
SENSIBLE = [
    ("optimizer", SGD),
    ("compression", {"type": "2bit", "threshold": 0.5}),
    ("compression", {"type": "2bit", "threshold": 1}),
    ("compression", {"type": "fp16"}),
    ("compression", {"type": "1bit"}),
    ("compression", dict(DGC)),
    ("compression", dict(DGC, ratio=1, warmup_steps=100, clip_norm=5, masking=False)),
    ("reduction", {"type": "sum"}),
    ("reduction", {"type": "average"}),
    ("reduction", {"type": "mean"}),
    ("value_compression", {"type": "int8"}),
    ("quorum", {"type": "workers", "least": 2, "grace_s": 0}),
    ("value_compression", {"type": "2bit", "threshold": 0.5}),
]
SENSELESS = [
    ("momentum", {}, "option 'momentum' is unknown; a store has compression, optimizer, quorum"),
    (["compression"], {}, "option ['compression'] is unknown; a store has"),
    ("optimizer", dict(SGD, momentum=-1), "optimizer sgd: momentum is -1; it must be a finite number of at least 0"),
    ("compression", "fp16", "compression: the value must be a dict like {'type': '1bit'}, not 'fp16'"),
    ("c" * 200, {}, "option '%s is unknown" % ("c" * 99)),
    ("compression", {"type": "c" * 200}, "type is '%s; it must be one of" % ("c" * 99)),
    ("compression", {"type": "fp16", "c" * 200: "d" * 900},
     "'%s (which is '%s) is no field of it" % ("c" * 99, "d" * 499)),
    ("compression", {"type": "2bit", "threshold": "d" * 900}, "threshold is '%s; it must be" % ("d" * 499)),
    ("compression", {}, "compression: type is None; it must be one of 1bit, 2bit, "),
    ("compression", {"type": "3bit"}, "compression: type is '3bit'; it must be one of 1bit, 2bit, "),
    ("compression", {"type": ["fp16"]}, "compression: type is ['fp16']; it must be one of"),
    ("compression", {"type": "2bit"}, "compression 2bit: threshold is missing; it must be a plain number from"),
    ("compression", {"type": "fp16", "threshold": 1}, "compression fp16: 'threshold' (which is 1) is no field of it"),
    ("compression", {"type": "dgc"}, "compression dgc: ratio is missing; it must be a number above 0 and at most 1"),
    ("compression", dict(DGC, ratio=0), "compression dgc: ratio is 0; it must be a number above 0 and at most 1"),
    ("compression", dict(DGC, ratio=1.01), "compression dgc: ratio is 1.01; it must be"),
    ("compression", dict(DGC, ratio=float("nan")), "compression dgc: ratio is nan; it must be"),
    ("compression", dict(DGC, ratio=True), "compression dgc: ratio is True; it must be"),
    ("compression", dict(DGC, warmup_steps=-1), "warmup_steps is -1; it must be a whole number of at least 0"),
    ("compression", dict(DGC, warmup_steps=1.5), "warmup_steps is 1.5; it must be a whole number of at least 0"),
    ("compression", dict(DGC, clip_norm=-1), "clip_norm is -1; it must be a finite number of at least 0"),
    ("compression", dict(DGC, clip_norm=float("inf")), "clip_norm is inf; it must be a finite number of at least 0"),
    ("compression", dict(DGC, masking=1), "compression dgc: masking is 1; it must be True or False"),
    ("compression", dict(DGC, momentum=0.9), "compression dgc: 'momentum' (which is 0.9) is no field of it"),
    ("value_compression", dict(DGC), "value_compression: type is 'dgc'; it must be one of 1bit, 2bit, "),
    ("value_compression", {"type": "2bit"}, "value_compression 2bit: threshold is missing"),
    ("quorum", {"type": "workers", "least": 0, "grace_s": 0}, "quorum workers: least is 0; it must be a whole number"),
    ("quorum", {"type": "workers", "least": True, "grace_s": 0}, "quorum workers: least is True; it must be"),
    ("quorum", {"type": "workers", "least": 2}, "quorum workers: grace_s is missing; it must be a number of seconds"),
    ("quorum", {"type": "workers", "least": 2, "grace_s": float("nan")}, "quorum workers: grace_s is nan; it must be"),
    ("reduction", {"type": "max"}, "reduction: type is 'max'; it must be one of average, mean, sum"),
    ("reduction", {"type": "sum", "weight": 2}, "reduction sum: 'weight' (which is 2) is no field of it; it has type"),
]
SENSELESS += [
    ("compression", {"type": "2bit", "threshold": value}, "compression 2bit: threshold is %r; it must be a" % (value,))
    for value in (0, -0.5, float("nan"), float("inf"), 1e-40, 1e39, 10**400, True, "0.5", None)
]


@pytest.mark.parametrize("name, value", SENSIBLE)
def test_sensible_options_pass(name, value):
    validate(name, value)


@pytest.mark.parametrize("name, value, text", SENSELESS)
def test_senseless_options_are_refused_in_words_that_name_them(name, value, text):
    with pytest.raises(ValueError) as caught:
        validate(name, value)
    assert text in str(caught.value)


class RecordingCore:
    """Notes what is called. The core's own methods are tested in tests/core/test_binding.py and with real jobs."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        return lambda *arguments: self.calls.append((method, *arguments))


@pytest.fixture
def apply():
    return pytest.importorskip("p3.server.process", reason="the extension is not built").apply


@pytest.mark.parametrize("name, value", SENSIBLE)
def test_a_server_answers_and_passes_an_optimizer_to_its_core(apply, name, value):
    """Of the other options it has what the plan of each key says."""
    core = RecordingCore()
    answer = apply(core, {"kind": "set_option", "store": 3, "name": name, "value": value})
    assert answer == {"kind": "option_set", "store": 3, "name": name}
    assert core.calls == ([("set_optimizer", 3, value)] if name == "optimizer" else [])


@pytest.mark.parametrize("name, value", [("momentum", {}), ("compression", {"type": "3bit"}), ("reduction", {})])
def test_a_server_checks_again_what_it_receives(apply, name, value):
    core = RecordingCore()
    with pytest.raises(ValueError, match=name):
        apply(core, {"kind": "set_option", "store": 3, "name": name, "value": value})
    assert core.calls == []
