"""Snapshots as they are read: by the safetensors library, which checks what it reads. files.py says what there is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple

from p3.plan.key_plan import KeyPlan
from p3.snapshots import files
from p3.snapshots.pace import Pace

log = logging.getLogger("p3.snapshots")

_TYPES = {file_type: name for name, file_type in files.ALL_FILE_TYPES.items()}
_READ_BYTES = 1 << 20
_OF_KEY = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")  # wire key, slice, part: a tensor of a key, whoever has written it


class Refused(ValueError):
    """A snapshot that must not be used, and why."""


def newest_valid(directory: str, check: Optional[Callable[[Snapshot], None]] = None) -> Optional[Snapshot]:
    """The newest snapshot whose files are all as they were written; each refusal is logged, with the reason. `check`
    raises Refused if they are not; by default they are read here."""
    for number in files.rounds(directory):
        try:
            return Snapshot(directory, number).verify(check)
        except Refused as reason:
            folder = files.folder_of(directory, number)
            log.warning("snapshot %s is refused; trying the one before it: %s", folder, reason)
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
        self._folder = files.folder_of(directory, round)
        self._manifest = self._read_manifest()
        self.keys: List[dict] = self._manifest["keys"]
        # By rank; but workers may have departed, and the others keep their names.
        self.worker_names = sorted(self.part_names("worker"), key=lambda name: int(name.rpartition("-")[2]))
        self.workers = len(self.worker_names)
        self._files: Dict[str, Any] = {}
        self._tensors_in: Optional[Dict[str, str]] = None  # of each tensor of a key: which part has it

    def part_names(self, role: str) -> List[str]:
        return [name for name in self._manifest["parts"] if name.startswith(role + "-")]

    def verify(self, check: Optional[Callable[[Snapshot], None]] = None) -> Snapshot:
        """Refused unless every part is as it was written, which verify_parts() or `check` finds out, and has what the
        manifest says of the keys."""
        (check or Snapshot.verify_parts)(self)
        with _refusing("a manifest with a field of a key missing"):
            for key in self.keys:
                for part in self.parts(key["store"], key["id"]):
                    for tensor, elements in self._tensors(key, part):
                        found = self._file(self._where[tensor]).get_slice(tensor)
                        wanted = key["dtype"] if part == 0 or key["dtype"] not in ("float16", "bfloat16") else "float32"
                        if math.prod(found.get_shape()) != elements or _TYPES.get(found.get_dtype()) != wanted:
                            raise Refused("tensor %s does not fit key %r" % (tensor, key["id"]))
        return self

    @property
    def _where(self) -> Dict[str, str]:
        """Of each tensor of a key: which part has it. A server's; or the first worker's, where workers update."""
        if self._tensors_in is None:
            where: Dict[str, str] = {}
            for name in self._manifest["parts"]:
                for tensor in filter(_OF_KEY.fullmatch, self._file(name).keys()):
                    if tensor in where:
                        raise Refused("tensor %s is in %s and in %s" % (tensor, where[tensor], name))
                    where[tensor] = name
            self._tensors_in = where
        return self._tensors_in

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
        """Which arrays there are of a key: 0, its value; 1, 2 ... the optimizer's; 255 and 254, what is
        beside the value (p3/wire.h)."""
        prefix = "%d." % self.key(store, id)["plan"]["wire_key"]
        found = sorted({int(tensor.rpartition(".")[2]) for tensor in self._where if tensor.startswith(prefix)})
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

    def worker(self, rank: int) -> Dict[str, Any]:
        """The tensors of a tree that the worker of that rank, of `workers`, gave write_part."""
        file = self._file(self.worker_names[rank])
        own = [name for name in file.keys() if not _OF_KEY.fullmatch(name)]
        return {name: file.get_tensor(name) for name in own}

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

    def close(self) -> None:
        """Its files, until more is read of it: of one that has been removed they would keep the space."""
        self._files.clear()

    def _file(self, name: str):
        if name not in self._files:
            from safetensors import safe_open

            with _refusing(name):
                self._files[name] = safe_open(self.path(name), framework="np")
        return self._files[name]

    def _read_manifest(self) -> dict:
        with _refusing(files.MANIFEST), open(os.path.join(self._folder, files.MANIFEST), "rb") as file:
            manifest = json.loads(file.read().decode())
            if manifest.pop("sha256") != files.digest_of(manifest):
                raise Refused("%s was altered: its SHA-256 differs" % files.MANIFEST)
            if manifest["version"] != files.VERSION:
                raise Refused("its version is %r; this P3 reads %d" % (manifest["version"], files.VERSION))
            if manifest["round"] != self.round:
                raise Refused("it is of round %r" % (manifest["round"],))
            for name in manifest["parts"]:
                if not files.PART.fullmatch(name + ".safetensors"):
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
        self._name = "server-%d" % rank
        with self._opened() as file:
            size = int.from_bytes(file.read(8), "little")
            self._header: Dict[str, Any] = json.loads(file.read(size))
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
        own = [number for number in range(plan.slices) if plan.server_of(number, self._servers) == self._rank]
        prefixes = {"%d.%d." % (before.wire_key, number): number for number in own}
        found: Dict[int, List[int]] = {number: [] for number in own}
        for tensor in self._header:
            prefix, _, part = tensor.rpartition(".")
            if prefix + "." in prefixes:
                found[prefixes[prefix + "."]].append(int(part))
        if any(0 not in parts for parts in found.values()):
            raise Refused("it was on other servers")
        with self._opened() as file:
            for number, parts in found.items():
                for part in sorted(parts):
                    yield number, part, self._content(file, "%d.%d.%d" % (before.wire_key, number, part))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """For one key: of a snapshot that was removed since, it would keep the space."""
        with _refusing(self._name), open(self._snapshot.path(self._name), "rb") as file:
            yield file

    def _content(self, file: BinaryIO, tensor: str) -> bytes:
        begin, end = self._header[tensor]["data_offsets"]
        file.seek(self._begin + begin)
        content = file.read(end - begin)
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
