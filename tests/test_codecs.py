"""p3.codecs: what the core's codecs say of themselves, and the documentation's tables of them."""

import re
import subprocess
import sys

import compressions
import pytest
from processes import ROOT

from p3 import codecs, placement
from p3.plan.options import validate

core = pytest.importorskip("p3._core", reason="the extension is not built")

PAGE = (ROOT / "docs" / "compression.md").read_text(encoding="utf-8")


def test_the_tables_are_as_the_codecs_say():
    """To bring docs/compression.md up to date: python -m p3.codecs. There lines go on with what was measured."""
    (tables,) = re.findall(r"^<!-- codecs: .* -->\n(.*?)\n<!-- /codecs -->$", PAGE, re.M | re.S)
    said, expected = tables.splitlines(), codecs.tables().splitlines()
    assert len(said) == len(expected)
    assert [one[: len(line)] for one, line in zip(said, expected)] == expected


def test_every_option_of_deep_gradient_compression_is_explained():
    section = PAGE.partition("## Deep gradient compression")[2]
    explained = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert explained == [option.name for option in codecs.codecs()["dgc"].options]


def test_standard_values_and_nothing_else_complete_a_compression():
    for codec in codecs.types().values():
        compression = codec.complete()
        validate("compression", compression)
        assert codecs.of(compression) == codec and codecs.complete(compression) == compression
        assert codecs.complete({"type": codec.name}, of_mxnet=True) == compression
        assert [type(compression[option.name]) for option in codec.options] == [one.kind for one in codec.options]
    assert codecs.complete({"type": "dgc", "ratio": 0.5, "warmup_steps": 3}) == {
        "type": "dgc", "ratio": 0.5, "warmup_steps": 3, "clip_norm": 0.0, "masking": True,
    }  # fmt: skip


def test_a_threshold_is_mxnets_and_has_to_be_given_elsewhere():
    assert codecs.complete({"type": "2bit"}) == {"type": "2bit"}
    assert codecs.complete({"type": "2bit"}, of_mxnet=True) == {"type": "2bit", "threshold": 0.5}
    given = codecs.complete({"type": "2bit", "threshold": "0.25"}, of_mxnet=True)["threshold"]
    assert given == 0.25 and type(given) is float


@pytest.mark.parametrize("compression", [None, {}, {"type": None}, {"type": "3bit"}, {"type": ["fp16"]}])
def test_what_names_no_codec_has_none(compression):
    assert codecs.of(compression) is None
    assert compression is None or codecs.complete(compression, of_mxnet=True) == compression


def test_options_are_within_their_bounds():
    ratio, warmup, _, masking = codecs.codecs()["dgc"].options
    assert ratio.allows(1) and ratio.allows(1e-9) and not ratio.allows(0) and not ratio.allows(True)
    assert warmup.allows(10**12) and not warmup.allows(10**12 + 1) and not warmup.allows(1.0)
    assert masking.allows(False) and not masking.allows(0)


@pytest.mark.parametrize("elements", [1, 3, 1000, 65536, 65537])
def test_a_push_has_no_more_bytes_than_plain_and_all_that_a_value_can_have_is_a_plain_one(elements):
    for codec in codecs.codecs().values():
        compression = codec.complete()
        assert 1 <= codecs.sent(compression, elements) <= elements
        assert 0 < codecs.push_bytes(compression, elements) <= 4 * elements + 8
        if codec.makes_steps:
            assert codecs.payload_bytes(compression, elements, elements) == 4 * elements
        if codec.encodes_values:
            encoded = codecs.push_bytes(compression, elements)
            assert codecs.bytes_back(compression, elements) == min(encoded, 4 * elements)
        assert codec.makes_steps or codecs.sent(compression, elements) == elements


INT8, BF16, DGC = ({"type": kind} for kind in ("int8", "bf16", "dgc"))
LOW_RANK = {"type": "lowrank", "rank": 4}


@pytest.mark.parametrize("given, up, down", [
    (None, None, None),
    ("int8", INT8, INT8),
    (INT8, INT8, None),
    ({"up": "int8", "down": "bf16"}, INT8, BF16),
    ({"up": INT8, "down": None}, INT8, None),
    ({"down": BF16}, None, BF16),
    ({"up": None, "down": "int8"}, None, INT8),
    ("dgc", codecs.complete(DGC), None),
    ("lowrank", LOW_RANK, None),
    ({"up": "lowrank", "down": "bf16"}, LOW_RANK, BF16),  # which is refused
    ({}, {}, None),
    (7, 7, None),
])  # fmt: skip
def test_each_way_is_what_a_script_has_given(given, up, down):
    ways = codecs.Ways.of(given)
    assert ways == (up, down)
    expected = {"compression": up, "value_compression": down}
    assert ways.options == {name: value for name, value in expected.items() if value is not None}


@pytest.mark.parametrize("given, up, down", [
    (INT8, INT8, None),
    ({"type": "2bit", "down": "2bit"}, {"type": "2bit", "threshold": 0.5}, {"type": "2bit"}),  # which is refused
    ({"down": "bf16"}, None, BF16),
    ({"type": "int8", "down": {"type": "bf16"}}, INT8, BF16),
    ({}, {}, None),
])  # fmt: skip
def test_mxnets_params_mean_what_is_pushed_and_have_a_down(given, up, down):
    assert codecs.ways_of_mxnet(given) == (up, down)


def test_what_comes_back_is_encoded_by_what_makes_no_steps_and_no_matrices():
    for codec in codecs.types().values():
        if codec.encodes_values:
            validate("value_compression", codec.complete())
        else:
            with pytest.raises(ValueError, match="value_compression: type is '%s'; it must be one of" % codec.name):
                validate("value_compression", codec.complete())


@pytest.mark.parametrize("shape, rank, travels", [
    ((1000, 1000), 4, ((1000, 4), (1000, 4))),
    ((64, 32, 3, 3), 4, ((64, 4), (288, 4))),
    ((8, 8), 4, ((8, 8),)),  # of 64 elements, and 64 would travel
    ((9, 8), 4, ((9, 4), (8, 4))),
    ((1000,), 1, ((1000,),)),
    ((), 1, ((),)),
    ((0, 7), 1, ((0, 7),)),
])  # fmt: skip
def test_two_thin_matrices_travel_where_that_takes_fewer_bytes(shape, rank, travels):
    compression = {"type": "lowrank", "rank": rank}
    assert codecs.in_place_of(shape, codecs.rank_of(compression, shape)) == travels
    for other in (None, {}, INT8, DGC):
        assert codecs.in_place_of(shape, codecs.rank_of(other, shape)) == (shape,)


def test_a_frame_has_the_bytes_of_the_cores_header():
    assert placement.FRAME_BYTES == core.HEADER_BYTES


def test_every_codec_of_gradients_has_a_numpy_reference():
    for name in codecs.of_gradients():
        compressions.sender(name, 1000)


def test_the_core_is_imported_at_the_first_question():
    script = (
        "import sys, p3.codecs as codecs, p3.plan.options, p3.plan.choices as choices, p3.measure.replay.bound\n"
        "assert choices.of_compression(None) == choices.PLAIN and 'p3._core' not in sys.modules\n"
        "assert codecs.codecs() and 'p3._core' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=str(ROOT))
