"""Both launchers interpret random command lines in the same way."""

import os
import sys
from pathlib import Path

import pytest
from helpers.launcher import clean_environment
from helpers.procs import run_program

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.torch
def test_random_command_lines_mean_the_same():
    cases = 2000 if os.environ.get("ELASTICRS_HYPOTHESIS_PROFILE") == "thorough" else 300
    done = run_program(
        [sys.executable, "-m", "compat.command_lines", f"--cases={cases}"],
        cwd=TESTS,
        env=clean_environment({"PYTHONPATH": ":".join(filter(None, sys.path))}),
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
