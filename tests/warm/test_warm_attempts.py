"""Tests for attempts whose workers are forked from a nursery that has imported modules."""

import ast
import sys
from pathlib import Path

from helpers.said import line_with

from elasticrs import _worker

EDITS = """
    import os, sys
    import own_library
    print("SEEN", own_library.VALUE, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with open(own_library.__file__, "w") as file:
            file.write("VALUE = 'edited'")
        sys.exit(3)
"""


def test_an_edited_module_is_imported_again_before_the_next_attempt(launch, worker_script, tmp_path):
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "own_library.py").write_text("VALUE = 1")
    options = ("--standalone", "--max-restarts=1", "--warm=own_library")
    launched = launch(*options, worker_script(EDITS), env={"PYTHONPATH": str(folder)}).exits(0)
    seen = [line.split()[1:] for line in launched.stdout.splitlines() if line.startswith("SEEN")]
    assert seen == [["1", "0"], ["edited", "1"]]
    assert "own_library.py has changed" in launched.stderr


def test_workers_have_the_imported_modules_and_start_without_missing_ones(launch, worker_script):
    script = worker_script("import os, sys\nos.write(1, b'%d\\n' % ('colorsys' in sys.modules))")
    launched = launch("--standalone", "--nproc-per-node=2", "--warm=colorsys", script).exits(0)
    assert launched.stdout.splitlines() == ["1", "1"]


def test_an_interpreter_that_is_a_script_gets_no_nursery(launch, worker_script, tmp_path):
    """A wrapper script gets no nursery. If it unset PYTHONPATH, as here, the nursery would run the user's
    script without a rank.
    """
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    script = worker_script("import os\nos.write(1, f\"rank {os.environ.get('RANK')}\\n\".encode())")
    env = {"PYTHON_EXEC": str(wrapper)}
    launched = launch("--standalone", "--nproc-per-node=2", "--warm=json", script, env=env).exits(0)
    assert sorted(launched.stdout.splitlines()) == ["rank 0", "rank 1"]
    line_with(launched.stderr, "no effect", "wrapper ")


def test_sitecustomize_of_the_nursery_parses_with_old_pythons():
    """The nursery's `sitecustomize.py` parses in Python 3.4. After a syntax error there, Python would
    continue with the user's script.
    """
    source = Path(_worker.__file__).parent / "nursery/sitecustomize.py"
    assert ast.parse(source.read_text(), feature_version=(3, 4))


def test_an_empty_pythonpath_is_ignored(launch, worker_script):
    script = worker_script("import os, sys\nos.write(1, f'{sys.path[1:]}\\n'.encode())")
    env = {"PYTHONPATH": "", "ELASTICRS_TRACEBACKS": "0"}
    cold, warm = (launch("--standalone", f"--warm={it}", script, env=env).exits(0) for it in ("off", "json"))
    assert warm.stdout == cold.stdout
