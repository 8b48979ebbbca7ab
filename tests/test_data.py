"""p3.shard and p3.SplitSampler: what each worker gets of the data."""

import itertools
import random
import re
import sys
from collections import Counter

import numpy as np
import plugin_jobs as jobs
import pytest

import p3
from p3.settings import Settings

LENGTHS, WORKERS = range(51), range(1, 8)


def epoch_of_all(length, workers, **options):
    """The indices of each worker in its first epoch."""
    return [list(p3.SplitSampler(length, rank, workers, **options)) for rank in range(workers)]


def in_turn(parts):
    """The samples in their common order, of which the workers took turns."""
    return [part[turn] for turn in range(max(map(len, parts))) for part in parts if turn < len(part)]


@pytest.fixture
def no_job(monkeypatch):
    """No variable of a job and no session in this process; returns monkeypatch, to set some."""
    for name in ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "P3_RANK"):
        monkeypatch.delenv(name, raising=False)
    sessions = sys.modules.get("p3.worker.open_sessions")
    if sessions is not None:
        monkeypatch.setattr(sessions, "_current", None)
        monkeypatch.setattr(sessions, "_open", [])
    return monkeypatch


# Parts of an epoch


@pytest.mark.parametrize("shuffle", [True, False])
def test_padded_parts_are_equal_and_repeat_the_start_of_the_order(shuffle):
    for length in LENGTHS:
        order = in_turn(epoch_of_all(length, 1, shuffle=shuffle))
        assert sorted(order) == list(range(length))
        for workers in WORKERS:
            parts = epoch_of_all(length, workers, shuffle=shuffle)
            each = -(-length // workers)
            assert [len(part) for part in parts] == [each] * workers, (length, workers)
            missing = each * workers - length
            assert in_turn(parts) == order + (order * workers)[:missing], (length, workers)


def test_dropped_are_the_last_of_the_order():
    for length in LENGTHS:
        order = in_turn(epoch_of_all(length, 1))
        for workers in WORKERS:
            parts = epoch_of_all(length, workers, even="drop")
            assert [len(part) for part in parts] == [length // workers] * workers, (length, workers)
            assert in_turn(parts) == order[: length // workers * workers], (length, workers)


def test_uneven_parts_hold_every_sample_once():
    for length in LENGTHS:
        order = in_turn(epoch_of_all(length, 1))
        for workers in WORKERS:
            parts = epoch_of_all(length, workers, even=None)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1, (length, workers)
            assert in_turn(parts) == order, (length, workers)


def test_length_of_a_sampler_is_the_number_of_its_samples():
    for length in LENGTHS:
        for workers in WORKERS:
            for even in ("pad", "drop", None):
                for rank in range(workers):
                    sampler = p3.SplitSampler(length, rank, workers, even)
                    assert len(sampler) == len(list(sampler)), (length, workers, even, rank)


def test_workers_together_see_the_batches_of_one_process():
    whole = list(p3.SplitSampler(48, 0, 1))
    parts = epoch_of_all(48, 3)
    for step in range(4):
        joined = [sample for part in parts for sample in part[4 * step : 4 * step + 4]]
        assert set(joined) == set(whole[12 * step : 12 * step + 12])


# Epochs


def test_order_is_the_same_in_every_run_but_new_in_every_epoch():
    sampler = p3.SplitSampler(50, 1, 3)
    epochs = [list(sampler) for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = p3.SplitSampler(50, 1, 3)
    assert [list(again) for _ in range(4)] == epochs
    assert list(p3.SplitSampler(50, 1, 3, seed=1)) not in epochs


def test_order_is_the_same_with_every_version_of_numpy():
    sampler = p3.SplitSampler(10, 0, 1, seed=7)
    assert [list(sampler), list(sampler)] == [[0, 1, 5, 7, 6, 9, 4, 3, 2, 8], [9, 8, 5, 6, 2, 3, 7, 0, 1, 4]]


def test_parts_are_disjoint_in_later_epochs_too():
    samplers = [p3.SplitSampler(21, rank, 3) for rank in range(3)]
    for _ in range(5):
        assert sorted(index for sampler in samplers for index in sampler) == list(range(21))


def test_set_epoch_resumes():
    sampler = p3.SplitSampler(50, 1, 3)
    epochs = [list(sampler) for _ in range(4)]
    resumed = p3.SplitSampler(50, 1, 3)
    resumed.set_epoch(2)
    assert [list(resumed), list(resumed)] == epochs[2:]


def test_without_shuffling_every_epoch_is_in_the_order_of_the_data():
    sampler = p3.SplitSampler(7, 1, 2, shuffle=False)
    assert [list(sampler), list(sampler)] == [[1, 3, 5, 0]] * 2


# A place in an epoch, and other numbers of workers


def run_of_starts(choice, length, even, starts=3):
    """(samples of the epoch as they were taken, [(workers, samples left at its beginning)]) of a job that is cut short
    behind a step and started again with another number of workers, and with other batches."""
    state, taken_by_all, history = None, [], []
    for start in range(starts):
        workers, batch = choice.randrange(1, 7), choice.randrange(1, 6)
        samplers = [p3.SplitSampler(length, rank, workers, even, seed=3) for rank in range(workers)]
        for sampler in samplers if state else ():
            sampler.load_state_dict(state)
        if state and state["epoch"] > 0:
            break  # the epoch was over
        history.append((workers, length - len(taken_by_all)))
        steps = -(-len(samplers[0]) // batch)
        iterators = list(map(iter, samplers))
        for step in range(choice.randrange(steps + 1) if start < starts - 1 else steps):
            taken_by_all += in_turn([list(itertools.islice(iterator, batch)) for iterator in iterators])
            states = [sampler.state_dict((step + 1) * batch) for sampler in samplers]
            assert states == states[:1] * workers
            state = states[0]
    return taken_by_all, history


@pytest.mark.parametrize("even", ["pad", "drop", None])
def test_no_sample_is_skipped_or_repeated_in_an_epoch_by_other_numbers_of_workers(even):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    choice = random.Random(seed)
    for _ in range(500):
        length = choice.randrange(1, 60)
        order = list(p3.SplitSampler(length, 0, 1, seed=3))
        taken, history = run_of_starts(choice, length, even)
        workers, left = history[-1]
        if even == "drop":
            assert taken == order[: length - left + left // workers * workers], (length, history)
        else:
            assert taken[:length] == order, (length, history)
            assert len(taken) - length == (-left % workers if even == "pad" else 0), (length, history)


def test_a_resumed_epoch_with_as_many_workers_goes_on_with_the_same_batches():
    whole = list(p3.SplitSampler(50, 1, 3))
    sampler = p3.SplitSampler(50, 1, 3)
    assert list(itertools.islice(sampler, 4)) == whole[:4]
    resumed = p3.SplitSampler(50, 1, 3)
    resumed.load_state_dict(sampler.state_dict(4))
    assert len(resumed) == len(whole) - 4 and list(resumed) == whole[4:]
    assert list(resumed) == list(sampler)  # the next epoch


@pytest.mark.parametrize("even", [None, "pad"])
def test_those_who_are_left_share_the_rest_of_an_epoch_and_the_next_ones(even):
    for length, taken in [(0, 0), (1, 0), (50, 3), (50, 7), (51, 12), (52, 13)]:
        samplers = [p3.SplitSampler(length, rank, 4, even=even) for rank in range(4)]
        parts = [list(sampler) for sampler in samplers]
        left = [samplers[rank] for rank in (0, 2, 3)]
        seen = [sample for part in parts for sample in part[:taken]]
        for sampler in left:
            state = sampler.state_dict(taken)  # of the iteration that four have begun, whenever it is asked for
            sampler.share_among([0, 2, 3])
            assert sampler.state_dict(taken) == state
            sampler.load_state_dict(state)
        if state["epoch"] == 0:
            seen += [sample for sampler in left for sample in sampler]
            assert set(seen) == set(range(length)) and (even or len(seen) == length), (length, taken)
        next_epoch = [list(sampler) for sampler in left]
        assert in_turn(next_epoch)[:length] == list(one_epoch(length, 1)), length


def one_epoch(length, epoch):
    sampler = p3.SplitSampler(length, 0, 1)
    sampler.set_epoch(epoch)
    return sampler


def test_who_is_no_member_gets_no_share():
    for members in ([0, 2], [0, 1, 1], []):
        with pytest.raises(ValueError, match="this worker has rank 1, and the members are"):
            p3.SplitSampler(10, 1, 3).share_among(members)
    with pytest.raises(ValueError, match="a rank must be a whole number"):
        p3.SplitSampler(10, 1, 3).share_among(["1"])


def test_set_epoch_of_the_resumed_epoch_keeps_its_place_and_of_another_one_does_not():
    sampler = p3.SplitSampler(50, 1, 3)
    iter(sampler)
    for epoch, length in ((0, 17 - 4), (1, 17)):
        resumed = p3.SplitSampler(50, 1, 3)
        resumed.load_state_dict(sampler.state_dict(4))
        resumed.set_epoch(epoch)
        assert len(resumed) == length


def test_a_state_is_of_the_last_iteration_and_at_its_end_the_next_epochs_beginning():
    sampler = p3.SplitSampler(50, 1, 3)
    assert sampler.state_dict(0)["epoch"] == sampler.state_dict(0)["consumed"] == 0
    with pytest.raises(ValueError, match="taken is 4, but no iteration has begun"):
        sampler.state_dict(4)
    iter(sampler), iter(sampler)
    assert (sampler.state_dict(16)["epoch"], sampler.state_dict(16)["consumed"]) == (1, 48)
    assert (sampler.state_dict(17)["epoch"], sampler.state_dict(17)["consumed"]) == (2, 0)
    # The last batch is short, and all count it as a whole one.
    assert sampler.state_dict(20) == sampler.state_dict(17)


@pytest.mark.parametrize(
    "other, message",
    [
        (dict(length=51), "the state has length=50, and this sampler 51"),
        (dict(seed=1), "the state has seed=0, and this sampler 1"),
        (dict(shuffle=False), "the state has shuffle=True, and this sampler False"),
    ],
)
def test_a_state_of_another_order_is_refused(other, message):
    state = p3.SplitSampler(50, 0, 2).state_dict(0)
    with pytest.raises(ValueError, match=message):
        p3.SplitSampler(**{"length": 50, "rank": 0, "num_workers": 2, **other}).load_state_dict(state)


def test_a_state_beyond_the_data_is_refused():
    sampler = p3.SplitSampler(50, 0, 2)
    with pytest.raises(ValueError, match="consumed must be a whole number from 0 to 49, not 50"):
        sampler.load_state_dict({**sampler.state_dict(0), "consumed": 50})


# Parts of data


def test_parts_of_a_sequence():
    for length in LENGTHS:
        data = [index * 10 for index in range(length)]
        for workers in WORKERS:
            for even in ("pad", "drop", None):
                for rank in range(workers):
                    indices = p3.SplitSampler(length, rank, workers, even, shuffle=False)
                    part = p3.shard(data, rank, workers, even)
                    assert list(part) == [index * 10 for index in indices], (length, workers, even, rank)
                    assert len(part) == len(indices)


def test_part_is_read_like_a_list():
    part = p3.shard("abcdefg", 1, 3)
    assert (part[0], part[-1], part[1:], list(reversed(part))) == ("b", "a", ["e", "a"], ["a", "e", "b"])
    for index in (3, -4):
        with pytest.raises(IndexError):
            part[index]


def test_part_of_an_array_is_a_view_that_numpy_can_copy():
    array = np.arange(12.0).reshape(6, 2)
    part = p3.shard(array, 1, 3)
    assert np.asarray(part).tolist() == [[2, 3], [8, 9]]
    array[1] = -1
    assert part[0].tolist() == [-1, -1]


# Who we are


def test_alone_there_is_one_part(no_job):
    assert list(p3.shard("abc")) == ["a", "b", "c"]
    assert sorted(p3.SplitSampler(3)) == [0, 1, 2]


def test_open_session_is_asked_first(no_job):
    pytest.importorskip("p3._core", reason="the extension is not built")
    no_job.setenv("DMLC_ROLE", "worker")
    no_job.setenv("DMLC_NUM_WORKER", "3")
    no_job.setenv("P3_RANK", "2")
    with p3.Session.open(Settings()):  # embedded: rank 0 of 1
        assert list(p3.shard("abc")) == ["a", "b", "c"]
    assert list(p3.shard("abc")) == ["c"]


def test_rank_and_workers_of_the_environment_and_of_the_caller(no_job):
    no_job.setenv("DMLC_ROLE", "worker")
    no_job.setenv("DMLC_NUM_WORKER", "3")
    assert list(p3.shard("abc", rank=1)) == ["b"]
    no_job.setenv("P3_RANK", "2")
    assert list(p3.shard("abc")) == ["c"]
    assert list(p3.shard("abc", rank=0)) == ["a"]
    assert list(p3.shard("abcd", num_workers=4)) == ["c"]


def test_only_worker_needs_no_rank(no_job):
    no_job.setenv("DMLC_ROLE", "worker")
    no_job.setenv("DMLC_NUM_WORKER", "1")
    assert list(p3.shard("abc")) == ["a", "b", "c"]


@pytest.mark.parametrize("share_out", [p3.shard, lambda data: p3.SplitSampler(len(data))])
def test_rank_that_is_not_known_yet_is_an_error_that_says_what_to_do(no_job, share_out):
    no_job.setenv("DMLC_ROLE", "worker")
    no_job.setenv("DMLC_NUM_WORKER", "3")
    with pytest.raises(ValueError, match="one of 3, is not known yet: join the job first, with mx.kv.create"):
        share_out("abc")


# Wrong use


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((5, 3, 3), "rank 3 must be below num_workers, which is 3"),
        ((5, -1, 3), "rank must be a whole number from 0, not -1"),
        ((5, 0, 0), "num_workers is 0"),
        ((5, 0, 2.0), "num_workers must be a whole number from 0, not 2.0"),
        ((-1, 0, 2), "length must be a whole number from 0, not -1"),
        (("abc", 0, 2), "length must be a whole number from 0, not 'abc'"),
        ((5, 0, 2, "padded"), "even is 'pad', 'drop' or None, not 'padded'"),
        ((5, 0, 2, "pad", True, -1), "seed must be a whole number from 0 to 4294967295, not -1"),
    ],
)
def test_wrong_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        p3.SplitSampler(*arguments)


@pytest.mark.parametrize("data", [iter("abc"), {1: 2}, {1, 2}, 5])
def test_what_has_no_numbered_items_cannot_be_shared_out(data):
    with pytest.raises(ValueError, match="a %s cannot be shared out" % type(data).__name__):
        p3.shard(data, 0, 2)


def test_wrong_epoch_is_named():
    with pytest.raises(ValueError, match="epoch must be a whole number from 0 to 4294967295, not -1"):
        p3.SplitSampler(5, 0, 2).set_epoch(-1)


# With MXNet and without


def test_without_mxnet_data_is_shared_out_alike():
    code = (
        "import sys; sys.modules['mxnet'] = None\n"
        "import p3; print(list(p3.shard('abcde', 1, 2)), list(p3.SplitSampler(5, 1, 2)))"
    )
    status, output = jobs.run([sys.executable, "-c", code])
    assert status == 0, output
    assert output.strip() == "%s %s" % (["b", "d", "a"], list(p3.SplitSampler(5, 1, 2)))


def test_part_of_a_dataset_is_a_dataset():
    gluon = pytest.importorskip("mxnet").gluon
    dataset = gluon.data.ArrayDataset(np.arange(5), np.arange(5) * 2)
    part = p3.shard(dataset, 1, 2)
    assert isinstance(part, gluon.data.Dataset)
    assert list(part.transform_first(lambda value: value + 100)) == [(101, 2), (103, 6), (100, 0)]


@pytest.mark.parametrize("processes", [0, 2])
def test_data_loader_takes_the_samplers_order_of_each_epoch(processes):
    gluon = pytest.importorskip("mxnet").gluon
    sampler = p3.SplitSampler(23, 1, 3)
    assert isinstance(sampler, gluon.data.Sampler)
    data = gluon.data.ArrayDataset(np.arange(23, dtype="float32"))
    loader = gluon.data.DataLoader(data, 3, sampler=sampler, num_workers=processes, timeout=60)
    assert len(loader) == 3
    expected = p3.SplitSampler(23, 1, 3)
    for _ in range(2):
        assert [int(value) for batch in loader for value in batch.asnumpy()] == list(expected)


@pytest.mark.parametrize("processes", [0, 2])
def test_data_loader_reads_a_part(processes):
    gluon = pytest.importorskip("mxnet").gluon
    part = p3.shard(gluon.data.ArrayDataset(np.arange(23, dtype="float32")), 2, 3)
    loader = gluon.data.DataLoader(part, 3, num_workers=processes, timeout=60)
    assert [int(value) for batch in loader for value in batch.asnumpy()] == [2, 5, 8, 11, 14, 17, 20, 0]


def test_job_of_three_workers_takes_equally_many_steps_on_a_hundred_samples():
    pytest.importorskip("mxnet")
    status, output = jobs.run_p3(3, 1, jobs.python("split_steps.py"))
    assert status == 0, output
    assert len(set(re.findall(r"rank \d weight (\S+)", output))) == 1, output
    for epoch in range(3):
        found = re.findall(r"epoch %d: rank (\d) took (\d+) steps with \[(.*)\]" % epoch, output)
        assert sorted((rank, steps) for rank, steps, _ in found) == [("0", "5"), ("1", "5"), ("2", "5")], output
        times = Counter(sample for _, _, samples in found for sample in samples.split(", "))
        assert len(times) == 100 and sorted(times.values())[-3:] == [1, 2, 2], output
