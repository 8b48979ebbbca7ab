"""In a job that resumes, each server begins with its own part of the snapshot; worker 0 brings what does not fit."""

import re
import shutil

import plugin_jobs as jobs
import pytest
from processes import PYTHONPATH


ROWS_BYTES = 3 * 4 * 50 * 3  # of the key of rows, which worker 0 brings: its value and Adam's two arrays
LARGE_BYTES = 4 * 300 * 1000


def run(folder, servers, steps, script="loaded_by_servers.py", workers=2, **settings):
    command = jobs.python(script, steps)
    variables = {"P3_SNAPSHOT_DIR": str(folder), "P3_SNAPSHOT_EVERY": "2", "PYTHONPATH": PYTHONPATH}
    code, output = jobs.run_p3(workers, servers, command, P3_LOCAL="tcp", OMP_NUM_THREADS="1", **variables, **settings)
    assert code == 0, output
    said = dict(re.findall(r"\[worker (\d)\] (from \d+: \w+ after \d+)", output))
    begun, digest, sent = re.fullmatch(r"from (\d+): (\w+) after (\d+)", said["0"]).groups()
    assert len(said) == workers and all(" %s " % digest in one for one in said.values()), output
    return int(begun), digest, int(sent), output


def test_worker_0_sends_no_more_than_the_others_need_and_all_bits_are_as_if_undisturbed(tmp_path):
    _, undisturbed, first, _ = run(tmp_path / "whole", 2, 4)
    run(tmp_path / "cut", 2, 2)
    shutil.copytree(str(tmp_path / "cut"), str(tmp_path / "of-three"))
    begun, digest, sent, _ = run(tmp_path / "cut", 2, 4)
    assert (begun, digest) == (2, undisturbed)
    assert first > LARGE_BYTES and sent < ROWS_BYTES + 20_000, sent  # headers of frames besides
    begun, digest, sent, _ = run(tmp_path / "of-three", 3, 4)  # other servers hold the slices now
    assert (begun, digest) == (2, undisturbed) and sent > 3 * LARGE_BYTES


def test_a_job_resumes_with_another_strategy_to_the_same_bits(tmp_path):
    strategy = tmp_path / "strategy.json"
    strategy.write_text('{"version": 1, "default": {"servers": [1, 0, 1]}}')
    _, undisturbed, _, _ = run(tmp_path / "whole", 2, 4)
    run(tmp_path / "cut", 2, 2)
    shutil.copytree(str(tmp_path / "cut"), str(tmp_path / "kept"))
    begun, digest, sent, _ = run(tmp_path / "cut", 2, 4, P3_STRATEGY=str(strategy))
    assert (begun, digest) == (2, undisturbed) and sent > LARGE_BYTES  # other servers hold some of the slices now
    run(tmp_path / "placed", 2, 2, P3_STRATEGY=str(strategy))
    begun, digest, sent, _ = run(tmp_path / "placed", 2, 4, P3_STRATEGY=str(strategy))
    assert (begun, digest) == (2, undisturbed) and sent < ROWS_BYTES + 20_000, sent  # each has its own


def test_rows_that_no_step_has_touched_resume_with_the_others(tmp_path):
    _, undisturbed, _, _ = run(tmp_path / "whole", 2, 4, P3_PARTITIONS="25")
    run(tmp_path / "cut", 2, 2, P3_PARTITIONS="25")  # 8 rows at most are touched
    begun, digest, _, _ = run(tmp_path / "cut", 2, 4, P3_PARTITIONS="25")
    assert (begun, digest) == (2, undisturbed)


@pytest.mark.torch
def test_of_torchs_weights_worker_0_sends_none(tmp_path):
    script = "loaded_by_servers_torch.py"
    _, undisturbed, first, _ = run(tmp_path / "whole", 2, 4, script)
    run(tmp_path / "cut", 2, 2, script)
    begun, digest, sent, _ = run(tmp_path / "cut", 2, 4, script)
    assert (begun, digest) == (2, undisturbed) and first > LARGE_BYTES and sent < 50_000, (first, sent)
