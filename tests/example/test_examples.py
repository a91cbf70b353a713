"""The examples that users start from. Each example resumes after one of its processes has been killed."""

import os
import re
from pathlib import Path

import pytest
from helpers.procs import HANG, process

from elasticrs._engine.job.options import parse

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SHARED = ("task.py", "agents.py", "browser.py")
"""Files that examples and demos import."""
FRAMEWORKS = ("accelerate_loop", "fabric_loop", "huggingface_trainer", "lightning_trainer")
SCRIPTS = sorted(
    str(path.relative_to(EXAMPLES))
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/train.py"))
    if path.name not in SHARED
)
EPOCHS = 3

pytestmark = [
    pytest.mark.torch,
    # With torchrun, the second attempt would find the addresses of the first attempt's workers in the store.
    pytest.mark.beyond_torchrun,
]


def run_line(example):
    """Return the options of the command line in an example's first lines."""
    source = (EXAMPLES / example).read_text(encoding="utf-8").replace("\\\\\n", "")
    (options,) = re.findall(rf"^Run: elasticrun (.*) examples/{example}\nTry: ", source, re.MULTILINE)
    return options.split()


@pytest.mark.parametrize("example", SCRIPTS)
def test_each_example_starts_with_a_valid_command_line(example):
    args = parse([*run_line(example), str(EXAMPLES / example)], {})
    assert args.nnodes == (1, 1)


@pytest.fixture
def train(launch, tmp_path):
    """Return a function that runs an example to completion and returns its output."""

    def train(example, *options, epochs=EPOCHS, accident="-1:0", checkpoints="checkpoints", code=0, **how):
        script = tmp_path / f"{example}.py"
        script.write_text("import accident\n" + (EXAMPLES / script.name).read_text(encoding="utf-8"))
        environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(EXAMPLES)]),
            "ACCIDENT": accident,
            "OMP_NUM_THREADS": "1",
            # Make a framework fail if it tries to download anything.
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
        }
        arguments = ("--checkpoints", tmp_path / checkpoints, "--epochs", str(epochs))
        launched = launch(*options, script, *arguments, env=environment, **how)
        return launched.exits(code, timeout=3 * HANG).stdout

    return train


@pytest.fixture
def forked(torch_programs):
    """Let an example run in forks of a process that has imported all that the ranks need for a step."""
    torch_programs.preload("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")
    return {"start": torch_programs.popen}


@pytest.mark.timeout(180)
def test_fsdp2_resumes_with_another_number_of_ranks(train, forked):
    options = ("--standalone", "--nproc-per-node")
    train("fsdp2", *options, "2", epochs=2, accident="1:24", code=1, **forked)
    output = train("fsdp2", *options, "3", epochs=2, **forked)
    assert "resumed after epoch 1\n" in output
    assert "done: 3 ranks" in output


@pytest.mark.timeout(180)
def test_a_killed_data_loader_fails_its_rank_and_no_loader_remains(train, forked):
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    output = train("data_loaders", *options, epochs=2, accident="1:24:loader", **forked)
    assert "resumed after epoch 1\n" in output
    (pids,) = re.findall(r"accident of \d+, loaders \[(.*)\]$", output, re.MULTILINE)
    assert [process(int(pid)) for pid in pids.split(", ")] == [None, None]


@pytest.mark.slow
@pytest.mark.timeout(6 * HANG)
@pytest.mark.parametrize(
    "example",
    ["fsdp2", "data_loaders", *(pytest.param(each, marks=pytest.mark.frameworks) for each in FRAMEWORKS)],
)
def test_an_example_gives_the_same_result_with_and_without_a_failure(train, example):
    options = run_line(f"{example}.py")
    calm = train(example, *options, checkpoints="calm")
    assert "resumed" not in calm
    hurt = train(example, *options, "--warm", "auto", accident="1:24", checkpoints="hurt")
    assert len(re.findall("accident of", hurt)) == 1
    assert len(re.findall("resumed ", hurt)) == 1
    ((ranks, loss),) = re.findall(r"done: (\d) ranks, loss ([\d.]+)$", calm, re.MULTILINE)
    assert ranks == options[options.index("--nproc-per-node") + 1]
    ((ranks_after, loss_after),) = re.findall(r"done: (\d) ranks, loss ([\d.]+)$", hurt, re.MULTILINE)
    assert (ranks_after, float(loss_after)) == (ranks, pytest.approx(float(loss), abs=2e-5))
