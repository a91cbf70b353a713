"""Launchers that are started on a terminal."""

import os
import subprocess
import sys
import termios

import pytest
from helpers.launcher import clean_environment
from helpers.procs import HANG, run_program

pytestmark = pytest.mark.beyond_torchrun

LAUNCH = [sys.executable, "-m", "elasticrs.launch", "--redirects=0"]


def test_the_terminal_gets_its_echo_back_when_a_worker_is_killed_without_it(worker_script):
    script = worker_script("""
        import os, termios
        settings = termios.tcgetattr(0)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, settings)
        os.kill(os.getpid(), 9)
    """)
    end, terminal = os.openpty()
    try:
        done = run_program([*LAUNCH, script], stdin=terminal, env=clean_environment())
        assert done.returncode == 1
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
    finally:
        os.close(end)
        os.close(terminal)


IN_BACKGROUND = """
import fcntl, os, subprocess, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY)
sys.exit(subprocess.Popen(sys.argv[1:], process_group=0).wait())
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="process_group needs Python 3.11")
def test_workers_of_a_launcher_in_the_background_have_no_terminal_as_input(worker_script):
    script = worker_script("import os, sys; print(os.readlink('/proc/self/fd/0'), repr(sys.stdin.read()))")
    end, terminal = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", IN_BACKGROUND, *LAUNCH, script],
            stdin=terminal,
            capture_output=True,
            text=True,
            env=clean_environment(),
            timeout=HANG,
            check=False,
        )
        assert done.stdout == "/dev/null ''\n", done.stderr
    finally:
        os.close(end)
        os.close(terminal)
