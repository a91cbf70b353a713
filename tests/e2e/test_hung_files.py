"""Files that do not respond delay a restart by a limit, and never stop it."""

import pytest
from helpers.launcher import launcher_with

pytestmark = pytest.mark.beyond_torchrun

IMPATIENT = launcher_with("host.background_call", FILE_LIMIT=0.3)

PROGRAM = """
import os, signal, sys
error_file, attempt = os.environ["TORCHELASTIC_ERROR_FILE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt != "0":
    sys.exit(0)
beside = os.path.join(os.path.dirname(error_file), sys.argv[1])
path = error_file + ".fault" if sys.argv[1] == "fault" else beside
if os.path.lexists(path):
    os.unlink(path)
os.mkfifo(path)
if sys.argv[1] == "fault":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(1)
"""


@pytest.mark.parametrize("file", ["fault", "stderr.log"])
def test_a_file_that_hangs_does_not_stop_the_restart(file, launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ("--max-restarts", "1", "--log-dir", tmp_path / "logs", "--redirects", "3")
    launched = launch(*options, program, file, argv=IMPATIENT)
    launched.exits(0)
    assert launched.stderr.count("could not be read within 0.3 s") == 1
    assert "attempt 1 is running" in launched.stderr


def test_the_report_of_a_failure_whose_files_hang_names_the_exit_code(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ("--max-restarts", "0", "--log-dir", tmp_path / "logs", "--redirects", "3")
    launched = launch(*options, program, "stderr.log", argv=IMPATIENT)
    launched.exits(1)
    assert "exit code 1" in launched.stderr
    assert "its error file could not be read" in launched.stderr
