"""`p3 bench selection`: what it times is deep gradient compression, and the core's is the reference's to the bit."""

import numpy as np
import pytest

from p3 import cli, codecs
from p3.measure._kernels import encode_step
from p3.measure.micro import selection
from p3.measure.replay.dgc_reference import Dgc

ELEMENTS = 1000


@pytest.mark.parametrize("ratio", selection.RATIOS)
def test_core_and_numpy_do_what_the_reference_does(ratio):
    reference = Dgc(ELEMENTS, ELEMENTS, selection.MOMENTUM, ratio=ratio)
    count = codecs.sent({"type": "dgc", "ratio": ratio}, ELEMENTS)
    memories = {encode: np.zeros((2, ELEMENTS), "float32") for encode in (selection.core, selection.with_numpy)}
    random = np.random.RandomState(2)
    for round in range(1, 20):
        gradient = random.randn(ELEMENTS).astype("float32")
        sent = reference(gradient, round, 1.0)
        for encode, (u, v) in memories.items():
            payload = np.zeros(codecs.payload_bytes({"type": "dgc"}, count, ELEMENTS), "uint8")
            encode(gradient, u, v, payload, count)
            np.testing.assert_array_equal(v, reference.v)
            np.testing.assert_array_equal(u, reference.u)
            if encode is selection.core:
                offsets = payload[4 + 4 * count :].view("uint16")
                np.testing.assert_array_equal(offsets, np.flatnonzero(sent))
                np.testing.assert_array_equal(payload[4 : 4 + 4 * count].view("float32"), sent[offsets])


def test_arrays_that_do_not_fit_are_refused():
    gradient, u, v = np.zeros((3, 100), "float32")
    payload = np.zeros(codecs.payload_bytes({"type": "dgc"}, 3, 100), "uint8")
    for wrong in (dict(sent=4), dict(sent=0), dict(u=u[:50]), dict(v=v.astype("float64"))):
        arguments = {"gradient": gradient, "u": u, "v": v, "payload": payload, "sent": 3, "momentum": 0.9, **wrong}
        with pytest.raises((TypeError, ValueError)):
            encode_step(**arguments)


def test_command_prints_a_line_for_each_ratio(capsys):
    assert cli.main(["bench", "selection", "--elements", "100", "--repeat", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        *("ratio %.3g" % ratio for ratio in selection.RATIOS), "u and v alone", "100 Mbit/s, plain",
    ]  # fmt: skip
