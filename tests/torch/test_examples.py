"""The examples for PyTorch learn, alone and on two workers, and there every worker ends with the same weights."""

import re
import shutil

import forked
import plugin_jobs as jobs
import pytest
from pages import block_with, output_of
from processes import PYTHONPATH, ROOT

pytest.importorskip("torch")
pytest.importorskip("sklearn")

# (options, pattern of the number in its last line, whether that number tells of learning)
EXAMPLES = {
    "digits.py": ("--epochs 4", r"accuracy ([\d.]+)%", lambda percent: percent > 80),
    "gpt.py": ("--steps 60", r"loss ([\d.]+) of unseen text", lambda loss: loss < 3.2),
    "gan.py": ("--steps 300", r"distance ([\d.]+) to the nearest centre", lambda distance: distance < 0.5),
    "local_steps.py": ("--epochs 4", r"accuracy ([\d.]+)%", lambda percent: percent > 80),
    "lora.py": ("--layers 6 --width 256 --steps 40", r"loss ([\d.]+) of the first one's", lambda share: share < 0.8),
    "trees.py": ("--steps 150", r"([\d.]+)% of \d+ unseen formulas", lambda percent: percent > 85),
}
FOLDER = ROOT / "examples" / "torch"
ENVIRONMENT = {"PYTHONPATH": PYTHONPATH}  # with scikit-learn


def test_every_example_is_tested():
    assert {path.name for path in FOLDER.glob("*.py")} == EXAMPLES.keys()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_learns(name, workers):
    options, pattern, learned = EXAMPLES[name]
    command = forked.command(str(FOLDER / name), *options.split())
    status, output = (
        jobs.run_p3(workers, 2, command, **ENVIRONMENT) if workers > 1 else jobs.run(command, 100, **ENVIRONMENT)
    )
    assert status == 0, output
    found = dict(re.findall(r"worker (\d+) of \d+: .*?" + pattern, output))
    assert found.keys() == {str(rank) for rank in range(workers)}, output
    assert len(set(found.values())) == 1 and learned(float(found["0"])), output


def test_script_of_the_readme_prints_what_it_says(tmp_path):
    script = tmp_path / "train_torch.py"
    script.write_text(block_with("import p3.torch", "python"))
    status, output = jobs.run_p3(2, 2, forked.command(str(script)))
    assert status == 0, output
    assert sorted(output.splitlines()) == output_of("p3 run -n 2 -s 2 python train_torch.py")


def test_gpt_goes_on_where_it_was(tmp_path):
    """The same loss of unseen text as of an uninterrupted training, to the last digit."""
    command = forked.command(str(FOLDER / "gpt.py"), "--steps")
    variables = {"P3_SNAPSHOT_DIR": str(tmp_path), "P3_SNAPSHOT_EVERY": "10"}
    whole = jobs.run([*command, "30"], 100)
    first = jobs.run([*command, "30"], 100, **variables)
    shutil.rmtree(tmp_path / ("round-%012d" % 30))  # as if the job had been cut short behind its second snapshot
    resumed = jobs.run([*command, "30"], 100, **variables)
    losses = [re.search(r"loss ([\d.]+) of unseen", output).group(1) for _, output in (whole, first, resumed)]
    assert len(set(losses)) == 1, losses
    assert "step 20" not in resumed[1]
