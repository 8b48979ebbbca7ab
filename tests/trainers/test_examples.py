"""The example for transformers learns, alone and on two workers; the releases are those that the extras name."""

import re
import sys
from importlib import metadata

import pytest
import trainer_jobs as jobs
from processes import ROOT, Process, clean_environment

pytest.importorskip("transformers", reason="no transformers here; make test-trainers installs it")
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("workers", [1, jobs.WORKERS])
def test_gpt2_learns(tmp_path, processes, workers):
    launcher = jobs.P3 if workers > 1 else []
    script = [str(ROOT / "examples" / "transformers" / "gpt2.py"), "--steps", "30", "--output", str(tmp_path)]
    env = clean_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HOME=str(tmp_path))
    processes.append(Process([sys.executable, *launcher, *script], env, tmp_path))
    finished = processes[-1].wait(250)
    assert finished.code == 0, finished.out + finished.err
    found = re.findall(r"worker (\d) of (\d): loss ([\d.]+) of unseen text after 30 steps", finished.out)
    assert {(int(rank), int(size)) for rank, size, _ in found} == {(rank, workers) for rank in range(workers)}, found
    assert len({loss for _, _, loss in found}) == 1 and float(found[0][2]) < 3.6, found


def test_the_releases_are_those_of_the_extras():
    text = (ROOT / "pyproject.toml").read_text()
    for name in ("transformers", "accelerate", "lightning"):
        pins = set(re.findall(r'"%s==([\d.]+)"' % name, text))
        assert pins == {metadata.version(name)} and "%s==%s" % (name, *pins) in (ROOT / "Makefile").read_text()
