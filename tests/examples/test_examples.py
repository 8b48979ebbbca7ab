"""The examples learn, alone and on two workers, and there every worker ends with the same weights."""

import re

import forked
import plugin_jobs as jobs
import pytest
from processes import ROOT

pytest.importorskip("mxnet")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

# (options, pattern of the number in its last line, whether that number tells of learning)
EXAMPLES = {
    "train_digits.py": ("--epochs 3", r"accuracy ([\d.]+)%", lambda percent: percent > 80),
    "module_mlp.py": ("--epochs 5", r"accuracy ([\d.]+)", lambda accuracy: accuracy > 0.8),
    "mixed_precision.py": ("--epochs 5", r"accuracy ([\d.]+) with float16 weights", lambda accuracy: accuracy > 0.8),
    "estimator.py": ("--epochs 4", r"accuracy ([\d.]+)", lambda accuracy: accuracy > 0.8),
    # Its text is that of this Python's documentation: after 60 steps from 170 to 1460, after 200 from 57 to 80.
    "language_model.py": ("--steps 200", r"perplexity ([\d.]+) of unseen text", lambda perplexity: perplexity < 250),
    "characters.py": ("--steps 60", r"perplexity ([\d.]+) of unseen text", lambda perplexity: perplexity < 30),
    "recommender.py": ("--epochs 2", r"error ([\d.]+) of unseen ratings", lambda error: error < 0.7),
    "local_steps.py": ("--epochs 4", r"accuracy ([\d.]+)%", lambda percent: percent > 80),
    "gan.py": ("--steps 300", r"distance ([\d.]+) to the nearest centre", lambda distance: distance < 0.5),
}
RANK_0_ONLY = "train_digits.py"


def results(output, pattern):
    """{rank: result}, of the workers' final lines."""
    return {rank: float(value) for rank, value in re.findall(r"worker (\d+) of \d+: .*?" + pattern, output)}


def test_every_example_is_tested():
    runnable = {path.name for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()}
    assert runnable == {*EXAMPLES, "resume.py"}  # which tests/snapshots/test_jobs.py runs


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_learns(name, workers):
    options, pattern, learned = EXAMPLES[name]
    command = forked.command(str(ROOT / "examples" / name), *options.split())
    status, output = jobs.run_p3(workers, 2, command) if workers > 1 else jobs.run(command, 100)
    assert status == 0, output
    if name == RANK_0_ONLY:
        (result,) = re.findall(r"loss .* " + pattern + r" .* on %d worker\(s\)" % workers, output)
        assert learned(float(result)), output
        return
    found = results(output, pattern)
    assert set(found) == {str(rank) for rank in range(workers)}, output
    assert len(set(found.values())) == 1, output
    assert learned(found["0"]), output
