"""Which folder of the core includes which, how many files lie in one, and that what routes knows no kind of key.

A room is a folder of src/; include/p3/ is the ground of all. Those of a worker and of a server have inner rooms.
"""

import re

import pytest
from processes import ROOT

SRC = ROOT / "src"
# From the ground up: each may include what stands before it, but a worker and a server not each other.
ROOMS = [
    "base", "wire", "plan", "numeric", "codec", "rules", "transport", "server", "worker", "binding", "simulator",
    "relay",
]  # fmt: skip
SOURCES = sorted(path for path in SRC.rglob("*") if path.suffix in (".h", ".cc"))
# What routes frames, holds locks, counts and reports, for whatever keys there are.
ROUTING = [path for path in SOURCES if str(path.parent.relative_to(SRC)) in ("worker", "worker/machine", "server")]
# A slice is a header's word for a shard of any key, so it is none of these.
KINDS = {
    "dense", "row", "rows", "sparse", "factor", "factors", "factored", "gather", "gathered", "stale", "staleness",
    "synchronous", "residual", "residuals", "momentum", "dgc", "step", "steps",
}  # fmt: skip


def words(text):
    """Of names and comments alike: of `has_rows` and `DenseShard`, too."""
    return re.findall("[a-z]+", re.sub("([a-z0-9])([A-Z])", r"\1 \2", text).replace("_", " ").lower())


def inclusions():
    """(file, room, the room that it includes), paths below src/."""
    for path in SOURCES:
        for included in re.findall(r'^#include "(\S+)/\w+\.h"$', path.read_text(), re.M):
            if included != "p3":
                yield path.relative_to(SRC), str(path.parent.relative_to(SRC)), included


def named_kinds(text):
    return sorted(KINDS.intersection(words(text)))


def test_a_kind_is_found_in_whatever_names_it():
    assert named_kinds("if (plan.is_synchronous()) make<DenseShard>(kRowsFrames);  // of steps") == [
        "dense", "rows", "steps", "synchronous",
    ]  # fmt: skip
    assert named_kinds("throw Error(header.slice)") == []


@pytest.mark.parametrize("path", ROUTING, ids=[str(path.relative_to(SRC)) for path in ROUTING])
def test_what_routes_names_no_kind_of_key(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [(number, line, named_kinds(line)) for number, line in lines if named_kinds(line)] == []


def test_what_routes_knows_inner_rooms_by_their_doors_alone():
    assert len(ROUTING) > 20
    routing = {path.relative_to(SRC) for path in ROUTING}
    inner = {(str(file), room) for file, _, room in inclusions() if file in routing and re.search("/(ways|disc)", room)}
    assert inner == {("server/registry.cc", "server/discipline"), ("server/shard.h", "server/discipline")}


def test_no_way_includes_another():
    of_worker = {(room, included) for _, room, included in inclusions() if room.startswith("worker/ways/")}
    assert len(of_worker) > 3, "no inclusions are seen"
    assert {pair for pair in of_worker if pair[1].startswith("worker/ways/") and pair[0] != pair[1]} == set()


def test_no_room_includes_one_above_it():
    rooms = {path.relative_to(SRC).parts[0]: set() for path in SOURCES}
    for _, room, included in inclusions():
        rooms[room.split("/")[0]].add(included.split("/")[0])
    assert sorted(rooms) == sorted(ROOMS)
    assert "plan" in rooms["numeric"] and "transport" in rooms["worker"], "no inclusions are seen"
    for room, included in rooms.items():
        assert included <= set(ROOMS[: ROOMS.index(room) + 1]), room
    assert "server" not in rooms["worker"]
    assert not [path for path in (ROOT / "include").rglob("*.h") if re.search('#include "(?!p3/)', path.read_text())]


def test_no_room_is_crowded():
    files = [path.parent for path in SOURCES if path.parent.name != "rules"]  # which has a file for each rule
    assert {str(room.relative_to(SRC)): files.count(room) for room in files if files.count(room) > 15} == {}
