"""What becomes of the others' rounds in join(), whatever order they land in."""

import types

import pytest

pytest.importorskip("p3._core", reason="the extension is not built")
from p3.frontend import serving


class Rounds:
    """Of a key, or of a norm: whether another worker takes part in each, up to the first that must be left alone."""

    declared = None

    def __init__(self, name, *pushed):
        self.name, self.pushed = name, [*pushed, False]

    def skip(self, landed, token):
        landed.append((token, self.pushed.pop(0)))


class Served(serving.Served):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.told = []

    def landed(self, key):
        self.told.append("landed " + key.name)

    def follow(self, key):
        self.told.append(key.name)

    def end_step(self, is_changed):
        self.told.append("step" if is_changed else "no step")

    def take_last(self, key):
        self.told.append("last " + key.name)


def served(monkeypatch, *stores):
    """What each store was told, where the last round that has begun lands first."""
    landed, joins = [], types.SimpleNamespace(begin=lambda: None, end=lambda: None)
    monkeypatch.setattr(serving, "Completions", lambda: landed)
    monkeypatch.setattr(serving.waiting, "next_of", lambda _session, _completions: landed.pop())
    serving.serve_others(types.SimpleNamespace(joins=joins), stores, lambda: None)
    assert landed == []
    return [store.told for store in stores]


def test_each_key_ends_by_itself(monkeypatch):
    keys = Rounds("a", True), Rounds("b", True, True)
    b = ["landed b", "b", "landed b", "b", "last b"]
    assert served(monkeypatch, Served(keys)) == [[*b, "landed a", "a", "last a"]]


def test_keys_of_a_step_are_followed_in_their_order(monkeypatch):
    a, b, other = Rounds("a", True, True), Rounds("b", True, True), Rounds("other")
    step = ["landed b", "landed a", "a", "b", "step"]
    assert served(monkeypatch, Served([a, b, other], [a, b])) == [["last other", *step, *step, "last b", "last a"]]


def test_the_norm_tells_the_end_and_not_a_step_without_gradients(monkeypatch):
    with_norm = Served([Rounds("a", False, True), Rounds("b", False, False)], (), Rounds("norm", True, True))
    others = Served([Rounds("c", True)])
    told = ["no step", "landed a", "a", "step", "no step"]
    assert served(monkeypatch, with_norm, others) == [told, ["landed c", "c", "last c"]]
