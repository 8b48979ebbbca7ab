"""Files of strategies: what is read is what was written, and what is none is refused by name."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3.codecs import Ways
from p3.errors import ConfigError
from p3.plan import strategy as strategies
from p3.plan.strategy import Cut, Strategy

_ways = st.builds(
    Ways,
    st.none() | st.sampled_from([{"type": "int8"}, {"type": "bf16"}, {"type": "lowrank", "rank": 2}]),
    st.none() | st.just({"type": "2bit", "threshold": 0.5}),
)
_cuts = st.builds(
    Cut,
    st.none() | st.lists(st.integers(0, 65535), min_size=1, max_size=9).map(tuple),
    st.none() | st.integers(1, 1 << 28),
    st.none() | _ways,
    st.none() | st.integers(1, 1 << 20),
    st.none() | st.sampled_from(["dense", "rows", "factors"]),
    st.none() | st.integers(0, 1 << 62) | st.just(math.inf),
)
_words = st.sampled_from(["int8", "topk", "dgc", "up", "down", "type", "ratio"])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _words,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["version", "default", "keys", *Cut._fields, "w"]) | _words, inner, max_size=5),
    max_leaves=12,
)
_entries = st.dictionaries(st.sampled_from(Cut._fields), _json, max_size=3)
_almost = st.fixed_dictionaries(
    {"version": st.sampled_from([1, 2, 2, 2, 3]), "allow_lossy": st.just(True) | _json},
    optional={"default": _entries, "keys": st.dictionaries(st.text(max_size=3), _entries, max_size=3)},
)


@given(_cuts, st.dictionaries(st.text(max_size=8), _cuts, max_size=5))
def test_what_is_written_is_read(default, keys):
    for written in (Strategy(default, keys, allow_lossy=True), Strategy(default, keys, allow_lossy=True).choices):
        assert strategies.parse(written.text()) == written


@given(_json | _almost)
def test_anything_else_is_read_or_refused(content):
    text = json.dumps(content)
    try:
        read = strategies.parse(text, "s.json")
    except ConfigError as error:
        assert "the strategy s.json" in str(error)
    else:
        assert strategies.parse(read.text(), "s.json") == read and content["version"] in (1, 2)


@pytest.mark.parametrize("text, said", [
    ("{", "is no JSON"),
    ("[" * 100_000, "is no JSON"),
    ('{"version": 1, "version": 1}', "'version' stands twice"),
    ("[]", r"it is \[\], no object"),
    ("{}", '"version" is None; this P3 reads versions 1 to 2'),
    ('{"version": true}', '"version" is True'),
    ('{"version": 3}', '"version" is 3'),
    ('{"version": [1]}', r'"version" is \[1\]'),
    ('{"version": 1, "server": [0]}', "a field 'server'; it may have version, default, keys"),
    ('{"version": 1, "keys": []}', '"keys" is no object'),
    ('{"version": 1, "default": {"order": 1}}', "has a field 'order'; it may have servers, slice, codec, part"),
    ('{"version": 1, "default": {"codec": "int8"}}', "a field 'codec', for which \"version\" must be 2"),
    ('{"version": 2, "default": {"partitions": 0}}', "partitions of .* is 0; it must be a whole number from 1"),
    ('{"version": 2, "default": {"route": ["rows"]}}', "route of .* is .*; it must be one of dense, rows, factors"),
    ('{"version": 2, "default": {"staleness": 1}}', "staleness of .* is 1, with which training differs"),
    ('{"version": 2, "default": {"staleness": Infinity}}', "staleness of .* is inf; it must be .*, or \"inf\""),
    ('{"version": 2, "default": {"staleness": -1}}', "staleness of .* is -1; staleness is -1"),
    ('{"version": 1, "allow_lossy": true}', "it has a field 'allow_lossy', for which \"version\" must be 2"),
    ('{"version": 2, "allow_lossy": 1}', '"allow_lossy" is 1; it must be true or false'),
    ('{"version": 2, "keys": {"w": {"codec": "int8"}}}', "codec of key 'w' is 'int8', with which training differs"),
    ('{"version": 2, "allow_lossy": true, "default": {"codec": "int9"}}', "codec of .* is 'int9'; compression"),
    ('{"version": 2, "allow_lossy": true, "default": {"codec": {"type": "topk", "ratio": 2}}}',
     "; compression topk: ratio is 2"),
    ('{"version": 2, "allow_lossy": true, "default": {"codec": {"down": "dgc"}}}', "codec of .*; value_compression"),
    ('{"version": 1, "keys": {"w": {"servers": []}}}', r"servers of key 'w' is \[\]; it must be a list"),
    ('{"version": 1, "keys": {"w": {"servers": [-1]}}}', r"servers of key 'w' is \[-1\]"),
    ('{"version": 1, "keys": {"w": {"servers": [true]}}}', r"servers of key 'w' is \[True\]"),
    ('{"version": 1, "default": {"slice": 0}}', 'slice of "default" is 0; it must be a whole number from 1'),
    ('{"version": 1, "default": {"slice": 1.5}}', 'slice of "default" is 1.5'),
])  # fmt: skip
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ConfigError, match="the strategy s.json.*" + said):
        strategies.parse(text, "s.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none.json cannot be read: No such file"):
        strategies.load(str(tmp_path / "none.json"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="binary is no text in UTF-8"):
        strategies.load(str(tmp_path / "binary"))


def test_the_entry_of_a_key_goes_before_the_default():
    read = Strategy(Cut((0, 1), 10), {"w": Cut(slice=5), "3": Cut((1,))})
    assert read.of("w") == Cut((0, 1), 5)
    assert read.of(3) == Cut((1,), 10)
    assert read.of("other") == read.default


INT8 = Ways({"type": "int8"}, {"type": "int8"})


def test_what_needs_no_later_version_is_written_as_the_first():
    assert '"version": 1' in Strategy(Cut((0,), 1)).text()
    assert '"version": 2' in Strategy(keys={"w": Cut(codec=Ways())}).text()
    assert '"version": 2' in Strategy(allow_lossy=True).text()


def test_the_script_and_the_strategy_choose_the_same_or_one_of_them_chooses():
    made = Strategy(Cut(codec=INT8), {"w": Cut(codec=Ways()), "v": Cut((0,))}, "s.json")
    assert made.ways("other", Ways()) == made.ways("v", Ways()) == made.ways("v", INT8) == INT8
    assert made.ways("w", Ways()) == Ways()
    assert Strategy().ways("w", INT8) == INT8
    with pytest.raises(ConfigError, match="s.json: the script has .*int8.* for key 'w', and the .* codec none"):
        made.ways("w", INT8)
    assert made.said_of("v") == " (for codec see the strategy s.json)"
    assert made.said_of("w") == Strategy().said_of("w") == ""


def test_staleness_of_the_script_and_of_the_strategy_are_the_same_or_one_of_them_is_open():
    made = Strategy(Cut(staleness=2), {"w": Cut(staleness=0)}, "s.json")
    assert (made.rounds("v", None), made.rounds("v", 2), made.rounds("w", None)) == (2, 2, 0)
    assert (Strategy().rounds("w", None), Strategy().rounds("w", 3)) == (0, 3)
    with pytest.raises(ConfigError, match="s.json: the script has staleness 3 for key 'w', and the strategy 0"):
        made.rounds("w", 3)


def test_workers_are_told_what_is_not_about_servers_and_slices():
    made = Strategy(Cut((0, 1), 10), {"w": Cut((1,), 5, INT8), "v": Cut((0,))}, "s.json", True)
    assert made.choices == Strategy(Cut(), {"w": Cut(codec=INT8)}, "s.json", True)
    assert made.chooses and not made._replace(keys={"v": Cut((0,))}).chooses


def test_a_server_that_the_job_lacks_is_named():
    Strategy(Cut((0, 1)), {"w": Cut((1,))}).require_servers(2)
    with pytest.raises(ConfigError, match="key 'w': server 2 is named, but the job has 2 servers, from 0 to 1.*-s"):
        Strategy(Cut((0, 1)), {"w": Cut((2,))}).require_servers(2)
    with pytest.raises(ConfigError, match="server 1 is named, but the job has 1 server, from 0 to 0"):
        Strategy(Cut((0, 1))).require_servers(1)


def test_a_script_gives_a_path_or_what_a_file_has(tmp_path):
    content = {"version": 1, "default": {"servers": (0, 1)}, "keys": {7: {"slice": 5}}}
    (tmp_path / "s.json").write_text(json.dumps(content))
    expected = Strategy(Cut((0, 1)), {"7": Cut(slice=5)})
    for given_by_script in (content, str(tmp_path / "s.json"), tmp_path / "s.json"):
        assert strategies.given(given_by_script)._replace(path="") == expected
    assert strategies.given(None) is None


@pytest.mark.parametrize("wrong, said", [
    (["s.json"], r"strategy is \['s.json'\]; it must be the path of a file"),
    ({"version": 1, "keys": {"w": {"slice": 1.5}}}, "the strategy in the script: slice of key 'w' is 1.5"),
    ({"version": 1, "keys": {7: {}, "7": {}}}, "the strategy in the script is no JSON: '7' stands twice"),
    ({"version": 1, "keys": object()}, "the strategy in the script is not what a file can have: Object of type object"),
    ("/nowhere/s.json", "the strategy /nowhere/s.json cannot be read"),
])  # fmt: skip
def test_what_a_script_cannot_give_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said):
        strategies.given(wrong)


def test_an_entry_for_a_key_that_is_not_there_is_named():
    made = Strategy(keys={"w": Cut(), "w (P)": Cut(), "7 (rows)": Cut(), "x (y) (R)": Cut()}, path="s.json")
    made.require_keys(["w", 7, "x (y)"])
    with pytest.raises(ConfigError, match=r"s.json has an entry for key 'x \(y\) \(R\)', but the keys are 'w', '7'\. "):
        made.require_keys(["w", 7])
    with pytest.raises(ConfigError, match="the keys are '0', '1', .*, '7' and 92 more. Correct its name, or"):
        made.require_keys(range(100))
    with pytest.raises(ConfigError, match="entry for key 'w', but the keys are none"):
        made.require_keys([])


@given(_cuts, st.dictionaries(st.text(max_size=3), _cuts, max_size=3), st.dictionaries(st.text(max_size=3), _cuts))
def test_two_that_say_the_same_have_one_sha256_and_a_difference_is_named(default, keys, others):
    one, other = Strategy(default, keys, "one"), Strategy(default, dict(reversed(list(others.items()))), "other")
    same = keys == others
    assert (one.difference(other) == "") == (one.sha256 == other.sha256) == same
    if not same:
        assert any(one.difference(other) == "key %r" % name for name in {**keys, **others})
    again = Strategy(default, dict(reversed(list(keys.items()))))
    assert (again.difference(one), again.sha256) == ("", one.sha256)
    assert Strategy(Cut((1, 2, 3), 4), keys).difference(Strategy(Cut((1, 2), 4), keys)) == '"default"'
