"""The programs and commands of the tutorial, the quick start, and the user documentation."""

import ast
import re
import sys
from pathlib import Path

import pytest
from helpers import procs
from helpers.launcher import clean_environment
from helpers.procs import run_program

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "tutorial.md"
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


def test_the_tutorial_commands_succeed_fail_and_restart_as_described(launch, script):
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


def test_the_hello_program_of_the_installation_runs(launch, tmp_path):
    text = (DOCS / "install.md").read_text()
    script = tmp_path / "hello.py"
    script.write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    (command,) = re.findall(r"^\$ elasticrun (.*) hello\.py$", text, re.MULTILINE)
    job = launch(*command.split(), script).exits(0, timeout=120)
    # With `-u`, Python writes a line and its newline separately, so the lines of two workers may run
    # together.
    assert sorted(re.findall(r"rank \d of \d", job.stdout)) == ["rank 0 of 2", "rank 1 of 2"]


def first_program(page):
    return re.search(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[1]


@pytest.mark.parametrize(("page", "steps"), [("train.md", "200"), ("keep.md", "300")])
def test_the_first_program_of_a_page_runs(launch, tmp_path, page, steps):
    script = tmp_path / "train.py"
    script.write_text(first_program(page))
    text = (DOCS / page).read_text().replace("\\\n", "")
    command, *_ = re.findall(r"^elasticrun (--standalone .*) train\.py$", text, re.M)
    job = launch(*command.split(), script, env={"OMP_NUM_THREADS": "1"}).exits(0, timeout=150)
    assert re.findall(r"^step (\d+): ", job.stdout, re.MULTILINE) == [steps]


def test_the_first_program_in_python_md_runs(tmp_path):
    script = tmp_path / "launches.py"
    script.write_text(first_program("python.md"))
    done = run_program([sys.executable, script], timeout=120, env=clean_environment())
    # Reap the resource tracker, which exits shortly after the program.
    procs.reap_adopted()
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == {rank: rank * 0.1 for rank in range(4)}
