"""A worker finds the user's own modules, whatever was imported before it was forked."""

import pytest

SCRIPT = """
import os
import a_library, colorsys
os.write(1, f"{colorsys.__doc__} {a_library.colorsys.__doc__}\\n".encode())
"""


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_module_beside_the_script_wins_over_the_librarys(launch, worker_script, tmp_path, is_beside):
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "a_library.py").write_text("import json, colorsys")
    script = worker_script(SCRIPT)
    (script.parent / ("colorsys.py" if is_beside else "another.py")).write_text("'''mine'''")
    started = launch("--warm=auto", script, env={"PYTHONPATH": str(folder)})
    assert started.wait() == 0, started.stderr
    left_out = "warm: a_library was left out: it imports colorsys, which also lies beside the script"
    assert (left_out in started.stderr) is (started.stdout == "mine mine\n") is is_beside
