"""Both launchers interpret random command lines in the same way."""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.torch
def test_random_command_lines_are_interpreted_as_by_torchrun(torch_programs):
    cases = 2000 if os.environ.get("ELASTICRS_HYPOTHESIS_PROFILE") == "thorough" else 300
    done = torch_programs.run_module("compat.command_lines", TESTS, f"--cases={cases}")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
