"""The demos as modules, and as a user runs them."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.launcher import clean_environment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(request):
    """What is in the demo that the test module names."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / request.module.EXAMPLE / "demo.py")))


@pytest.fixture
def run_demo():
    """Runs a demo, which keeps its promises, and returns what it printed."""

    def run(program, *arguments):
        command = [sys.executable, EXAMPLES / program, *arguments]
        done = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
