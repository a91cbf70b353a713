"""A worker finds the user's own modules, even if other modules with the same names were imported before."""

import pytest
from helpers.said import has

SCRIPT = """
import os
import a_library, colorsys
os.write(1, f"{colorsys.__doc__} {a_library.colorsys.__doc__}\\n".encode())
"""


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_module_beside_the_script_wins_over_the_standard_library(launch, worker_script, is_beside, library):
    env = library(a_library="import json, colorsys")
    script = worker_script(SCRIPT)
    (script.parent / ("colorsys.py" if is_beside else "another.py")).write_text("'''mine'''")
    started = launch("--warm=auto", script, env=env)
    assert started.wait() == 0, started.stderr
    left_out = has(started.stderr, "warm: a_library ", " colorsys")
    assert left_out is (started.stdout == "mine mine\n") is is_beside
