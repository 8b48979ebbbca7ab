"""Control messages are checked to the last field, both ways."""

import json
import struct

import pytest

from p3.cluster import messages
from p3.errors import ProtocolError
from p3.plan.key_plan import KeyPlan

ROW = {
    "rank": 0, "host": "10.0.0.8", "state": "runs", "age_s": None, "round": 3, "steps_per_s": 0.25, "sent_bytes": 9,
    "received_bytes": 9, "sent_per_s": 0.5, "received_per_s": 0.5, "queued_slices": 0, "memory_bytes": 1,
}  # fmt: skip
CUT = KeyPlan(2, "float32", 100, 3, 50, servers=(1, 0)).recut(predecessor=1, round=4)
EXAMPLES = {
    "int": 3,
    "bool": True,
    "none": None,
    "str": "a",
    "ints": [2, 3],
    "strs": ["a", "b"],
    "names": ["a", 1],
    "flat": {"momentum": 0.9, "name": "sgd", "centered": True, "clip": None},
    "values": {"compression": {"type": "int8"}, "value_compression": {}},
    "flats": [{"rounds": 3, "cpu_s": 0.5}, {}],
    "workers": [{"host": "10.0.0.8", "port": 0, "local": "", "machine": "m"}],
    "sha256": "0f" * 32,
    "towards": [[800, 400, 4, 0.25]],
    "waits": {"encoder": 0.5},
    "rows of workers": [
        dict(ROW, waited_s=None, waited_share=0.5, waits={"a": 1.5}, group="a", group_share=0.5, late_s=0.0)
    ],
    "rows of servers": [dict(ROW, received_slices=0, value_bytes=8, queue_s=0.001)],
    "rows of links": [{"host": "10.0.0.8", "processes": 2, "sent_per_s": 5e9, "received_per_s": 0}],
    "parts": [{"role": "server", "rank": 1, "bytes": 80, "sha256": "0f" * 32}],
    "reduction": "average",
    "update": "steps",
    "servers": [{"host": "10.0.0.8", "port": 7, "local": "p3-x", "machine": "m", "heir": 0}],
    "cut keys": [CUT],
    "cut keys of stores": [dict(CUT, store=0, name="w")],
}


def example(kind):
    """A message with a value of the right type in each field, found by trial."""
    return dict(_example_of(messages.FIELDS[kind]), kind=kind)


def _example_of(fields):
    return {name: next(v for v in EXAMPLES.values() if fits(v)) for name, fits in fields.items()}


def through_the_wire(message):
    data = messages.encode(message)
    assert messages.body_bytes(data[:4]) == len(data) - 4
    return messages.decode(data[4:])


@pytest.mark.parametrize("kind", sorted(messages.FIELDS))
def test_every_kind_arrives_as_it_was_sent(kind):
    assert through_the_wire(example(kind)) == example(kind)


@pytest.mark.parametrize("kind", sorted(messages.FIELDS))
def test_a_missing_a_wrong_and_an_unknown_field_are_refused(kind):
    for name in messages.FIELDS[kind]:
        message = example(kind)
        del message[name]
        with pytest.raises(ProtocolError, match="lacks its field %r" % name):
            messages.check(message)
        with pytest.raises(ProtocolError, match="wrong value in field %r" % name):
            messages.check(dict(example(kind), **{name: {"nested": []}}))
    with pytest.raises(ProtocolError, match="an extra field: 'extra'"):
        messages.check(dict(example(kind), extra=1))


def test_a_name_keeps_its_type():
    order = {"kind": "order", "store": 0, "names": [1, "1", "weight", -5]}
    assert through_the_wire(order)["names"] == [1, "1", "weight", -5]


@pytest.mark.parametrize("value", [True, -1, 1.0, "1", 1 << 63, None])
def test_only_a_whole_number_is_a_rank(value):
    with pytest.raises(ProtocolError):
        messages.check({"kind": "van", "rank": value})


def test_a_double_arrives_bit_by_bit():
    value = {"learning_rate": 0.1 + 0.2, "tiny": 5e-324}
    message = {"kind": "option", "store": 0, "name": "optimizer", "value": value}
    assert through_the_wire(message)["value"] == value


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_not_sent(number):
    with pytest.raises(ProtocolError, match="cannot be sent"):
        messages.encode({"kind": "option", "store": 0, "name": "optimizer", "value": {"momentum": number}})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"kind": ["bye"]}',
        b'{"kind": "unheard of"}',
        b'{"kind": "bye"} trailing',
        b"\xff\xfe",
        b'{"kind":"option","store":0,"name":"optimizer","value":{"a":NaN}}',
        b'{"kind":"option","store":0,"name":"optimizer","value":{"a":1e999}}',
        b"[" * 100000,
    ],
)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(ProtocolError):
        messages.decode(body)


def test_every_truncation_is_refused():
    body = messages.encode(example("join"))[4:]
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            messages.decode(body[:length])


def test_lengths_are_limited_before_anything_is_read():
    assert messages.body_bytes(struct.pack("<I", 4096), messages.MAX_BYTES_BEFORE_JOIN) == 4096
    with pytest.raises(ProtocolError, match="4097 bytes"):
        messages.body_bytes(struct.pack("<I", 4097), messages.MAX_BYTES_BEFORE_JOIN)
    with pytest.raises(ProtocolError):
        messages.body_bytes(b"\xff\xff\xff\xff")


def test_what_the_receiver_would_refuse_is_not_sent():
    with pytest.raises(ProtocolError, match="at most 4096"):
        messages.encode({"kind": "failed", "text": "x" * 5000}, messages.MAX_BYTES_BEFORE_JOIN)


def test_any_error_text_can_be_sent():
    text = messages.sendable("broken \udcff surrogate " + "x" * 100000)
    assert len(json.dumps(through_the_wire({"kind": "failed", "text": text}))) < 10000
