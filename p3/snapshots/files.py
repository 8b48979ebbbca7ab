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
header, and the tensors. reading.py has the other way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from p3.snapshots.pace import Pace

log = logging.getLogger("p3.snapshots")

VERSION = 2
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
ALL_FILE_TYPES = {**FILE_TYPES, "bfloat16": "BF16"}  # the core's, which NumPy does not have
_ALIGNMENT = 8
_HEADER_BYTES = 100_000_000  # more is refused by the safetensors library

PART = re.compile(r"(server|worker)-(0|[1-9][0-9]{0,4})\.safetensors")
_COMPLETE = re.compile(r"round-([0-9]{12})")
_LEFTOVER = re.compile(r"round-([0-9]{12})(\.old)?\.part")
_FLUSH_BYTES = (1 << 16, 64 << 20)  # what is flushed to the disk at once, at least and at most
_FLUSH_S = (0.1, 0.5)  # that this should take

Tensors = Sequence[Tuple[str, str, Sequence[int], Any]]  # name, element type, shape, C-ordered buffer


class NotShared(FileNotFoundError):
    """A part that was written elsewhere cannot be seen from here."""


def write_part(
    directory: str, round: int, name: str, tensors: Tensors, pace: Optional[Pace] = None
) -> Dict[str, Any]:
    """Writes the file `name` ("server-0", "worker-3") of the snapshot of that round; its {"bytes", "sha256"}.

    The file is complete and on the disk when this returns. OSError, with the path, leaves nothing behind; so does
    ValueError, for more tensors than a file can have.
    """
    if not PART.fullmatch(name + ".safetensors"):
        raise ValueError("%r is not part of a snapshot" % name)
    folder = folder_of(directory, round) + ".part"
    path = os.path.join(folder, name + ".safetensors")
    try:
        os.makedirs(folder, exist_ok=True)
        return write_file(path, _safetensors(name, tensors), pace)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def complete(directory: str, round: int, manifest: Mapping[str, Any], keep: int) -> None:
    """Makes the parts of that round a snapshot; then all but the newest `keep` are removed, as far as that is possible.
    OSError if there is no snapshot of them; NotShared if parts are missing.

    `manifest`: {"parts": {name: {"bytes", "sha256"}}, "keys": [...]}, as the parts were reported and as Snapshot
    describes keys. A complete snapshot of the same round, of an earlier run, is replaced.
    """
    folder, whole = folder_of(directory, round) + ".part", folder_of(directory, round)
    for name, part in manifest["parts"].items():
        path = os.path.join(folder, name + ".safetensors")
        if not os.path.isfile(path) or os.path.getsize(path) != part["bytes"]:
            raise NotShared(
                2, "a part that was written is not here: all processes must share P3_SNAPSHOT_DIR", path
            )
    content = dict(manifest, version=VERSION, round=round)
    content["sha256"] = digest_of(content)
    write_file(os.path.join(folder, MANIFEST), [json.dumps(content, indent=1).encode()])
    old = whole + ".old.part"
    if os.path.exists(whole):
        _replace(whole, folder, old)
    else:
        os.rename(folder, whole)
    _sync_folder(directory)
    try:
        shutil.rmtree(old, ignore_errors=True)
        for number in rounds(directory, before=round + 1)[keep:]:
            _remove(folder_of(directory, number))
        remove_leftovers(directory, before=round)
    except OSError as error:
        log.warning("%s is complete, but what it replaces takes space, and cannot be removed: %s", whole, error)


def _replace(whole: str, folder: str, old: str) -> None:
    shutil.rmtree(old, ignore_errors=True)
    os.rename(whole, old)  # from here to the next line only the manifest in `folder` counts: see recover()
    try:
        os.rename(folder, whole)
    except OSError:
        os.rename(old, whole)
        raise


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
            whole = folder_of(directory, int(match[1]))
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
    shutil.rmtree(folder_of(directory, round) + ".part", ignore_errors=True)


def _remove(folder: str) -> None:
    """Under another name first: half removed, it would look like a damaged snapshot."""
    old = folder + ".old.part"
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
    shutil.rmtree(old, ignore_errors=True)


def _safetensors(part: str, tensors: Tensors) -> Iterator[Any]:
    # Wide elements first, which keeps all of them aligned.
    views = [(name, dtype, list(shape), memoryview(buffer)) for name, dtype, shape, buffer in tensors]
    views.sort(key=lambda one: -one[3].itemsize)
    header: Dict[str, Any] = {}
    end = 0
    for name, dtype, shape, view in views:
        begin, end = end, end + view.nbytes
        header[name] = {"dtype": ALL_FILE_TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _HEADER_BYTES:
        raise ValueError(
            "%s would have %d tensors, whose names take %d MB; %d can be read again. For fewer, give P3_SLICE_ELEMENTS "
            "a larger value, or what the script gives with a snapshot fewer arrays"
            % (part, len(views), len(text) // 10**6, _HEADER_BYTES // 10**6)
        )
    yield len(text).to_bytes(8, "little") + text
    for _, _, _, view in views:
        if view.nbytes:
            yield view.cast("B")


def write_file(path: str, chunks, pace: Optional[Pace] = None) -> Dict[str, Any]:
    """The whole file or none of it, on the disk when this returns; its {"bytes", "sha256"}. OSError."""
    temporary = "%s.%s" % (path, os.urandom(4).hex())
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


def digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def folder_of(directory: str, round: int) -> str:
    if not 0 <= round <= MAX_ROUND:
        raise ValueError("round %r of a snapshot is not from 0 to %d" % (round, MAX_ROUND))
    return os.path.join(directory, "round-%012d" % round)


def _names(directory: str) -> List[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
