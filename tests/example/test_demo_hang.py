"""The example of a rank that hangs, and what its demo makes of a run."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.launcher import clean_environment

DIRECTORY = Path(__file__).parents[2] / "examples" / "hang"
HANG = 240

GOOD = [
    "epoch 1/6: loss 0.0935\n",
    "elasticrs: rank 2 (pid 7): hung: no heartbeat for 3.00 s (limit 3 s); stopped at step 57;"
    " 3 others stopped; restarting, 1 of 2 left (2026-01-01 00:00:00)\n",
    "resumed after epoch 2\n",
    "final accuracy on held-out data: 98.61%\n",
]
EVIDENCE = """no sign of life for 3.000 s

Current thread 0x00007f0000000002 (most recent call first):
  File "distributed_c10d.py", line 5000 in barrier
  File "train.py", line 94 in hang_if_told

threads in the kernel: state, name, wait channel, stack
"""


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hang_demo", DIRECTORY / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_good_run_is_told(demo: ModuleType) -> None:
    story = demo.tell(0, GOOD, EVIDENCE)
    assert story.broken == []
    assert '    File "train.py", line 94 in hang_if_told' in story.account
    assert "  rank 2 hung: no heartbeat for 3.00 s (limit 3 s); stopped at step 57" in story.account


@pytest.mark.parametrize(
    ("exitcode", "line", "instead", "evidence", "broken"),
    [
        (1, 0, "", EVIDENCE, "the launcher ended with exit code 1"),
        (0, 1, "", EVIDENCE, "nobody was found to hang"),
        (0, 1, GOOD[1].replace("rank 2", "rank 0"), EVIDENCE, "not rank 2 was blamed, but rank 0"),
        (0, 0, "", "no Python stacks", "its stack was not kept"),
        (0, 2, "", EVIDENCE, "resumed after epochs [], not once after epoch 2"),
        (0, 3, "", EVIDENCE, "no final accuracy"),
        (0, 3, GOOD[3].replace("98.61", "95.00"), EVIDENCE, "the accuracy is not above 95.0 %"),
    ],
)
def test_a_broken_promise_is_named(
    demo: ModuleType, exitcode: int, line: int, instead: str, evidence: str, broken: str
) -> None:
    lines = [*GOOD[:line], instead, *GOOD[line + 1 :]]
    assert demo.tell(exitcode, lines, evidence).broken == [broken]


@pytest.mark.slow
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    command = [sys.executable, str(DIRECTORY / "demo.py"), "--keep", str(tmp_path)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in barrier" in done.stdout
