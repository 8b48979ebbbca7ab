"""MXNet's own tests of its stores pass with P3's, but for the lines that mxnets_own.py changes. docs/mxnet-tests.md"""

import sys
from pathlib import Path

import mxnets_own
import pytest
from processes import PYTHONPATH, ROOT, Process, clean_environment

pytest.importorskip("mxnet")
from lab_traces import needs_lab

from p3.measure.jobs.job import Job
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import lab

PAGE = ROOT / "docs" / "mxnet-tests.md"
HOSTS = 3
DEADLINE_S = 400

needs_source = pytest.mark.skipif(mxnets_own.source() is None, reason="MXNET_SOURCE names no source of MXNet 1.9.1")

DIST_SYNC = [  # as MXNet's continuous integration runs them
    ["--type=gluon_step_cpu"],
    ["--type=gluon_sparse_step_cpu"],
    ["--type=gluon_type_cpu"],
    ["--type=invalid_cpu"],
    ["--type=default_cpu"],
    ["--type=default_cpu", "--no-multiprecision"],
    ["--type=compressed_cpu"],
    ["--type=compressed_cpu", "--no-multiprecision"],
    ["--type=init_gpu", "--no-gpu"],
]
DISTRIBUTED = [("dist_sync_kvstore.py", arguments) for arguments in DIST_SYNC] + [
    ("dist_device_sync_kvstore.py", []),
    ("dist_device_sync_kvstore_custom.py", []),
]


@needs_source
@needs_lab
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("script, arguments", DISTRIBUTED, ids=[" ".join([name, *rest]) for name, rest in DISTRIBUTED])
def test_mxnets_distributed_tests_pass_on_three_hosts(tmp_path, monkeypatch, script, arguments):
    mxnets_own.write(tmp_path, [name for name in mxnets_own.CHANGES if name.startswith(mxnets_own.NIGHTLY)])
    monkeypatch.chdir(tmp_path)
    environment = {"PYTHONPATH": PYTHONPATH}
    with lab(HOSTS) as hosts, Job(
        STORES["p3_sync"], hosts, [sys.executable, script, *arguments], root=hosts[0], port=9100, folder=tmp_path,
        omp_threads=1, environment=environment,
    ) as job:  # fmt: skip
        job.start()
        job.wait(DEADLINE_S)
        for number in range(HOSTS):
            assert f"worker {number} " in job.output(f"worker {number}").read_text()  # what it has done


UNIT_TESTS = [Path(name).name for name in mxnets_own.CHANGES if name.startswith(mxnets_own.UNITTEST + "test_")]


@needs_source
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("name", UNIT_TESTS)
def test_mxnets_unit_tests_pass_in_one_process(tmp_path, processes, name):
    mxnets_own.write_unit_tests(tmp_path)
    env = clean_environment(PYTHONPATH=PYTHONPATH)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:timeout", "-q", name]
    processes.append(Process(command, env, tmp_path))
    finished = processes[-1].wait(DEADLINE_S - 30)
    assert finished.code == 0, finished.out + finished.err
    assert " passed" in finished.out


def test_page_lists_every_line_that_is_changed():
    everywhere = (mxnets_own.NAME, mxnets_own.GPU, mxnets_own.PYTHON)
    rows = [
        "| `%s` | `%s` | `%s` | %s |" % (Path(name).name, change.old.strip(), change.new.strip(), change.why)
        for name, changes in mxnets_own.CHANGES.items()
        for change in changes
        if change.why not in everywhere
    ]
    page = PAGE.read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows
    for why in everywhere:
        assert why in " ".join(page.split())
