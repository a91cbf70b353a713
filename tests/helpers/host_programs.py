"""Programs that launch workers from Python. They tell their results as lines of JSON."""

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.launcher import Launched, write_at_once

PRELUDE = """
import json, os, signal, sys

def own(name):
    return int(os.environ[name])

def tell(*values, **named):
    print("TOLD " + json.dumps(named or values), flush=True)

"""
STOP_TRACKER = """
# Multiprocessing leaves its resource tracker to exit by itself, some time after the program.
import multiprocessing.resource_tracker
multiprocessing.resource_tracker._resource_tracker._stop()
"""

Start = Callable[..., Launched]


@pytest.fixture
def host_program(launch: Start, tmp_path: Path) -> Start:
    """Return a function that writes and starts a program.

    ``functions`` is the source of its module, and ``main`` that of its main part. ``options`` are those of
    the interpreter.
    """

    def start(
        functions: str,
        main: str,
        *args: str,
        name: str = "host.py",
        options: tuple[str, ...] = (),
        **how: Any,
    ) -> Launched:
        program = tmp_path / name
        body = textwrap.indent(main.strip() + STOP_TRACKER, "    ")
        source = f"{PRELUDE}{functions}\nif __name__ == '__main__':\n{body}"
        write_at_once(program, source)
        return launch(program, *args, argv=[sys.executable, *options], **how)

    return start


def told(started: Launched) -> Any:
    """Check that the program exits successfully, and return the last values that it told."""
    return json.loads(started.exits(0).stdout.rsplit("TOLD ", 1)[1])
