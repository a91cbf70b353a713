"""A launcher in a separate process and session, with methods that wait for its output and exit."""

import atexit
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import elasticrs
from helpers import procs
from helpers.procs import HANG

FOREIGN = re.compile(
    r"PET_|TORCHELASTIC_|TORCH_ELASTIC|ELASTICRS_|SLURM_|KUBE|(JOB_COMPLETION_INDEX|OMP_NUM_THREADS|NO_COLOR|PYTHONUNBUFFERED|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?RANK)$"
)
"""Variables of the surrounding environment that would change a launcher, or tear the lines of workers."""

NO_TIME = {"PET_LOG_PREFIX": "none"}
CONTROL = {"ELASTICRS_CONTROL_DIR": f"{tempfile.gettempdir()}/control-of-test-{os.getpid()}"}
"""Folder of the control sockets of all launchers of this process, because killed ones leave theirs behind."""
atexit.register(shutil.rmtree, CONTROL["ELASTICRS_CONTROL_DIR"], ignore_errors=True)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of the tests without variables that affect a launcher, and with ``extra``.

    The launcher's lines have no time, because many tests compare whole lines.
    """
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return {**kept, **NO_TIME, **CONTROL, **(extra or {})}


def _in_line(pattern: str, line: str) -> list[re.Match[str]]:
    found = list(re.finditer(pattern, line))
    return [match for match in found if match[0]] or found[:1]


class Launched:
    """A running launcher. All of its output is kept, and a wait for a line searches the output from the
    start.

    The pipes are read only while something waits here: a launcher that writes more than a pipe holds needs
    :meth:`wait_for_line` or :meth:`wait`, and a test of back-pressure simply does not wait.

    ``start`` is what starts the process: :class:`subprocess.Popen`, or what takes its arguments.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int = subprocess.DEVNULL,
        ignore: Sequence[signal.Signals] = (),
        start: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        # The launcher inherits signals that this process ignores. subprocess offers no other way to pass
        # them.
        previous = {signum: signal.signal(signum, signal.SIG_IGN) for signum in ignore}
        try:
            self._process: subprocess.Popen[bytes] = start(
                [os.fspath(each) for each in argv],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
        self.pid: int = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._pipes = {self._process.stdout.fileno(): "stdout", self._process.stderr.fileno(): "stderr"}
        for fd in self._pipes:
            os.set_blocking(fd, False)

    # --- output ----------------------------------------------------------------------------------------

    @property
    def stdout(self) -> str:
        return self._output["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._output["stderr"].decode(errors="replace")

    @property
    def stdout_bytes(self) -> bytes:
        """All of the standard output so far, as bytes."""
        return bytes(self._output["stdout"])

    def wait_for_line(self, pattern: str, stream: str | None = None) -> re.Match[str]:
        """Wait for the first complete line that contains ``pattern``, in ``"stdout"``, ``"stderr"`` or
        either.
        """
        return self.wait_for_lines(pattern, 1, stream)[0]

    def wait_for_lines(self, pattern: str, count: int, stream: str | None = None) -> list[re.Match[str]]:
        """Wait for ``count`` matches in complete lines. One line may contain two matches, because an
        unbuffered ``print`` writes text and newline separately.

        Raises:
            AssertionError: the launcher ended or hung without having written them; shows its output.
        """
        deadline = time.monotonic() + HANG
        while len(found := self._matches(pattern, stream)) < count:
            ended = not self._pump(deadline)
            if ended and len(found := self._matches(pattern, stream)) < count:
                raise AssertionError(self._story(f"{len(found)} of {count} lines match {pattern!r}"))
        return found[:count]

    def _matches(self, pattern: str, stream: str | None) -> list[re.Match[str]]:
        texts = [
            self._output[name].decode(errors="replace") for name in ((stream,) if stream else self._output)
        ]
        lines = [line for text in texts for line in text.split("\n")[:-1]]
        return [match for line in lines for match in _in_line(pattern, line)]

    # --- process ---------------------------------------------------------------------------------------

    @property
    def has_exited(self) -> bool:
        return procs.wait_readable(self.pidfd, 0)

    def sources(self) -> list[int]:
        """Return the descriptors to poll. One becomes readable when there is output, or when the launcher has
        exited.
        """
        return [*self._pipes, self.pidfd]

    def read_for(self, seconds: float) -> None:
        """Read output for this time, or until the launcher exits. For tests that act at a random moment."""
        deadline = time.monotonic() + seconds
        while self._pump(deadline):
            pass

    def wait(self, timeout: float = HANG) -> int:
        """Wait until the launcher exits. Return its exit code, or the negative number of the signal that
        killed it.

        Raises:
            AssertionError: it hung; the message has its output and its processes.
        """
        deadline = time.monotonic() + timeout
        while self._pump(deadline):
            pass
        if not self.has_exited:
            below = "\n".join(map(str, self.descendants()))
            raise AssertionError(self._story(f"does not end within {timeout} s; below it:\n{below}"))
        return self._process.wait()

    def exits(self, code: int, timeout: float = HANG) -> "Launched":
        """Wait until the launcher exits, which must be with this exit code.

        Raises:
            AssertionError: it hung, or ended otherwise; the message has its output.
        """
        ended = self.wait(timeout)
        assert ended == code, self._story(f"ended with {ended}, not {code}")
        return self

    def feed(self, data: bytes) -> None:
        """Write to the launcher's stdin, which must be :data:`subprocess.PIPE`."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), data)

    def end_stdin(self) -> None:
        """Close the launcher's stdin, which must be :data:`subprocess.PIPE`."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def signal(self, signum: int) -> None:
        """Send a signal to the launcher only."""
        signal.pidfd_send_signal(self.pidfd, signum)

    def insist(self, signum: int) -> None:
        """Repeat a signal until the launcher exits, because it treats repeated signals within a short time as
        one.
        """
        deadline = time.monotonic() + HANG
        while not self.has_exited and time.monotonic() < deadline:
            self.signal(signum)
            self.read_for(0.2)

    def wait_stopped(self) -> None:
        """Wait until a signal has stopped the launcher."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED)

    def descendants(self) -> list[procs.Process]:
        return procs.descendants(self.pid)

    def close(self) -> bool:
        """Kill the launcher if it is still running, and release all resources. Return true if it had already
        exited.
        """
        ended = self.has_exited
        if not ended:
            self.signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self.pidfd)
        return ended

    def _pump(self, deadline: float) -> bool:
        """Wait for output and read it. Return false at the deadline, or if the launcher has exited and all
        output has been read.
        """
        poll = select.poll()
        for fd in (*self._pipes, self.pidfd):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        # An escaped process may hold the pipes open forever. Once the launcher has exited, only read what is
        # in them.
        took = [self._take(fd) for fd in list(self._pipes) if fd in ready or self.pidfd in ready]
        return any(took) or (bool(ready) and self.pidfd not in ready)

    def _take(self, fd: int) -> bool:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        self._output[self._pipes[fd]] += chunk
        if not chunk:
            del self._pipes[fd]
        return bool(chunk)

    def _story(self, what: str) -> str:
        return f"{what}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}\n---"


def write_at_once(path: Path, source: str) -> None:
    """Write or replace a program, which a process that was started before may be reading."""
    complete = path.with_name(f"{path.name}.complete")
    complete.write_text(source, encoding="utf-8")
    complete.replace(path)


LAUNCHERS = {
    "elasticrs": (sys.executable, "-m", "elasticrs.launch"),
    "torchrun": (str(Path(sys.executable).parent / "torchrun"),),
}
"""Command lines, all under this interpreter."""


def launcher_with(module: str, **values: float) -> tuple[str, ...]:
    """Return the command line of a launcher in which constants of a module have other values, so that a test
    need not wait as long as a user.

    Args:
        module: name below ``elasticrs``.
        values: the constants.
    """
    program = (
        f"import sys; from elasticrs.launch import main; import elasticrs.{module} as module;"
        f"vars(module).update({values!r}); sys.exit(main())"
    )
    return (sys.executable, "-c", program)


def launcher_with_py_spy(folder: Path, body: str, **env: str) -> dict[str, Any]:
    """Return arguments of ``launch`` for an interpreter in a folder of its own. A ``py-spy`` beside it, which
    is this shell script, is found before all others.
    """
    python = folder / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    spy = folder / "py-spy"
    spy.write_text(f"#!/bin/sh\n{body}\n")
    spy.chmod(0o755)
    packages = str(Path(elasticrs.__file__).parent.parent)
    path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
    return {"argv": (python, "-m", "elasticrs.launch"), "env": {"PYTHONPATH": packages, "PATH": path, **env}}
