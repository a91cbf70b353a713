"""Lightning (Fabric and Trainer), Accelerate and the Trainer of Hugging Face, in ordinary scripts of theirs.

Each script beside this trains a small model on two ranks, as it is, and once more with a rank that fails in
the middle: the second attempt goes on from the checkpoint, and must end with the same weights. That job's
workers start warm.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.procs import HANG

HERE = Path(__file__).parent
STEPS = 12
STEPS_PER_EPOCH = 4

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.slow,
    # Its second attempt finds the addresses of the first one's workers in the store, and fails to connect.
    pytest.mark.beyond_torchrun,
    pytest.mark.timeout(4 * HANG),
]


class Run(NamedTuple):
    """What the ranks of one job said, in the order of ranks."""

    accidents: list[dict[str, str]]
    endings: list[dict[str, str]]


def train(launch, directory: Path, script: str, *arguments: str, warm: str = "off") -> Run:
    directory.mkdir()
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--warm", warm)
    # Nothing may be looked up or fetched: what is missing is an error.
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(directory)}
    launched = launch(
        *options, HERE / f"{script}.py", "--directory", directory, *arguments, env=environment, cwd=directory
    )
    assert launched.wait(3 * HANG) == 0, launched.stdout + launched.stderr
    return Run(
        *(
            sorted(
                (dict(pair.split("=") for pair in told.split()) for told in said(what, launched.stdout)),
                key=lambda each: each["rank"],
            )
            for what in ("accident", "done")
        )
    )


def said(what: str, output: str) -> list[str]:
    """The rest of each line of ``say``: it may follow text whose newline another rank is still to write."""
    return re.findall(rf"{what} (rank=.*)", output)


def expected(script: str, attempt: int, steps: int) -> list[dict[str, str]]:
    common = {"world": "2", "backend": "gloo", "attempt": str(attempt), "steps": str(steps)}
    return [{"framework": script, "rank": str(rank), **common} for rank in range(2)]


def without_weights(endings: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: value for name, value in each.items() if name != "weights"} for each in endings]


@pytest.mark.parametrize(
    "script", ["fabric_loop", "lightning_trainer", "accelerate_loop", "transformers_trainer"]
)
def test_a_framework_trains_and_recovers(launch, tmp_path, script):
    calm = train(launch, tmp_path / "calm", script)
    assert calm.accidents == []
    assert without_weights(calm.endings) == expected(script, 0, STEPS)

    hurt = train(launch, tmp_path / "hurt", script, "--fail", warm="auto")
    assert [(each["rank"], each["attempt"]) for each in hurt.accidents] == [("1", "0")]
    # One epoch was saved.
    assert without_weights(hurt.endings) == expected(script, 1, STEPS - STEPS_PER_EPOCH)

    weights = [float(each["weights"]) for each in (*calm.endings, *hurt.endings)]
    assert weights == pytest.approx([weights[0]] * 4, rel=1e-6)
