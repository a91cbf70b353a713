"""Run the script and the commands of the tutorial and of the quick start."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
EPOCHS = 6

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def script(tmp_path):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(source)
    return path


def commands():
    """Return the options of each elasticrun command in the tutorial, without the script and its arguments."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("elasticrun ")]
    return [line.partition(" train.py")[0].split()[1:] for line in lines]


def epochs(job):
    return [int(number) for number in re.findall(r"^epoch (\d+): loss", job.stdout, re.MULTILINE)]


def test_the_tutorial_has_a_run_a_failure_and_a_restart(launch, script):
    plain, failing, restarting = commands()
    env = {"OMP_NUM_THREADS": "1"}
    job = launch(*plain, script, env=env, cwd=script.parent).exits(0, timeout=120)
    assert epochs(job) == list(range(EPOCHS))
    (script.parent / "checkpoint.pt").unlink()
    job = launch(*failing, script, "fail", env=env, cwd=script.parent).exits(1, timeout=120)
    assert "ValueError: a bad batch" in job.stderr.rpartition("Root Cause")[2]
    (script.parent / "checkpoint.pt").unlink()
    job = launch(*restarting, script, "fail", env=env, cwd=script.parent).exits(0, timeout=120)
    resumed = int(re.search(r"resume at epoch (\d)", job.stdout)[1])
    assert resumed in (3, 4)
    # The job resumes at 3 or 4, because rank 0 may have been killed between printing epoch 3 and saving it.
    assert epochs(job)[resumed - EPOCHS :] == list(range(resumed, EPOCHS))


def test_the_quick_start_of_the_readme(launch, tmp_path):
    text = (PAGE.parents[1] / "README.md").read_text()
    script = tmp_path / "hello.py"
    script.write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    (command,) = re.findall(r"^\$ elasticrun (.*) hello\.py$", text, re.MULTILINE)
    job = launch(*command.split(), script).exits(0, timeout=120)
    assert sorted(job.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
