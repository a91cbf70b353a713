"""Start etcd so that it ends with its parent, and stop it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL when etcd is stopped."""

_LAUNCHER = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def watch(parent: int) -> tuple[int, int] | None:
    """Start to watch the parent process, and catch the signals that ask this process to stop.

    Returns:
        Two file descriptors. The first becomes readable when the parent exits, the second when a signal
        arrives. ``None`` if the parent has already exited.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return None
    return (watched, reader) if os.getppid() == parent else None


def spawn(
    command: list[str], stderr: int | None = None, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a program that the kernel kills when the calling thread exits.

    An intermediate Python process sets up the parent-death signal and then executes the program, because a
    process with several threads cannot safely run Python code between fork and exec.

    Args:
        command: absolute path of the program, and its arguments.
        stderr: file descriptor for the program's standard error. If ``None``, it is inherited.
        pass_fds: file descriptors that the program inherits.
    """
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
    return subprocess.Popen([*launcher, *command], stderr=stderr, pass_fds=pass_fds)


def end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Terminate a child process and wait for its exit. Send SIGTERM first, then SIGKILL after ``grace``
    seconds.
    """
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def find_program() -> str:
    """Return the path of the etcd program: the value of ``TORCHELASTIC_ETCD_BINARY_PATH`` if it is set,
    otherwise the path of ``etcd`` on ``PATH``.

    Raises:
        FileNotFoundError: etcd was not found. The message says how to install it.
    """
    given = os.environ.get("TORCHELASTIC_ETCD_BINARY_PATH")
    found = shutil.which(given or "etcd")
    if found is not None:
        return os.path.abspath(found)
    why = f"{given!r} (TORCHELASTIC_ETCD_BINARY_PATH) is no program" if given else "etcd is not in PATH"
    raise FileNotFoundError(
        f"{why}: install it (Debian, Ubuntu: apt-get install etcd-server; others: "
        "https://github.com/etcd-io/etcd/releases), or set TORCHELASTIC_ETCD_BINARY_PATH to its path"
    )
