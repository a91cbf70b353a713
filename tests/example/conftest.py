"""Fixtures that load the demos as modules, and run them as a user would."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.launcher import clean_environment
from helpers.procs import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(request):
    """Return the contents of the demo that the test module's ``EXAMPLE`` names."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / request.module.EXAMPLE / "demo.py")))


@pytest.fixture
def run_demo():
    """Return a function that runs a demo, asserts that it succeeds, and returns its output."""

    def run(program, *arguments, timeout=280):
        command = [sys.executable, EXAMPLES / program, *arguments]
        done = run_program(command, timeout=timeout, env=clean_environment())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
