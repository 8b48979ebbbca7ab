"""P3's own small collectives, and torch's process group beside P3, however the job was started."""

import socket
import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("torch")
from p3.torch.process_group import _backend


def test_alone():
    status, output = jobs.run(jobs.python("torch_collectives.py"))
    assert status == 0 and "worker 0 of 1: all is well" in output, output


def test_in_a_job_of_p3_run():
    status, output = jobs.run_p3(3, 2, jobs.python("torch_collectives.py"))
    assert status == 0 and output.count("of 3: all is well") == 3, output


def test_under_torchrun():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", "2"]
    status, output = jobs.run([*launcher, *jobs.script("torch_collectives.py")], 100)
    assert status == 0 and output.count("of 2: all is well") == 2, output


@pytest.mark.parametrize("gpus, has_nccl", [
    (["one", "other"], True), (["one", "one"], False), (["one", None], False), ([None, None], False),
])  # fmt: skip
def test_the_group_has_nccl_only_where_each_worker_has_a_gpu_of_its_own(gpus, has_nccl):
    assert ("nccl" in _backend(gpus)) == has_nccl
