"""Snapshots on disk: what is whole is used; what is damaged is refused with the reason, and the one before taken."""

import errno
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from safetensors import safe_open

from p3.snapshots import files, reading, tree

VALUE = np.arange(10, dtype="float16").reshape(2, 5)
MASTER = np.arange(10, dtype="float32") / 3
ROWS = np.arange(21, dtype="float32").reshape(7, 3)
KEYS = [
    {
        "store": 0,
        "id": "w",
        "shape": [2, 5],
        "dtype": "float16",
        "optimizer": None,
        "plan": {"wire_key": 3, "slice_elements": 4, "row_elements": 0, "partitions": 0},
    },
    {
        "store": 1,
        "id": 0,
        "shape": [7, 3],
        "dtype": "float32",
        "optimizer": None,
        "plan": {"wire_key": 30, "slice_elements": 4, "row_elements": 3, "partitions": 2},
    },
]
PARTS = ["server-0", "server-1", "worker-0", "worker-1"]


def take(directory, round, keep=2, keys=KEYS, workers=2, value=VALUE, dtype="float16"):
    """A snapshot of two servers, each of which has every other slice."""
    tensors = [("3.%d.0" % n, dtype, [-1], value.reshape(-1)[4 * n : 4 * n + 4]) for n in range(3)]
    tensors += [("3.%d.255" % n, "float32", [-1], MASTER[4 * n : 4 * n + 4]) for n in range(3)]
    tensors += [("30.0.0", "float32", [-1], ROWS[:3].reshape(-1)), ("30.1.0", "float32", [-1], ROWS[3:].reshape(-1))]
    tensors = [(name, dtype, [array.size], array) for name, dtype, _, array in tensors]
    parts = {"server-%d" % n: files.write_part(directory, round, "server-%d" % n, tensors[n::2]) for n in range(2)}
    for rank in range(workers):
        own = {"rank": rank, "round": round}
        parts["worker-%d" % rank] = files.write_part(directory, round, "worker-%d" % rank, tree.encode(own))
    files.complete(directory, round, {"parts": parts, "keys": keys}, keep)
    return os.path.join(directory, "round-%012d" % round)


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path / "snapshots")


def refused(caplog):
    return [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]


def test_values_come_back_from_whatever_server_and_partition_they_were_on(directory):
    take(directory, 7)
    snapshot = reading.newest_valid(directory)
    assert (snapshot.round, snapshot.workers) == (7, 2)
    for value, wanted in (
        (snapshot.array(0, "w"), VALUE),
        (snapshot.array(0, "w", 255), MASTER.reshape(2, 5)),
        (snapshot.array(1, 0), ROWS),
    ):
        assert value.dtype == wanted.dtype
        np.testing.assert_array_equal(value, wanted)
    assert snapshot.parts(0, "w") == [0, 255]
    assert tree.decode(snapshot.worker(1)) == {"rank": 1, "round": 7}
    assert snapshot.key(0, "v") is None


def test_bfloat16_comes_back_as_its_bits(directory):
    bits = np.arange(0x3F80, 0x3F8A, dtype="uint16").reshape(2, 5)
    take(directory, 7, keys=[dict(KEYS[0], dtype="bfloat16"), KEYS[1]], value=bits, dtype="bfloat16")
    snapshot = reading.newest_valid(directory)
    assert snapshot.array(0, "w").dtype == np.uint16
    np.testing.assert_array_equal(snapshot.array(0, "w"), bits)
    np.testing.assert_array_equal(snapshot.array(0, "w", 255), MASTER.reshape(2, 5))


def test_parts_are_files_of_the_safetensors_format(directory):
    folder = take(directory, 7)
    with safe_open(os.path.join(folder, "server-1.safetensors"), framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("3.1.0"), VALUE.reshape(-1)[4:8])


def test_an_empty_directory_or_none_has_no_snapshot(directory):
    assert reading.newest_valid(directory) is None
    os.makedirs(directory)
    assert reading.newest_valid(directory) is None


def test_only_the_newest_are_kept_and_leftovers_go(directory):
    files.write_part(directory, 1, "worker-0", [])
    for round in (2, 3, 4):
        take(directory, round)
    files.write_part(directory, 5, "worker-0", [])  # of a snapshot that is being written
    take(directory, 4)  # of an earlier run: replaced
    assert files.rounds(directory) == [4, 3]
    assert sorted(os.listdir(directory)) == ["round-%012d" % 3, "round-%012d" % 4, "round-%012d.part" % 5]
    os.mkdir(os.path.join(directory, "mine.part"))
    files.remove_leftovers(directory)
    assert sorted(os.listdir(directory)) == ["mine.part", "round-%012d" % 3, "round-%012d" % 4]


DISK_CALLS = "mkdir open rename replace unlink rmdir fsync listdir scandir".split()


def crash_at(point, work):
    """Whether work() ended before its call number `point` to the disk, at which its process, a child, dies."""
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        left = [point]

        def dying(call):
            def called(*arguments, **named):
                if left[0] == 0:
                    os._exit(7)
                left[0] -= 1
                return call(*arguments, **named)

            return called

        for name in DISK_CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0 if left[0] >= 0 else 1)
    code = os.WEXITSTATUS(os.waitpid(child, 0)[1])
    assert code in (0, 7), "the child failed"
    return code == 0


@pytest.mark.parametrize("there", [2, 3], ids=["of an earlier round", "of the same round"])
def test_a_crash_at_any_call_to_the_disk_leaves_a_whole_snapshot(directory, monkeypatch, there):
    """A snapshot of round 3 is taken where there is one already; then another crash, of who recovers from that."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # the kernel lives on
    for point in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        take(directory, there, value=VALUE + 1)
        is_whole = crash_at(point, lambda: take(directory, 3, keep=1))
        crash_at(point % 7, lambda: files.recover(directory))
        files.recover(directory)
        found = reading.newest_valid(directory)
        assert found is not None, point
        is_new = found.round == 3 and not (found.array(0, "w") - VALUE).any()
        np.testing.assert_array_equal(found.array(0, "w"), VALUE if is_new else VALUE + 1)
        assert not [name for name in os.listdir(directory) if name.endswith(".part")]
        if is_whole:
            assert is_new
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("there", [2, 3], ids=["of an earlier round", "of the same round"])
def test_an_error_of_any_call_to_the_disk_leaves_a_whole_snapshot(directory, monkeypatch, there):
    """As the crash; what cannot be completed is given up. It is the new one unless that was said to have failed."""
    for point in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        take(directory, there, value=VALUE + 1)
        left, is_taken, failed = [point], True, []

        def failing(call):
            def called(*arguments, **named):
                left[0] -= 1
                if left[0] == -1:
                    failed.append(call.__name__)
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return call(*arguments, **named)

            return called

        with monkeypatch.context() as patched:
            for name in DISK_CALLS:
                patched.setattr(os, name, failing(getattr(os, name)))
            try:
                take(directory, 3, keep=1)
            except OSError:
                is_taken = False
        if not is_taken:
            files.give_up(directory, 3)
        files.recover(directory)
        found = reading.newest_valid(directory)
        assert found is not None, point
        is_new = found.round == 3 and not (found.array(0, "w") - VALUE).any()
        np.testing.assert_array_equal(found.array(0, "w"), VALUE if is_new else VALUE + 1)
        may_be_either = not is_taken and failed[0] in ("open", "fsync")  # whether it lasts is not known
        assert is_new == is_taken or may_be_either, (point, failed)
        take(directory, 3, keep=1)
        assert files.rounds(directory) == [3]
        if not failed:
            return
    pytest.fail("it never ended")


def truncate(path):
    os.truncate(path, os.path.getsize(path) - 1)


def alter(path):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("damage, reason", [(truncate, "bytes, not"), (alter, "SHA-256"), (os.unlink, "No such file")])
@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_part_is_refused_and_the_snapshot_before_is_taken(directory, caplog, part, damage, reason):
    take(directory, 1)
    folder = take(directory, 2)
    damage(os.path.join(folder, part + ".safetensors"))
    assert reading.newest_valid(directory).round == 1
    (text,) = refused(caplog)
    assert part in text and reason in text


@pytest.mark.parametrize("damage", [truncate, alter, os.unlink])
def test_a_damaged_manifest_is_refused(directory, caplog, damage):
    take(directory, 1)
    damage(os.path.join(take(directory, 2), files.MANIFEST))
    assert reading.newest_valid(directory).round == 1
    assert "manifest" in refused(caplog)[0]


def test_every_altered_byte_of_a_manifest_is_noticed(directory):
    path = os.path.join(take(directory, 1), files.MANIFEST)
    with open(path, "rb") as file:
        whole = file.read()
    for place in range(0, len(whole), 7):
        altered = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        with open(path, "wb") as file:
            file.write(altered)
        if json_of(altered) != json_of(whole):  # white space may be another
            assert reading.newest_valid(directory) is None, (place, altered[place : place + 20])


def json_of(text):
    try:
        return json.loads(text.decode())
    except ValueError:
        return None


def test_swapped_parts_and_a_renamed_snapshot_are_refused(directory, caplog):
    folder = take(directory, 1)
    os.rename(os.path.join(folder, "worker-0.safetensors"), os.path.join(folder, "x"))
    os.rename(os.path.join(folder, "worker-1.safetensors"), os.path.join(folder, "worker-0.safetensors"))
    os.rename(os.path.join(folder, "x"), os.path.join(folder, "worker-1.safetensors"))
    os.rename(take(directory, 2), os.path.join(directory, "round-%012d" % 3))
    assert reading.newest_valid(directory) is None
    assert "of round 2" in refused(caplog)[0] and "worker-0" in refused(caplog)[1]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 5]},
        {"dtype": "float32"},
        {"plan": dict(KEYS[0]["plan"], wire_key=4)},
        {"plan": dict(KEYS[0]["plan"], slice_elements=5)},
        {"plan": {}},
        {"shape": None},
    ],
)
def test_tensors_that_do_not_fit_the_manifest_are_refused(directory, caplog, change):
    take(directory, 1, keys=[dict(KEYS[0], **change), KEYS[1]])
    assert reading.newest_valid(directory) is None
    assert len(refused(caplog)) == 1


def test_a_part_with_a_name_that_leads_elsewhere_is_refused(directory, caplog):
    folder = take(directory, 1)
    path = os.path.join(folder, files.MANIFEST)
    with open(path) as file:
        manifest = json.load(file)
    manifest["parts"]["../worker-9"] = {"bytes": 0, "sha256": ""}
    del manifest["sha256"]
    manifest["sha256"] = files.digest_of(manifest)
    with open(path, "w") as file:
        json.dump(manifest, file)
    assert reading.newest_valid(directory) is None
    assert "not part of a snapshot" in refused(caplog)[0]


def test_a_full_disk_leaves_no_half_written_part(directory, monkeypatch):
    take(directory, 1)
    full = np.zeros(1 << 16, "float32")

    def fsync(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_part(directory, 2, "server-0", [("0.0.0", "float32", [1 << 16], full)])
    assert caught.value.filename.endswith("server-0.safetensors")
    monkeypatch.undo()
    assert os.listdir(os.path.join(directory, "round-%012d.part" % 2)) == []
    assert reading.newest_valid(directory).round == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small tmpfs")
def test_a_disk_that_fills_up_leaves_the_snapshot_before(tmp_path):
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mounted)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        directory = str(mounted / "snapshots")
        take(directory, 1)
        with pytest.raises(OSError, match="No space left"):
            files.write_part(directory, 2, "server-0", [("0.0.0", "float32", [1 << 17], np.zeros(1 << 17, "float32"))])
        assert os.listdir(os.path.join(directory, "round-%012d.part" % 2)) == []
        assert reading.newest_valid(directory).round == 1
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_part_that_is_not_in_the_shared_directory_completes_nothing(directory):
    part = files.write_part(directory, 1, "server-0", [])
    with pytest.raises(OSError, match="share P3_SNAPSHOT_DIR"):
        files.complete(directory, 1, {"parts": {"server-0": part, "worker-0": part}, "keys": []}, 2)
    assert files.rounds(directory) == []


def test_a_state_of_any_length_comes_back(directory):
    state = ["x" * (1 << 20)] * 100
    part = files.write_part(directory, 1, "worker-0", tree.encode(state))
    files.complete(directory, 1, {"parts": {"worker-0": part}, "keys": []}, 2)
    assert tree.decode(reading.newest_valid(directory).worker(0)) == state


def test_more_tensors_than_can_be_read_are_not_written(directory):
    long_names = [(str(n) * (1 << 20), "float32", [1], np.zeros(1, "float32")) for n in range(10)] * 10
    with pytest.raises(ValueError, match="server-0 would have 100 tensors, .* 104 MB; 100 .*P3_SLICE_ELEMENTS"):
        files.write_part(directory, 1, "server-0", [(name[n:], *rest) for n, (name, *rest) in enumerate(long_names)])
    assert os.listdir(os.path.join(directory, "round-%012d.part" % 1)) == []


@pytest.mark.parametrize("name", ["../server-0", "server-0/x", "worker--1", "server-01", "manifest"])
def test_a_part_has_the_name_of_a_server_or_worker(directory, name):
    with pytest.raises(ValueError, match="not part"):
        files.write_part(directory, 1, name, [])
    assert not os.path.exists(directory)


def test_a_tree_comes_back_as_it_was():
    random = np.random.RandomState(3).get_state()
    given = {
        "random": random,
        "numbers": [1, -(2**70), 0.1, float("inf"), True, None, "é\udc80"],
        "arrays": {0: np.zeros((0, 3), "int8"), 1: np.array(2.5), -2.5: np.array([True, False]), "t": np.eye(3).T},
        "nested": ((), [], {}, ({"x": [np.float32(0.1)]},)),
    }
    tensors = tree.encode(tree.checked(given, "state"))
    back = tree.decode({name: np.array(array) for name, _, _, array in tensors})
    np.testing.assert_array_equal(back["random"][1], random[1])
    assert type(back["random"]) is tuple and back["random"][2:] == random[2:]
    assert back["numbers"] == given["numbers"] and type(back["numbers"][4]) is bool
    for key, array in given["arrays"].items():
        assert back["arrays"][key].dtype == array.dtype and back["arrays"][key].shape == array.shape
        np.testing.assert_array_equal(back["arrays"][key], array)
    assert back["nested"] == ((), [], {}, ({"x": [float(np.float32(0.1))]},))


def test_an_array_is_kept_in_this_machines_order_of_bytes():
    given = np.array([1.5, -2.0]).astype(np.dtype("float32").newbyteorder())
    kept = tree.checked(given, "state")
    assert kept.dtype.isnative and kept.tolist() == given.tolist()


def test_a_tree_is_a_copy():
    array = np.zeros(3)
    given = {"a": [array]}
    copy = tree.checked(given, "state")
    array[:] = 1
    given["a"].append(2)
    assert len(copy["a"]) == 1 and not copy["a"][0].any()


@pytest.mark.parametrize(
    "wrong, entry",
    [
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a set"),
        ({"f": print}, r"state\['f'\] is a builtin_function_or_method"),
        ({"o": np.array([None])}, r"state\['o'\] is a ndarray of object"),
        ({"c": np.zeros(1, "complex64")}, r"state\['c'\] is a ndarray of complex64"),
        ({(1,): 2}, r"state: the key \(1,\)"),
        ({"b": b"x"}, r"state\['b'\] is a bytes"),
    ],
)
def test_what_cannot_be_in_a_snapshot_is_named(wrong, entry):
    with pytest.raises(ValueError, match=entry):
        tree.checked(wrong, "state")
