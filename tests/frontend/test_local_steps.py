"""Local steps without a framework: fragments, when they are due, and NumPy arrays that are trained so."""

import itertools
import json
import random
import re
import sys

import forked
import numpy as np
import plugin_jobs as jobs
import pytest
from processes import ROOT

pytest.importorskip("p3._core", reason="the extension is not built")
import p3
from p3.errors import ConfigError
from p3.frontend.local_steps.fragments import Schedule, layers_of, packed
from p3.frontend.local_steps.options import Options, Outer
from p3.frontend.local_steps.shares import OwnNumbers
from p3.frontend.local_steps.value import merged
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


def test_names_alike_up_to_the_last_dot_are_a_layer():
    names = ["scale", "a.0.weight", "a.1.weight", "a.0.bias", "shift"]
    assert layers_of(names) == [["scale"], ["a.0.weight", "a.0.bias"], ["a.1.weight"], ["shift"]]


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(ValueError, match="fragments is 4, and the model has 3 layers"):
        packed([1, 2, 3], 4)


def test_what_is_not_given_is_as_the_papers_have_it():
    assert Outer.checked(None) == (0.7, 0.9, True)
    assert Outer.checked({"momentum": 0, "lr": 1}).description(True) == {
        "name": "outer_sgd", "momentum": 0.0, "nesterov": False, "multi_precision": False}  # fmt: skip
    assert Outer.checked({"lr": np.float32(0.5), "momentum": np.float64(0.25)})[:2] == (0.5, 0.25)
    for delay, given, alpha in ((2, None, 0.5), (0, None, 0.0), (0, 1, 1.0)):
        assert Options.checked(3, 1, delay, given, None, None, False, None).alpha == alpha


def test_a_merge_without_a_share_of_the_local_weight_is_the_value_whatever_that_is():
    local, value = np.float32([np.nan, 1e30, 2]), np.float32([1, -0.0, 4])
    assert merged(local, value, 0.0).tobytes() == value.tobytes()
    assert merged(local, value, 1.0) is local
    assert merged(local, value, 0.25)[2] == 3.5


def test_a_merge_of_equal_weights_changes_none():
    local = np.random.RandomState(0).randn(1000).astype(np.float32)
    assert all(merged(local, local.copy(), one / 64).tobytes() == local.tobytes() for one in range(65))


# Jobs

ON_ONE = {"version": 1, "default": {"servers": [1]}, "keys": {"0.weight": {"slice": 50}}}


def run(workers, *arguments, **variables):
    status, output = jobs.run_p3(workers, 2, jobs.python("local_steps.py", *arguments), **variables)
    assert status == 0, output
    return output


@pytest.mark.parametrize("workers, fragments, every, delay, alpha, momentum, nesterov", [
    (2, "0-1-2", 10, 0, 0, 0.9, 1),  # DiLoCo
    (3, "0-1-2", 10, 0, 0, 0.9, 0),
    (2, "0,1,2", 6, 2, 0.5, 0.9, 1),  # Streaming DiLoCo
    (4, "0,1,2", 10, 7, 0.25, 0.9, 1),
])  # fmt: skip
def test_local_steps_are_those_of_the_papers(workers, fragments, every, delay, alpha, momentum, nesterov):
    given = (200, fragments, every, delay, alpha, 0.7, momentum, nesterov)
    assert run(workers, "follows", *given).count("follows") == workers


@pytest.mark.parametrize("fragments, every, delay, alpha", [("0-1-2", 10, 0, 0), ("0,1,2", 6, 2, 0.5)])
def test_workers_that_die_leave_the_others_to_the_mean_of_who_is_left(fragments, every, delay, alpha):
    given = (100, fragments, every, delay, alpha, 0.7, 0.9, 1, "0:35", "2:71")
    output = run(4, "follows", *given, P3_ON_WORKER_LOSS="continue", P3_CHECK="1")
    assert sorted(re.findall(r"worker (\d) follows", output)) == ["1", "3"], output


@pytest.mark.parametrize("workers, fragments, every, delay, alpha", [
    (2, "0-1-2", 10, 0, 0), (3, "0,1,2", 6, 2, 0.5), (4, "0,1-2", 5, 4, 0.25),
])  # fmt: skip
def test_differences_weigh_as_much_as_the_samples_since_a_fragments_last_exchange(
    workers, fragments, every, delay, alpha
):
    given = (200, fragments, every, delay, alpha, 0.7, 0.9, 1)
    assert run(workers, "follows_weighed", *given).count("follows") == workers


def test_workers_that_die_leave_the_others_to_the_weighed_mean_of_who_is_left():
    given = (100, "0,1,2", 6, 2, 0.5, 0.7, 0.9, 1, "0:35", "2:71")
    output = run(4, "follows_weighed", *given, P3_ON_WORKER_LOSS="continue", P3_CHECK="1")
    assert sorted(re.findall(r"worker (\d) follows", output)) == ["1", "3"], output


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_weighed_mean_is_exact_to_rounding(workers, dtype):
    assert run(workers, "shares", dtype).count("has the mean") == workers


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_equal_weights_change_no_bit(codec):
    output = run(3, "weighs_alike", codec, 0) + run(3, "weighs_alike", codec, 7)
    found = re.findall(r"global (\w+)", output)
    assert len(found) == 6 and len(set(found)) == 1, output


def test_differences_are_kept_until_all_numbers_have_come(tmp_path):
    assert run(2, "numbers_come_late", tmp_path).count("has gone on") == 2


def test_what_is_kept_leaves_before_its_worker_waits_for_others(tmp_path):
    assert run(2, "one_looks", tmp_path, P3_WAIT_TIMEOUT_S="20").count("has gone on") == 2


@pytest.mark.parametrize("way", ["step", "synchronize", "take_global", "state_dict", "barrier", "close"])
def test_who_waits_for_how_much_a_worker_weighs_that_has_taken_fewer_steps_is_told_so(way):
    taken = 6 if way == "step" else 4
    require_told_of_steps(run_to_failure(2, "ends_early", way, 1), taken)


@pytest.mark.parametrize("way", ["step", "synchronize", "global_weights"])
def test_who_waits_for_the_weights_of_a_worker_that_has_taken_fewer_steps_is_told_so(way):
    taken = 6 if way == "step" else 4
    require_told_of_steps(run_to_failure(2, "ends_early", way, 0), taken)


def run_to_failure(workers, *arguments, **variables):
    status, output = jobs.run_p3(workers, 2, jobs.python("local_steps.py", *arguments), **variables)
    assert status != 0, output
    return output


def require_told_of_steps(output, taken):
    """In each error once."""
    said = "(P3_WAIT_TIMEOUT_S). All workers must take the same number of local steps; this one has taken %d" % taken
    assert said in output and said + ". " not in output, output


@pytest.mark.parametrize("way, count", [("one", 1), ("others", 2)])
def test_if_only_some_weigh_all_are_told(way, count):
    _, output = jobs.run_p3(3, 2, jobs.python("local_steps.py", "some_weigh", way), P3_WAIT_TIMEOUT_S="20")
    said = r"refused: worker (\d) .*: weigh\(\) was called by %d of the 3 workers that take an exchange: call it"
    assert sorted(re.findall(said % count, output)) == ["0", "1", "2"], output


def test_with_a_quorum_the_others_go_on_and_what_a_slow_worker_has_learned_counts_later(tmp_path):
    output = run(3, "one_is_slow", tmp_path)
    for worker, late in enumerate((0, 1, 1)):
        assert "worker %d had %d late, took 9 steps and has [30.0]" % (worker, late) in output, output


def test_with_a_quorum_nobody_waits_for_who_has_died_in_a_meeting():
    output = run(3, "one_dies_aside", P3_ON_WORKER_LOSS="continue", P3_WAIT_TIMEOUT_S="30")
    bits = re.findall(r"has met the others: (\w+)", output)
    assert len(bits) == 2 and len(set(bits)) == 1, output


def test_with_a_quorum_no_exchange_waits_for_whose_script_has_ended():
    assert "worker 0 has gone on to [7.0]" in run(3, "two_end", P3_WAIT_TIMEOUT_S="30")


def test_with_a_quorum_a_step_weighs_what_was_said_of_it_and_not_of_one_that_was_left_out(session):
    numbers = OwnNumbers(session, 1)
    numbers.weigh(5, due=0)
    numbers.leave_out()
    numbers.weigh(3, due=0)
    numbers.end_step(due=0)
    assert numbers.factor(0, waits=False) == 3


def test_with_a_quorum_all_save_the_same_state_and_nobody_that_of_later_rounds():
    found = re.findall(r"worker \d: (global \w+ momentum \w+)", run(2, "saves_at_own_speed"))
    assert len(found) == 2 and len(set(found)) == 1, found


def test_an_exchange_behind_each_step_is_training_on_averaged_weights():
    assert run(3, "averaged").count("averages") == 3


@pytest.mark.parametrize("every, fragments", [(1, 1), (5, 3)])
def test_one_worker_is_its_own_optimizer_to_the_bit(every, fragments):
    assert run(1, "alone", every, fragments).count("is alone") == 1


@pytest.mark.parametrize("codec, delay", [("none", 0), ("none", 4), ("int4", 4)])
def test_all_workers_have_the_same_global_bits_and_each_its_own_local_ones(codec, delay):
    output = run(3, "has_same_bits", codec, delay, P3_CHECK="1")
    found = re.findall(r"local (\w+) global (\w+)", output)
    assert len(found) == 3 and len({of_all for _, of_all in found}) == 1, output
    assert len({local for local, _ in found}) == 3, output
    for what in ("first", "broadcast"):
        said = re.findall(what + r" (\w+)", output)
        assert len(said) == 3 and len(set(said)) == 1, output


def test_with_a_codec_it_learns_as_much():
    assert run(2, "learns", "int4").count("has learned as much") == 2


@pytest.mark.parametrize("codec", ["none", "bf16", "weighed"])
@pytest.mark.parametrize("saved_at", [0, 8])
def test_a_loaded_state_takes_the_same_steps(codec, saved_at):
    assert run(2, "loads", codec, saved_at).count("goes on") == 2


@pytest.mark.parametrize("quorum", [(), (1, 0)])
def test_who_dies_while_it_gives_what_was_loaded_leaves_the_others_with_all_of_it(tmp_path, quorum):
    output = run(3, "loads_of_the_dead", tmp_path, *quorum, P3_ON_WORKER_LOSS="continue", P3_WAIT_TIMEOUT_S="20")
    bits = re.findall(r"worker [12] goes on with (\w+)", output)
    assert len(bits) == 2 and len(set(bits)) == 1, output


@pytest.mark.parametrize("codec", ["none", "int4", "weighed"])
def test_a_job_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path, codec):
    whole = run(2, "resumed", tmp_path, codec, 17, 0)
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--restarts", "1"]
    command = jobs.python("local_steps.py", "resumed", tmp_path, codec, 17, 9)
    status, output = jobs.run([*launcher, *command], timeout_s=100, P3_SNAPSHOT_EVERY="4",
                              P3_SNAPSHOT_DIR=str(tmp_path / "snapshots"))  # fmt: skip
    assert status == 0, output
    assert "began at 8" in output
    expected, found = (sorted(re.findall(r"has (\w+ of \w+)", one)) for one in (whole, output))
    assert len(found) == 2 and found == expected


def test_a_job_resumes_with_another_number_of_workers(tmp_path):
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "4"}
    run(2, "resumed", tmp_path, "none", 9, 0, **variables)
    output = run(3, "resumed", tmp_path, "none", 17, 0, **variables)
    assert output.count("began at 8") == 3
    assert len(set(re.findall(r"has (\w+) of", output))) == 1 and len(set(re.findall(r" of (\w{8})", output))) == 3


def test_servers_hold_what_a_strategy_says_and_bits_stay(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(ON_ONE))
    usual, placed = run(2, "placed"), run(2, "placed", json.dumps(ON_ONE), json.dumps(str(tmp_path / "s.json")))
    assert len(set(re.findall(r"worker \d: (\w+)", usual + placed))) == 1, usual + placed
    assert re.findall(r"held \[(\d+),", usual)[0] != "0"
    assert set(re.findall(r"held \[(\d+),", placed)) == {"0"}, placed


@pytest.mark.parametrize("given", [("null", json.dumps({"version": 1})), (json.dumps({"version": 1}), "null")])
def test_workers_that_give_other_strategies_are_named_on_all(given):
    status, output = jobs.run_p3(2, 2, jobs.python("local_steps.py", "placed", *given))
    assert status != 0
    for rank in (0, 1):
        said = "".join(line for line in output.splitlines() if line.startswith("[worker %d]" % rank))
        text = "worker 0 (127.0.0.1) and worker 1 (127.0.0.1) disagree about the strategy of store 0"
        assert text in said, output


@pytest.mark.parametrize("workers", [1, 2])
def test_the_example_learns(workers):
    command = forked.command(str(ROOT / "examples" / "numpy" / "local_steps.py"))
    status, output = jobs.run_p3(workers, 2, command) if workers > 1 else jobs.run(command)
    assert status == 0, output
    errors = re.findall(r"worker \d of \d: error ([\d.]+)", output)
    assert len(errors) == workers and len(set(errors)) == 1 and float(errors[0]) < 0.02, output


# One worker, in this process


@pytest.fixture
def session():
    with p3.Session.open(Settings()) as opened:
        yield opened


def test_arrays_of_any_shape_come_back_as_their_own_and_what_the_script_has_is_never_written_to(session):
    given = {"a": np.ones((2, 3), np.float32), "b": np.array(2.0), "c": np.zeros(4), "none": np.zeros((0, 2))}
    steps = p3.LocalSteps(session, given, every=4, fragments=3, delay=1, outer={"lr": 1.0, "momentum": 0.0})
    seen = []
    arrays = steps.arrays
    assert arrays.keys() == given.keys() and arrays["none"] is given["none"]
    for _ in range(12):
        moved = {name: one + 1 for name, one in arrays.items()}
        seen += [(one, one.copy()) for one in (*moved.values(), *given.values())]
        arrays = steps.step(moved)
        seen += [(one, one.copy()) for one in arrays.values()]
        for name, one in given.items():
            assert (arrays[name].shape, arrays[name].dtype) == (one.shape, one.dtype)
            assert arrays[name] is moved[name] or not np.shares_memory(arrays[name], moved[name])
    steps.load_state_dict(steps.state_dict())
    assert steps.stats()["merges"] == 3 * 3 - 1  # the last one is under way
    assert steps.take_global().keys() == given.keys()
    assert all(np.array_equal(one, before) for one, before in seen)
    steps.release()


def test_arrays_may_be_written_to_in_place_between_steps(session):
    steps = p3.LocalSteps(session, {"w": np.zeros(3)}, every=3, delay=1, outer={"lr": 1.0, "momentum": 0.0}, alpha=0)
    arrays = steps.arrays
    for _ in range(7):
        arrays["w"] += 1.0
        arrays = steps.step(arrays)
    assert arrays["w"].tolist() == [5.0] * 3  # the 3 of step 3 came behind step 4, and the 5 of step 6 behind step 7
    steps.release()


class OfDlpack:
    """An array that says no more of itself than DLPack has it."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **given):
        return self._array.__dlpack__(**given)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_arrays_of_others_are_read_by_dlpack(session):
    steps = p3.LocalSteps(session, {"w": OfDlpack(np.ones(3))}, every=1, outer={"lr": 1.0, "momentum": 0.0})
    assert steps.step({"w": OfDlpack(np.arange(3.0))})["w"].tolist() == [0, 1, 2]
    steps.release()


def test_half_precision_has_a_global_value_of_float32(session):
    steps = p3.LocalSteps(session, {"w": np.ones(4, np.float16)}, every=1, outer={"lr": 1 / 1024, "momentum": 0})
    arrays = steps.step({"w": np.full(4, 1.25, np.float16)})
    assert arrays["w"].dtype == np.float16 and (arrays["w"] == 1).all()
    of_all = steps.state_dict()["global"]["w"]
    assert of_all.dtype == np.float32 and (of_all == np.float32(1 + 0.25 / 1024)).all()
    steps.release()


@pytest.mark.parametrize("given, problem", [
    ({"every": 0}, "every is 0; it must be at least 1"),
    ({"every": 4, "fragments": 3}, "fragments is 3, and the model has 2 layers"),
    ({"codec": "dgc"}, "local steps and dgc exclude each other"),
    ({"codec": "lowrank"}, 'local steps and lowrank exclude each other: .*Take "topk" or "int4" as codec'),
    ({"staleness": 2}, "local steps and staleness .staleness=2. exclude each other: .*larger delay"),
    ({"compression": "int8"}, "compression='int8': give it as codec"),
    ({"arrays": {"n": np.arange(3)}}, "n has the type int64; weights of float16, bfloat16, float32, float64"),
    ({"arrays": {}}, "fragments is 1, and the model has 0 layers"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_do(session, given, problem):
    given = {"arrays": {"a.w": np.zeros(3), "a.b": np.zeros(1), "b": np.zeros(2)}, "every": 4, **given}
    with pytest.raises(ValueError, match=problem):
        p3.LocalSteps(session, **given)
    assert session.new_store() == 0  # and nothing is left


def test_a_strategy_cuts_the_weights_and_has_entries_for_them_alone(session):
    first = {"v": np.ones(9, np.float32), "w": np.ones((2, 3), np.float32)}
    wrong, right = ({"version": 1, "default": {"slice": 4}, "keys": {name: {"slice": 2}}} for name in ("x", "w"))
    steps = p3.LocalSteps(session, first, every=1, strategy=right)
    cut = {name: agreed.plan.slice_elements for (_, name), agreed in session.keys.agreed.items()}
    assert cut == {"v": 4, "w": 2, "numbers": 4, "schedule": 4, "digests": 4, "samples": 4}
    for given, problem in (
        (wrong, "the strategy in the script has an entry for key 'x', but the keys are 'v', 'w'"),
        ({"version": 1, "default": {"servers": [1]}}, "server 1 is named, but the job has 1 server"),
        ("/nowhere/s.json", "/nowhere/s.json cannot be read"),
    ):
        with pytest.raises(ConfigError, match=problem):
            p3.LocalSteps(session, first, every=1, strategy=given)
    steps.release()
    assert session.new_store() == 0  # and nothing is left


def test_an_argument_that_there_is_not_is_a_type_error(session):
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        p3.LocalSteps(session, {"w": np.zeros(3)}, every=3, evry=3)


@pytest.mark.parametrize("arrays, problem", [
    ({"v": np.zeros(3)}, "v is in one only of what it was made of and what it is given"),
    ({}, "w is in one only"),
    ({"w": np.zeros(2)}, r"w has the shape \(2,\) and the type float64, and had \(3,\) and float64"),
    ({"w": np.zeros(3, np.float32)}, "the type float32, and had"),
])  # fmt: skip
def test_other_arrays_than_before_are_refused_and_are_no_step(session, arrays, problem):
    steps = p3.LocalSteps(session, {"w": np.ones(3)}, every=1)
    for call in (steps.step, steps.broadcast):
        with pytest.raises(ValueError, match=problem):
            call(arrays)
    assert steps.stats()["step"] == 0 and steps.arrays["w"].tolist() == [1, 1, 1]
    steps.release()


def test_a_state_of_another_model_is_refused_before_anything_is_loaded(session):
    steps, other = (p3.LocalSteps(session, {name: np.ones(3)}, every=2) for name in "wv")
    steps.step(steps.arrays)
    state = steps.state_dict()
    for wrong, problem in (
        (other.state_dict(), "of another model: v is in one of them only"),
        ({**state, "global": {"w": np.ones(2)}}, r"of another model: there w has the shape \(2,\), here \(3,\)"),
    ):
        with pytest.raises(ValueError, match=problem):
            steps.load_state_dict(wrong)
    assert steps.stats()["step"] == 1
    steps.load_state_dict(state)


@pytest.mark.parametrize("given, under_way", [
    ({"every": 4, "fragments": 2, "delay": 1}, 1), ({"every": 6, "fragments": 1, "delay": 0}, 0),
])  # fmt: skip
def test_a_state_fits_fragments_that_are_cut_otherwise(session, given, under_way):
    steps = p3.LocalSteps(session, {name: np.zeros(3, np.float32) for name in "ab"}, every=4, fragments=2, delay=1)
    arrays = steps.arrays
    for _ in range(6):
        arrays = steps.step({name: one + 1 for name, one in arrays.items()})
    saved = steps.state_dict()
    steps.release()
    other = p3.LocalSteps(session, arrays, **given)
    other.load_state_dict(saved)
    assert (other.stats()["step"], other.stats()["under_way"]) == (6, under_way)
    for name, one in other.global_weights().items():
        assert (one == saved["global"][name]).all()
    other.release()


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_the_priority_of_a_fragment_is_its_deadline(monkeypatch, setting):
    monkeypatch.setenv("P3_PRIORITY", setting)
    with p3.Session.open() as session:
        pushed, pushpull = [], session.pushpull
        arrays = {name: np.zeros(3, np.float32) for name in "abc"}
        steps = p3.LocalSteps(session, arrays, every=6, fragments=3, delay=4)
        session.pushpull = lambda key, sent, landing, priority, *rest: (
            pushed.append((key.name, priority)) or pushpull(key, sent, landing, priority, *rest)
        )
        for _ in range(8):
            arrays = steps.step(arrays)
        session.pushpull = pushpull
        steps.release()
    pushed = [one for one in pushed if one[0] != "samples"]
    order = [("b", -6), ("c", -8), ("a", -10), ("b", -12)]
    assert pushed == (order if setting == "auto" else [(name, 0) for name, _ in order])


def test_with_a_codec_nothing_of_a_weight_is_lost_on_the_way(session):
    """Integers, whose differences int8 keeps to the bit: what is sent, and what is kept, is all there is."""
    source, arrays = np.random.RandomState(3), {"w": np.zeros((16, 16), np.float32)}
    steps = p3.LocalSteps(session, arrays, every=2, outer={"lr": 1.0, "momentum": 0.0}, codec={"up": "int8"})
    moved = np.zeros_like(arrays["w"])
    for _ in range(20):
        change = source.randint(-1000, 1000, moved.shape)
        moved += change
        arrays = steps.step({"w": arrays["w"] + change.astype(np.float32)})
    off = np.abs(arrays["w"] - moved).max()
    assert 0 < off < 40  # the last encoding's
    for _ in range(6):
        arrays = steps.step(arrays)
    assert np.abs(arrays["w"] - moved).max() < off / 100
    steps.release()


@pytest.mark.parametrize("how", ["broadcast", "load"])
def test_what_compression_has_left_out_of_weights_goes_with_them(session, how):
    steps = p3.LocalSteps(session, {"w": np.zeros((16, 16), np.float32)}, every=1, codec={"up": "int8"})
    state = steps.state_dict()
    steps.step({"w": np.random.RandomState(3).randint(-1000, 1000, (16, 16)).astype(np.float32)})
    zeros = {"w": np.zeros((16, 16), np.float32)}
    if how == "broadcast":
        steps.load_state_dict(state)  # as momentum stays
        steps.broadcast(zeros)
    else:
        steps.load_state_dict(state)
    for _ in range(3):
        arrays = steps.step(zeros)
        assert not arrays["w"].any()
    steps.release()


def test_what_half_precision_cannot_show_of_a_global_weight_is_not_sent_back(session):
    """Else each exchange would take back what is smaller than its rounding."""
    steps = p3.LocalSteps(session, {"w": np.ones(4, np.float16)}, every=1, outer={"lr": 0.25, "momentum": 0})
    arrays = steps.step({"w": np.full(4, 1 + 2**-10, np.float16)})
    before = steps.state_dict()["global"]["w"]
    assert (before == 1 + 2**-12).all() and (arrays["w"] == 1).all()
    steps.step(arrays)  # nobody has trained
    assert np.array_equal(steps.state_dict()["global"]["w"], before)
    steps.step({"w": np.full(4, 1 + 2**-10, np.float16)})
    assert (steps.state_dict()["global"]["w"] == 1 + 2**-11).all()
    steps.release()


def test_a_state_of_another_precision_is_taken(session):
    double = p3.LocalSteps(session, {"w": np.ones(3)}, every=1)
    double.step({"w": np.zeros(3)})
    state = double.state_dict()
    double.release()
    steps = p3.LocalSteps(session, {"w": np.ones(3, np.float32)}, every=1)
    steps.load_state_dict(state)
    for part in ("global", "momentum"):
        assert np.array_equal(steps.state_dict()[part]["w"], state[part]["w"].astype(np.float32))
    with pytest.raises(ValueError, match="of another model: v is in one of them only"):
        steps.load_state_dict({**state, "momentum": {"v": np.ones(3)}})
    steps.release()


def test_workers_whose_weights_have_another_order_are_told_so():
    """They would cut other fragments."""
    said = run(2, "ordered")
    assert said.count("refused") == 2
    assert said.count("given weights of other names than worker 0, or in another order") == 1
