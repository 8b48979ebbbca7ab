"""A snapshot on disk: a directory with one file of each server and worker, and a manifest that vouches for them.

    round-000000000400/                 a complete snapshot; `round-000000000500.part` is one that is being written
        server-0.safetensors            the slices that the server holds, "<wire key>.<slice>.<part>"
        worker-0.safetensors            what the worker itself has (tree.py)
        manifest.json                   bytes and SHA-256 of each of them, and where the values of each key are

Every process writes its own file, then worker 0 completes the snapshot: what has no manifest does not count. Each step
is flushed to the disk before the next one, and names change atomically, so after a crash at any moment the directory
holds whole snapshots and leftovers. Where one replaces another of its round, a crash between the two renames leaves the
new one under its temporary name, but with its manifest: recover() gives it its own.

Writing needs neither NumPy nor the safetensors library, as servers do without both: the format is a length, a JSON
header, and the tensors. Files are read by the library, which checks what it reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from p3.plan.key_plan import KeyPlan
from p3.snapshots.pace import Pace

log = logging.getLogger("p3.snapshots")

VERSION = 1
MAX_ROUND = 10**12 - 1
MANIFEST = "manifest.json"

# The names of element types here and in files. The core knows some of them; scripts may give all.
FILE_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_FILE_TYPES = {**FILE_TYPES, "bfloat16": "BF16"}  # the core's, which NumPy does not have
_TYPES = {file_type: name for name, file_type in _FILE_TYPES.items()}
_ALIGNMENT = 8

_PART = re.compile(r"(server|worker)-(0|[1-9][0-9]{0,4})\.safetensors")
_COMPLETE = re.compile(r"round-([0-9]{12})")
_LEFTOVER = re.compile(r"round-([0-9]{12})(\.old)?\.part")
_READ_BYTES = 1 << 20
_FLUSH_BYTES = (1 << 16, 64 << 20)  # what is flushed to the disk at once, at least and at most
_FLUSH_S = (0.1, 0.5)  # that this should take

Tensors = Sequence[Tuple[str, str, Sequence[int], Any]]  # name, element type, shape, C-ordered buffer


class Refused(ValueError):
    """A snapshot that must not be used, and why."""


class NotShared(FileNotFoundError):
    """A part that was written elsewhere cannot be seen from here."""


# Writing


def write_part(
    directory: str, round: int, name: str, tensors: Tensors, metadata: Optional[Mapping[str, str]] = None,
    pace: Optional[Pace] = None,
) -> Dict[str, Any]:  # fmt: skip
    """Writes the file `name` ("server-0", "worker-3") of the snapshot of that round; its {"bytes", "sha256"}.

    The file is complete and on the disk when this returns. OSError, with the path, leaves nothing behind.
    """
    if not _PART.fullmatch(name + ".safetensors"):
        raise ValueError("%r is not part of a snapshot" % name)
    folder = _folder(directory, round) + ".part"
    path = os.path.join(folder, name + ".safetensors")
    try:
        os.makedirs(folder, exist_ok=True)
        return write_file(path, _safetensors(tensors, metadata or {}), pace)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def complete(directory: str, round: int, manifest: Mapping[str, Any], keep: int) -> None:
    """Makes the parts of that round a snapshot; then all but the newest `keep` are removed. OSError if it cannot be;
    NotShared if parts are missing.

    `manifest`: {"parts": {name: {"bytes", "sha256"}}, "keys": [...]}, as the parts were reported and as Snapshot
    describes keys. A complete snapshot of the same round, of an earlier run, is replaced.
    """
    folder, whole = _folder(directory, round) + ".part", _folder(directory, round)
    for name, part in manifest["parts"].items():
        path = os.path.join(folder, name + ".safetensors")
        if not os.path.isfile(path) or os.path.getsize(path) != part["bytes"]:
            raise NotShared(
                2, "a part that was written is not here: all processes must share P3_SNAPSHOT_DIR", path
            )
    content = dict(manifest, version=VERSION, round=round)
    content["sha256"] = _digest(content)
    write_file(os.path.join(folder, MANIFEST), [json.dumps(content, indent=1).encode()])
    old = whole + ".old.part"
    if os.path.exists(whole):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(whole, old)  # from here to the next line only the manifest in `folder` counts: see recover()
    os.rename(folder, whole)
    _sync_folder(directory)
    shutil.rmtree(old, ignore_errors=True)
    for number in rounds(directory, before=round + 1)[keep:]:
        _remove(_folder(directory, number))
    remove_leftovers(directory, before=round)


def rounds(directory: str, before: int = MAX_ROUND + 1) -> List[int]:
    """Of the complete snapshots there, the newest first."""
    matches = map(_COMPLETE.fullmatch, _names(directory))
    return sorted((int(match[1]) for match in matches if match and int(match[1]) < before), reverse=True)


def recover(directory: str) -> None:
    """Before a job resumes: what a crash has cut short is finished or removed. Nobody may be writing a snapshot.

    A part-written folder that has its manifest is a whole snapshot, which was about to take the place of another one.
    """
    for name in _names(directory):
        match = _LEFTOVER.fullmatch(name)
        if match and not match[2]:
            whole = _folder(directory, int(match[1]))
            if not os.path.exists(whole) and os.path.exists(os.path.join(directory, name, MANIFEST)):
                os.rename(os.path.join(directory, name), whole)
                _sync_folder(directory)
    remove_leftovers(directory)


def remove_leftovers(directory: str, before: int = MAX_ROUND + 1) -> None:
    """Of snapshots of earlier rounds that were not completed, by an earlier run. Nobody may be writing one."""
    for name in _names(directory):
        match = _LEFTOVER.fullmatch(name)
        if match and (int(match[1]) < before or match[2]):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def why(error: Exception) -> str:
    """What went wrong in writing, for a log: path, reason and errno, where it was the disk."""
    if not isinstance(error, OSError) or error.errno is None:
        return "%s: %s" % (type(error).__name__, error)
    where = " to %s" % error.filename if error.filename else ""
    return "writing%s failed: %s (errno %d)" % (where, error.strerror, error.errno)


def give_up(directory: str, round: int) -> None:
    """What has been written of that snapshot is removed: it takes space that the next one needs."""
    shutil.rmtree(_folder(directory, round) + ".part", ignore_errors=True)


def _remove(folder: str) -> None:
    """Under another name first: half removed, it would look like a damaged snapshot."""
    old = folder + ".old.part"
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
    shutil.rmtree(old, ignore_errors=True)


def _safetensors(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[Any]:
    # Wide elements first, which keeps all of them aligned.
    views = [(name, dtype, list(shape), memoryview(buffer)) for name, dtype, shape, buffer in tensors]
    views.sort(key=lambda one: -one[3].itemsize)
    header: Dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, view in views:
        begin, end = end, end + view.nbytes
        header[name] = {"dtype": _FILE_TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for _, _, _, view in views:
        if view.nbytes:
            yield view.cast("B")


def write_file(path: str, chunks, pace: Optional[Pace] = None) -> Dict[str, Any]:
    """The whole file or none of it, on the disk when this returns; its {"bytes", "sha256"}. OSError."""
    temporary = "%s.%s" % (path, secrets.token_hex(4))
    digest, size = hashlib.sha256(), 0
    try:
        with open(temporary, "xb") as file:
            for piece in chunks if pace is None else _flushed(file, chunks, pace):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(os.path.dirname(path))
    return {"bytes": size, "sha256": digest.hexdigest()}


def _flushed(file, chunks, pace: Pace) -> Iterator[Any]:
    """The chunks, each to be written to the file before the next is asked for. The disk keeps up: what the kernel
    holds back would be no progress, and come all at once in the end."""
    unwritten, step = 0, _FLUSH_BYTES[0]
    for chunk in chunks:
        whole = memoryview(chunk)
        while len(whole):
            limit = min(step, pace.step_bytes or step)
            piece, whole = whole[: limit - unwritten], whole[limit - unwritten :]
            yield piece
            unwritten += len(piece)
            if unwritten >= limit:
                began = time.monotonic()
                file.flush()
                os.fdatasync(file.fileno())
                took_s = time.monotonic() - began
                pace.wrote(unwritten)
                unwritten = 0
                if took_s < _FLUSH_S[0]:
                    step = min(step * 2, _FLUSH_BYTES[1])
                elif took_s > _FLUSH_S[1]:
                    step = max(step // 2, _FLUSH_BYTES[0])


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def newest_valid(directory: str, check: Optional[Callable[[Snapshot], None]] = None) -> Optional[Snapshot]:
    """The newest snapshot whose files are all as they were written; each refusal is logged, with the reason. `check`
    raises Refused if they are not; by default they are read here."""
    for number in rounds(directory):
        try:
            return Snapshot(directory, number).verify(check)
        except Refused as reason:
            log.warning("snapshot %s is refused; trying the one before it: %s", _folder(directory, number), reason)
    return None


def problem_with_share(
    directory: Optional[str], round: int, role: str, rank: int, number: int, pace: Pace
) -> Tuple[str, List[str]]:
    """What is wrong with the share of that snapshot's parts which the node of this rank, of `number` of its role,
    checks: its own, as long as their number is the same; "" if nothing is. And the names of those that it has read."""
    if directory is None:
        return "P3_SNAPSHOT_DIR is not set here", []
    try:
        snapshot = Snapshot(directory, round)
        share = [name for name in snapshot.part_names(role) if int(name.rpartition("-")[2]) % number == rank]
        for name in share:
            snapshot.verify_part(name, pace)
        return "", share
    except Refused as reason:
        return str(reason), []


class Snapshot:
    """A complete snapshot. Refused, with the reason, if its manifest is damaged; see verify() for its parts.

    keys: a list of {"store", "id", "shape", "dtype", "optimizer", "plan"}. `id` is what the script calls the key;
    `optimizer` the description that the servers had, or None; `plan` is KeyPlan.kept(), how the key was cut.
    """

    def __init__(self, directory: str, round: int) -> None:
        self.round = round
        self._folder = _folder(directory, round)
        self._manifest = self._read_manifest()
        self.keys: List[dict] = self._manifest["keys"]
        self.workers = len(self.part_names("worker"))
        self._files: Dict[str, Any] = {}
        self._where: Dict[str, str] = {}  # of each tensor of a server: which part

    def part_names(self, role: str) -> List[str]:
        return [name for name in self._manifest["parts"] if name.startswith(role + "-")]

    def verify(self, check: Optional[Callable[[Snapshot], None]] = None) -> Snapshot:
        """Refused unless every part is as it was written, which verify_parts() or `check` finds out, and has what the
        manifest says of the keys."""
        (check or Snapshot.verify_parts)(self)
        for name in self.part_names("server"):
            for tensor in self._file(name).keys():
                if tensor in self._where:
                    raise Refused("tensor %s is in %s and in %s" % (tensor, self._where[tensor], name))
                self._where[tensor] = name
        with _refusing("a manifest with a field of a key missing"):
            for key in self.keys:
                for part in self.parts(key["store"], key["id"]):
                    for tensor, elements in self._tensors(key, part):
                        found = self._file(self._where[tensor]).get_slice(tensor)
                        wanted = key["dtype"] if part == 0 or key["dtype"] not in ("float16", "bfloat16") else "float32"
                        if math.prod(found.get_shape()) != elements or _TYPES.get(found.get_dtype()) != wanted:
                            raise Refused("tensor %s does not fit key %r" % (tensor, key["id"]))
        return self

    def verify_parts(self) -> None:
        """As verify_part(), of each."""
        for name in self._manifest["parts"]:
            self.verify_part(name)

    def verify_part(self, name: str, pace: Optional[Pace] = None) -> None:
        """Refused unless that file is as it was written. `pace` is told of what is read."""
        wanted = self._manifest["parts"].get(name)
        if wanted is None:
            raise Refused("there is no part %s" % name)
        digest, size = hashlib.sha256(), 0
        with _refusing(name), open(self.path(name), "rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if pace is not None:
                    pace.moved()
        if size != wanted["bytes"]:
            raise Refused("%s has %d bytes, not %d" % (name, size, wanted["bytes"]))
        if digest.hexdigest() != wanted["sha256"]:
            raise Refused("%s was altered: its SHA-256 differs" % name)

    def key(self, store: int, id) -> Optional[dict]:
        return next((key for key in self.keys if (key["store"], key["id"]) == (store, id)), None)

    def parts(self, store: int, id) -> List[int]:
        """Which arrays there are of a key: 0, its value; 1, 2 ... and 255, the optimizer's (p3/wire.h)."""
        prefix = "%d.0." % self.key(store, id)["plan"]["wire_key"]
        found = sorted(int(tensor[len(prefix):]) for tensor in self._where if tensor.startswith(prefix))
        if found[:1] != [0]:
            raise Refused("key %r has no value" % (id,))
        return found

    def array(self, store: int, id, part: int = 0, pace: Optional[Pace] = None):
        """A key's value, or another one of its parts, put together from wherever its slices were: a NumPy array, of
        uint16 for bfloat16."""
        import numpy as np

        key, pieces = self.key(store, id), []
        for name, _ in self._tensors(key, part):
            pieces.append(self._tensor(self._where[name], name).reshape(-1))
            if pace is not None:
                pace.moved()
        return np.concatenate(pieces).reshape(key["shape"])

    def _tensor(self, part: str, name: str):
        file = self._file(part)
        if file.get_slice(name).get_dtype() != "BF16":
            return file.get_tensor(name)
        import numpy as np

        with open(self.path(part), "rb") as plain:  # the library makes NumPy's types alone
            header = json.loads(plain.read(int.from_bytes(plain.read(8), "little")))
            begin, end = header[name]["data_offsets"]
            return np.fromfile(plain, np.uint16, (end - begin) // 2, offset=begin)

    def worker(self, rank: int) -> Tuple[Dict[str, Any], Dict[str, str]]:
        """(tensors, metadata) that the worker gave write_part."""
        file = self._file("worker-%d" % rank)
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}

    def _tensors(self, key: dict, part: int) -> List[Tuple[str, int]]:
        """(name, elements) of the tensors that make up an array of a key, in order."""
        plan = KeyPlan.of_kept(key["plan"], key["shape"], key["dtype"])
        sizes = plan.sizes()
        names = ["%d.%d.%d" % (plan.wire_key, number, part) for number in range(len(sizes))]
        missing = next((name for name in names if name not in self._where), None)
        if missing is not None:
            raise Refused("tensor %s of key %r is missing" % (missing, key["id"]))
        return list(zip(names, sizes))

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name + ".safetensors")

    def _file(self, name: str):
        if name not in self._files:
            from safetensors import safe_open

            with _refusing(name):
                self._files[name] = safe_open(self.path(name), framework="np")
        return self._files[name]

    def _read_manifest(self) -> dict:
        with _refusing(MANIFEST), open(os.path.join(self._folder, MANIFEST), "rb") as file:
            manifest = json.loads(file.read().decode())
            if manifest.pop("sha256") != _digest(manifest):
                raise Refused("%s was altered: its SHA-256 differs" % MANIFEST)
            if manifest["version"] != VERSION:
                raise Refused("its version is %r; this P3 reads %d" % (manifest["version"], VERSION))
            if manifest["round"] != self.round:
                raise Refused("it is of round %r" % (manifest["round"],))
            for name in manifest["parts"]:
                if not _PART.fullmatch(name + ".safetensors"):
                    raise Refused("%r is not part of a snapshot" % name)
        return manifest


class PartReader:
    """What a server has of its own part, slice by slice, if as many servers come back; without NumPy. That the part is
    as it was written, problem_with_share() has found out."""

    def __init__(self, directory: Optional[str], round: int, rank: int, servers: int) -> None:
        """Refused, with the reason."""
        if directory is None:
            raise Refused("P3_SNAPSHOT_DIR is not set here")
        self._rank, self._servers = rank, servers
        self._snapshot = Snapshot(directory, round)
        if len(self._snapshot.part_names("server")) != servers:
            raise Refused("it is of another number of servers")
        name = "server-%d" % rank
        with _refusing(name):
            self._file = open(self._snapshot.path(name), "rb")
            size = int.from_bytes(self._file.read(8), "little")
            self._header: Dict[str, Any] = json.loads(self._file.read(size))
            self._begin = 8 + size

    def slices(self, store: int, name: Any, plan: KeyPlan) -> Iterator[Tuple[int, int, bytes]]:
        """(slice, part, content) of all that this server has of the key. Refused if that is not all that it needs."""
        key = self._snapshot.key(store, name)
        if key is None:
            raise Refused("the snapshot does not know it")
        before = KeyPlan.of_kept(key["plan"], key["shape"], key["dtype"])
        is_dense = not plan.row_elements and not plan.parts and not plan.staleness
        if not is_dense or (before.sizes(), before.row_elements, before.dtype) != (plan.sizes(), 0, plan.dtype):
            raise Refused("it is cut in another way, or of another kind")
        own = [number for number in range(plan.slices) if (plan.first_slice + number) % self._servers == self._rank]
        prefixes = {"%d.%d." % (before.wire_key, number): number for number in own}
        found: Dict[int, List[int]] = {number: [] for number in own}
        for tensor in self._header:
            prefix, _, part = tensor.rpartition(".")
            if prefix + "." in prefixes:
                found[prefixes[prefix + "."]].append(int(part))
        if any(0 not in parts for parts in found.values()):
            raise Refused("it was on other servers")
        for number, parts in found.items():
            for part in sorted(parts):
                yield number, part, self._content("%d.%d.%d" % (before.wire_key, number, part))

    def _content(self, tensor: str) -> bytes:
        with _refusing(tensor):
            begin, end = self._header[tensor]["data_offsets"]
            self._file.seek(self._begin + begin)
            content = self._file.read(end - begin)
            if len(content) != end - begin:
                raise Refused("%s is cut short" % tensor)
            return content


@contextlib.contextmanager
def _refusing(what: str):
    """Whatever a damaged file makes go wrong is a reason to refuse it."""
    try:
        yield
    except (Refused, MemoryError):
        raise
    except OSError as error:
        raise Refused("%s: %s" % (what, error.strerror or error)) from None
    except Exception as error:  # the library's own, and what wrong types in a manifest raise
        raise Refused("%s: %s: %s" % (what, type(error).__name__, error)) from None


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _folder(directory: str, round: int) -> str:
    if not 0 <= round <= MAX_ROUND:
        raise ValueError("round %r of a snapshot is not from 0 to %d" % (round, MAX_ROUND))
    return os.path.join(directory, "round-%012d" % round)


def _names(directory: str) -> List[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
