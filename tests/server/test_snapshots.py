"""A server's part of a snapshot: a file of what was captured, or, if it cannot be written, an error in the log."""

import hashlib
import json
import os
import queue
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from core_jobs import ADAM, DEADLINE_S, LR, Job, bfloat16_bits, wait_all

from p3.server.snapshot_writer import SnapshotWriter
from p3.settings import Settings
from p3.snapshots import reading


def settings_with(directory):
    return replace(Settings.from_env({}), snapshot_dir=directory)


def tensors_in(path):
    """{name: array} of a safetensors file, by its definition."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    types = {"BF16": "uint16", "F16": "float16", "F32": "float32"}
    return {
        name: np.frombuffer(data[slice(*tensor["data_offsets"])], types[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def test_each_server_writes_what_it_holds_of_every_key(tmp_path):
    with Job(num_workers=2, num_servers=2, slice_elements=100) as job:
        job.set_optimizer(ADAM)
        keys = [job.key(250), job.key(3, "float16"), job.key(3, "bfloat16")]
        values = [np.arange(250, dtype="float32"), np.array([1, 2, 3], "float16"), bfloat16_bits([1, 2, 3])]
        for key, value in zip(keys, values):
            job.init(key, value)
        landed = job.push(keys[0], [np.ones(250, "float32")] * 2, LR)[0]
        wait_all([worker.capture(key, 40) for worker in job.workers for key in keys])

        parts, written = {}, queue.Queue()
        for rank, server in enumerate(job.servers):
            writer = SnapshotWriter(server, settings_with(str(tmp_path)), f"server {rank} (here)", rank, 2)
            writer.write(40, written.put)
            parts[rank] = written.get(timeout=DEADLINE_S)
        found = {}
        for rank, part in parts.items():
            file = tmp_path / "round-000000000040.part" / f"server-{rank}.safetensors"
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            assert part == {"kind": "snapshot_written", "round": 40, "bytes": len(content), "sha256": digest}
            found.update(tensors_in(file))
        of_first = {f"0.{piece}.{part}" for piece in range(3) for part in range(3)}
        assert set(found) == of_first | {"1.0.0", "2.0.0"}
        np.testing.assert_array_equal(np.concatenate([found[f"0.{piece}.0"] for piece in range(3)]), landed)
        np.testing.assert_array_equal(found["1.0.0"], values[1])
        np.testing.assert_array_equal(found["2.0.0"], values[2])
        assert [found[name].dtype.name for name in ("1.0.0", "2.0.0")] == ["float16", "uint16"]


def test_without_a_directory_the_job_fails_and_says_why():
    with Job(num_workers=1, num_servers=1) as job:
        SnapshotWriter(job.servers[0], settings_with(None), "server 0 (here)", 0, 1).write(40, pytest.fail)
        assert "server 0 (here): cannot write a snapshot: P3_SNAPSHOT_DIR is not set" in str(job.servers[0].error)


def test_a_disk_that_is_full_costs_snapshots_and_not_the_job(run_job, tmp_path):
    """As far as a test can fill one: this process may write no file larger than a megabyte."""
    finished = run_job(SNAPSHOT, 1, 1, env=environment(tmp_path), arguments=["limited"])
    assert finished.code == 0, finished
    folder = tmp_path / "snapshots"
    for round in (2, 4, 6):
        place = folder / f"round-{round:012d}.part" / "server-0.safetensors"
        text = f"server 0 (this process): writing to {place} failed: File too large (errno 27)"
        assert text in finished.out + finished.err, finished
    assert "'snapshots': {'taken': 0, 'failed': 3}" in finished.out
    assert os.listdir(folder) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small tmpfs")
def test_a_job_whose_disk_is_full_goes_on_and_takes_snapshots_again_when_there_is_room(run_job, tmp_path):
    mounted = tmp_path / "snapshots"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(mounted)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        # Of 4 MB each: one, and one that is being written; but not with what else lies there.
        env = dict(environment(tmp_path), P3_SNAPSHOT_KEEP="1")
        finished = run_job(SNAPSHOT, 2, 2, env=env, arguments=["filled"])
        assert finished.code == 0, finished
        found = [path.name for path in mounted.iterdir()]
        assert found == ["round-000000000006"] and reading.newest_valid(str(mounted)).round == 6
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
    error = r"server \d \(\S+\): writing to \S+/round-0{11}4.part/\S+ failed: No space left on device \(errno 28\)"
    lost = "no snapshot of round 4: " + error + ". The job goes on, and the snapshot of round 2 stays; 1 failed so far"
    said = finished.out + finished.err
    assert re.search(error, said) and re.search(lost, said), said
    assert finished.out.count("'snapshots': {'taken': 2, 'failed': 1}") == 2


def environment(folder):
    return {"P3_SNAPSHOT_DIR": str(folder / "snapshots"), "P3_SNAPSHOT_EVERY": "2"}


# Six steps, and three snapshots; "filled": there is no room for the second one.
SNAPSHOT = """
    import os, resource, signal, sys
    import numpy as np
    from p3.worker.session import Session

    if sys.argv[1:] == ["limited"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for name in [name for name in os.environ if name.startswith("DMLC_")]:
            del os.environ[name]  # worker and server in one process, which has the limit
    filling = os.path.join(os.environ["P3_SNAPSHOT_DIR"], "filling")
    with Session.open() as session:
        key = session.declare("weight", (1 << 20,), "float32")
        landing = np.zeros(1 << 20, "float32")
        session.init(key, landing if session.rank == 0 else None, landing).wait(30)
        for step in range(1, 7):
            session.pushpull(key, landing, landing.copy()).wait(30)
            session.snapshot(step, [key])
            if step % 2 == 0:
                session.snapshots.finish()
                session.barrier()
            if sys.argv[1:] == ["filled"] and session.rank == 0:
                if step == 3:
                    with open(filling, "wb") as file:
                        file.write(b"x" * (3 << 20))
                if step == 5:
                    os.unlink(filling)
        session.barrier()
        print({"snapshots": session.snapshots.counts})
"""
