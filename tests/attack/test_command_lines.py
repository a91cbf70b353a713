"""Compare elasticrun with torchrun for every way to specify the workers' program, also through wrappers of
the launcher.
"""

import subprocess
import sys

import pytest
from helpers.launcher import LAUNCHERS

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.beyond_torchrun]

SHOW = """\
import os, sys
shown = sys.argv, __name__, sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions
os.write(1, b"SHOWN %r\\n" % (shown,))
"""
PROGRAMS = {
    "script": ["show.py"],
    "in a folder": ["folder/../show.py"],
    "folder": ["package"],
    "code": ["--", "-c", "CODE"],
    "code with options": ["--", "-OBc", "CODE"],
    "X": ["--", "-X", "dev", "show.py"],
    "W": ["--", "-W", "error", "show.py"],
    "Wjoined": ["--", "-Werror", "show.py"],
    "O": ["--", "-OO", "show.py"],
    "m": ["--", "-O", "-m", "package"],
    "module": ["-m", "package"],
    "stdin": ["-"],
    "/dev/stdin": ["/dev/stdin"],
    "long": ["--", "--check-hash-based-pycs", "never", "show.py"],
    "no python": ["--no-python", sys.executable, "-O", "show.py"],
}
MAIN = "import sys; from {module} import main; main(sys.argv[1:])"
WRAPPED = {
    "elasticrun": LAUNCHERS["elasticrs"],
    "python -m elasticrs": (sys.executable, "-m", "elasticrs"),
    "main": (sys.executable, "-c", MAIN.format(module="elasticrs.run")),
    "shell": ("sh", "-c", '"$@"', "sh", *LAUNCHERS["elasticrs"]),
}


@pytest.fixture
def shown(launch, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "folder").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text(SHOW)

    def show(launcher, program):
        words = [SHOW if word == "CODE" else word for word in program]
        launched = launch(*words, "a", "--b", argv=launcher, cwd=tmp_path, stdin=subprocess.PIPE)
        launched.feed(SHOW.encode())
        launched.end_stdin()
        launched.exits(0)
        return launched.wait_for_line("^SHOWN .*$", "stdout")[0]

    return show


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run_as_with_torchrun(shown, program):
    reference = shown(LAUNCHERS["torchrun"], PROGRAMS[program])
    for name, launcher in WRAPPED.items():
        if name != "main" or program != "no python":
            assert shown(launcher, PROGRAMS[program]) == reference, name
