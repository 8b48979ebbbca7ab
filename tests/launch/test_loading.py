"""What P3's own processes load, and what `import p3` loads: whoever starts them waits for it."""

import os
import subprocess
import sys

import pytest
from node_jobs import TRAIN, all_ended, started
from processes import ROOT, clean_environment

from p3.cli import COMMANDS

# Run by each Python that starts.
TELL = """
import atexit, os, sys
def tell(folder=%r, role=os.environ.get("DMLC_ROLE", "none")):
    with open(os.path.join(folder, role), "w") as file:
        file.write("\\n".join(name for name, module in sys.modules.items() if module is not None))
atexit.register(tell)
"""

# Alike for a scheduler and a server: what trains, starts jobs or measures, and what of Python is slow to load.
HEAVY = {
    "numpy", "torch", "mxnet", "ray", "ssl", "statistics", "random", "tempfile", "difflib", "multiprocessing",
    "p3.worker", "p3.frontend", "p3.torch", "p3.mxnet.changes", "p3.mxnet.kvstore", "p3.measure", "p3.doctor", "p3.top",
    "p3.launch.launcher", "p3.launch.engines", "p3.launch.launchers.supervise", "p3.launch.commands.run",
    "p3.launch.commands.join",
}  # fmt: skip
OTHERS = {
    "scheduler": {"p3._core", "p3.server", "p3.snapshots.reading"},
    "server": {"p3.cluster.scheduler", "p3.cluster.agreement"},
}


@pytest.fixture
def telling(tmp_path):
    """A variable by which each Python writes the modules that it has loaded to a file, called as its role."""
    (tmp_path / "sitecustomize.py").write_text(TELL % str(tmp_path))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def loaded(folder, role="none"):
    return set((folder / role).read_text().split())


def loaded_by(telling, tmp_path, *arguments):
    """By Python with these arguments, beyond what it loads by itself."""
    found = []
    for words in (("-c", "pass"), arguments):
        subprocess.run([sys.executable, *words], env=clean_environment(**telling), stdout=subprocess.DEVNULL,
                       cwd=str(tmp_path), timeout=60, check=True)  # fmt: skip
        found.append(loaded(tmp_path))
    return found[1] - found[0]


def test_a_scheduler_and_a_server_load_only_what_they_need(make_cluster, telling, tmp_path):
    nodes = all_ended(started(make_cluster(workers=1), [TRAIN], **telling))
    assert [node.code for node in nodes] == [0, 0, 0], nodes
    assert {"numpy", "p3.worker.session"} <= loaded(tmp_path, "worker")
    for role, its_own in (("scheduler", "p3.cluster.scheduler"), ("server", "p3.server.process")):
        names = loaded(tmp_path, role)
        assert its_own in names
        assert names & (HEAVY | OTHERS[role]) == set(), role


def test_import_p3_loads_next_to_nothing(telling, tmp_path):
    found = loaded_by(telling, tmp_path, "-c", "import p3")
    assert {"p3", "p3.mxnet.hooks"} <= found
    assert {name for name in found if not name.startswith(("p3", "importlib"))} <= {"warnings"}


@pytest.mark.parametrize("name", ["run", "exec", "join", "lab", "trace"])
def test_a_command_loads_no_other_one(telling, tmp_path, name):
    found = loaded_by(telling, tmp_path, "-m", "p3", name, "--help")
    assert found & set(COMMANDS.values()) == {COMMANDS[name]}


def test_a_command_that_does_not_exist_is_told_all_that_do(tmp_path):
    ended = subprocess.run([sys.executable, "-m", "p3", "fly"], env=clean_environment(), cwd=str(tmp_path),
                           capture_output=True, text=True, timeout=60)  # fmt: skip
    assert ended.returncode == 2
    assert all(name in ended.stderr for name in COMMANDS), ended.stderr
