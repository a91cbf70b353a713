"""Trainers that a wrapper starts. They save on SIGTERM, although the signal kills the wrapper."""

import os
import re
import signal
import sys
import textwrap

import pytest

pytestmark = pytest.mark.beyond_torchrun

TRAINER = """
    import os, signal, sys
    rank, fifo = os.environ["RANK"], os.open("go", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(fifo, True)
    def tell(what):
        os.write(2, (what + " " + rank + chr(10)).encode())
    def save(*_):
        tell("SAVING")
        os.read(fifo, 1)  # The test decides when the checkpoint is complete.
        open(f"saved.{rank}", "w").close()
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1:] == ["ignore"] else save)
    tell("READY")
    if sys.argv[1:] == ["crash"] and rank == "1":
        os.read(fifo, 1)
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        signal.pause()
"""
SHELL = ("--no-python", "/bin/sh", "-c", f'{sys.executable} trainer.py "$@"; true', "sh")
WRAPPERS = {
    "shell": SHELL,
    "pipe": ("--no-python", "/bin/sh", "-c", f'{sys.executable} trainer.py "$@" | cat', "sh"),
    "program": ("wrapper.py",),
}
NEVER = "--shutdown-timeout=3000"
"""Option with a timeout that is longer than the test's time limit. The launcher never waits for it."""


@pytest.fixture
def go(tmp_path):
    """Return a function that lets two ranks complete their checkpoints."""
    (tmp_path / "trainer.py").write_text(textwrap.dedent(TRAINER))
    wrapper = "import subprocess, sys\nsubprocess.run([sys.executable, 'trainer.py', *sys.argv[1:]])\n"
    (tmp_path / "wrapper.py").write_text(wrapper)
    os.mkfifo(tmp_path / "go")
    fifo = os.open(tmp_path / "go", os.O_RDWR)
    yield lambda count=2: os.write(fifo, count * b"x")
    os.close(fifo)


def saved(folder):
    return sorted(path.name for path in folder.glob("saved.*"))


@pytest.mark.parametrize(
    ("wrapper", "scope"), [("shell", "group"), ("shell", "worker"), ("pipe", "group"), ("program", "worker")]
)
def test_a_trainer_saves_after_the_stop_signal_has_ended_its_wrapper(launch, tmp_path, go, wrapper, scope):
    launched = launch("--nproc-per-node=2", f"--stop-scope={scope}", NEVER, *WRAPPERS[wrapper])
    launched.wait_for_lines("READY", 2)
    launched.signal(signal.SIGTERM)
    launched.wait_for_lines("SAVING", 2)
    go()
    assert launched.wait() == 1
    assert saved(tmp_path) == ["saved.0", "saved.1"]
    assert launched.stderr.count("SAVING") == 2, "each has got the signal once"
    assert "killed" not in launched.stderr


def test_a_trainer_in_a_wrapper_saves_when_another_rank_fails(launch, tmp_path, go):
    launched = launch("--nproc-per-node=2", NEVER, *SHELL, "crash")
    launched.wait_for_lines("READY", 2)
    go(1)
    launched.wait_for_line("SAVING 0")
    go(2)
    assert launched.wait() == 1
    assert "saved.0" in saved(tmp_path)


def test_a_save_that_takes_too_long_is_reported(launch, tmp_path, go):
    launched = launch("--nproc-per-node=2", "--shutdown-timeout=1", *SHELL)
    launched.wait_for_lines("READY", 2)
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 1
    assert re.search(r"ranks 0, 1 .*\b1 s after SIGTERM\b", launched.stderr)
    assert "incomplete" in launched.stderr
    assert saved(tmp_path) == []


def test_a_helper_that_ignores_the_stop_signal_does_not_delay_the_end(launch, go):
    launched = launch("--nproc-per-node=2", NEVER, *SHELL, "ignore")
    launched.wait_for_lines("READY", 2)
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 1
