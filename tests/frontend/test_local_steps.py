"""Local steps without a framework: fragments, when they are due, and NumPy arrays that are trained so."""

import itertools
import random

import numpy as np
import pytest

pytest.importorskip("p3._core", reason="the extension is not built")
import p3
from p3.codecs import Ways
from p3.frontend.fragments import Schedule, packed
from p3.frontend.local_steps import LocalSteps, Outer, checked_alpha, merged
from p3.settings import Settings


def test_each_fragment_is_due_once_in_every_so_many_steps_and_no_two_at_once():
    for every in range(1, 25):
        for fragments in range(1, every + 1):
            schedule = Schedule.checked(every, fragments, every - 1)
            for step in range(1, 3 * every + 1):
                expected = [one for one in range(fragments) if step % every == one * every // fragments]
                assert [schedule.due(step)] == (expected or [None])
                assert schedule.merged(step + schedule.delay) == schedule.due(step)
            assert schedule.due(0) is None is schedule.due(-every)


def test_fragments_are_stretches_of_layers_the_largest_as_small_as_can_be():
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    for _ in range(500):
        sizes = [source.randint(1, 30) for _ in range(source.randint(1, 8))]
        count = source.randint(1, len(sizes))
        made = packed(sizes, count)
        assert len(made) == count and all(made) and sum(made, []) == list(range(len(sizes))), (seed, sizes, count)
        cuts = itertools.combinations(range(1, len(sizes)), count - 1)
        least = min(max(sum(sizes[one:two]) for one, two in zip((0, *each), (*each, len(sizes)))) for each in cuts)
        assert max(sum(sizes[number] for number in one) for one in made) == least, (seed, sizes, count)


def test_strided_fragments_have_layers_of_all_depths():
    assert packed([5] * 7, 3, strided=True) == [[0, 3, 6], [1, 4], [2, 5]]


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(ValueError, match="fragments is 4, and the model has 3 layers"):
        packed([1, 2, 3], 4)


def test_what_is_not_given_is_as_the_papers_have_it():
    assert Outer.checked(None) == (0.7, 0.9, True)
    assert Outer.checked({"momentum": 0, "lr": 1}).description(True) == {
        "name": "outer_sgd", "momentum": 0.0, "nesterov": False, "multi_precision": False}  # fmt: skip
    assert Outer.checked({"lr": np.float32(0.5), "momentum": np.float64(0.25)})[:2] == (0.5, 0.25)
    assert (checked_alpha(None, 2), checked_alpha(None, 0), checked_alpha(1, 0)) == (0.5, 0.0, 1.0)


def test_a_merge_without_a_share_of_the_local_weight_is_the_value_whatever_that_is():
    local, value = np.float32([np.nan, 1e30, 2]), np.float32([1, -0.0, 4])
    assert merged(local, value, 0.0).tobytes() == value.tobytes()
    assert merged(local, value, 1.0) is local
    assert merged(local, value, 0.25)[2] == 3.5


def test_a_merge_of_equal_weights_changes_none():
    local = np.random.RandomState(0).randn(1000).astype(np.float32)
    assert all(merged(local, local.copy(), one / 64).tobytes() == local.tobytes() for one in range(65))


class OfArrays(LocalSteps):
    """Weights that are NumPy arrays."""

    def __init__(self, session, weights, layers, schedule, outer=Outer(), codec=None, settings=Settings()):
        self.weights = weights
        alpha = checked_alpha(None, schedule.delay)
        super().__init__(session, layers, schedule, outer, alpha, Ways.of(codec), False, settings)
        self.begin()

    def shape_and_type(self, name):
        return self.weights[name].shape, self.weights[name].dtype

    def local(self, name):
        return self.weights[name]

    def merge(self, name, value, alpha):
        np.copyto(self.weights[name], merged(self.weights[name], value, alpha))


def test_weights_are_numpy_arrays_of_any_shape_and_what_was_sent_may_be_written_to_at_once():
    weights = {"a": np.ones((2, 3), np.float32), "b": np.array(2.0), "c": np.zeros(4)}
    with p3.Session.open(Settings()) as session:
        trained = OfArrays(session, weights, [["a"], ["b", "c"]], Schedule(4, 2, 1), Outer(1.0, 0.0, False))
        for step in range(1, 13):
            for one in weights.values():
                one += 1.0
            trained.after_step()
            for one in weights.values():
                one += 0.5
            assert trained.stats()["under_way"] == (1 if step % 2 == 0 else 0)
        assert set(trained.values()) == {"a", "b", "c"}
        for name, one in trained.values().items():
            assert (one != weights[name]).all() and one.shape == weights[name].shape
        trained.take_global()
        assert all((one == weights[name]).all() for name, one in trained.values().items())
        trained.release()


@pytest.mark.parametrize("schedule, under_way", [(Schedule(4, 2, 1), 1), (Schedule(6, 1, 0), 0)])
def test_a_state_fits_fragments_that_are_cut_otherwise(schedule, under_way):
    weights = {name: np.zeros(3, np.float32) for name in "ab"}
    with p3.Session.open(Settings()) as session:
        trained = OfArrays(session, weights, ["a", "b"], Schedule(4, 2, 1))
        for _ in range(6):
            for one in weights.values():
                one += 1.0
            trained.after_step()
        saved = trained.outer_state()
        trained.release()
        other = OfArrays(session, {name: one.copy() for name, one in weights.items()}, ["a", "b"], schedule)
        other.load_outer_state(saved)
        assert (other.stats()["step"], other.stats()["under_way"]) == (6, under_way)
        for name, one in other.values().items():
            assert (one == saved["global"][name]).all()
        other.release()


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_the_priority_of_a_fragment_is_its_deadline(setting):
    weights, pushed = {name: np.zeros(3, np.float32) for name in "abc"}, []
    settings = Settings(priority=setting)
    with p3.Session.open(settings) as session:
        trained = OfArrays(session, weights, ["a", "b", "c"], Schedule(6, 3, 4), settings=settings)
        pushpull = session.pushpull
        session.pushpull = lambda key, sent, landing, priority, *rest: (
            pushed.append((key.name, priority)) or pushpull(key, sent, landing, priority, *rest)
        )
        for _ in range(8):
            trained.after_step()
        session.pushpull = pushpull
        trained.release()
    order = [("b", -6), ("c", -8), ("a", -10), ("b", -12)]
    assert pushed == (order if setting == "auto" else [(name, 0) for name, _ in order])


def test_with_a_codec_nothing_of_a_weight_is_lost_on_the_way():
    """Integers, whose differences int8 keeps to the bit: what is sent, and what is kept, is all there is."""
    source, weights = np.random.RandomState(3), {"w": np.zeros((16, 16), np.float32)}
    with p3.Session.open(Settings()) as session:
        trained = OfArrays(session, weights, ["w"], Schedule(2, 1, 0), Outer(1.0, 0.0, False), {"up": "int8"})
        moved = np.zeros_like(weights["w"])
        for _ in range(20):
            change = source.randint(-1000, 1000, moved.shape)
            weights["w"] += change
            moved += change
            trained.after_step()
        off = np.abs(weights["w"] - moved).max()
        assert 0 < off < 40  # the last encoding's
        for _ in range(6):
            trained.after_step()
        assert np.abs(weights["w"] - moved).max() < off / 100
        trained.release()
