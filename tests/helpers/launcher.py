"""A launcher in a process and session of its own, watched by events."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers import procs
from helpers.procs import HANG

FOREIGN = re.compile(
    r"PET_|TORCHELASTIC_|TORCH_ELASTIC|ELASTICRS_|SLURM_|KUBE|(JOB_COMPLETION_INDEX|OMP_NUM_THREADS|NO_COLOR|PYTHONUNBUFFERED|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?RANK)$"
)
"""Variables of the surrounding environment that would change a launcher, or tear the lines of workers."""

NO_TIME = {"PET_LOG_PREFIX": "none"}


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of the tests without what would change a launcher, and with ``extra``.

    The launcher's lines have no time, because many tests compare whole lines.
    """
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return {**kept, **NO_TIME, **(extra or {})}


def _in_line(pattern: str, line: str) -> list[re.Match[str]]:
    found = list(re.finditer(pattern, line))
    return [match for match in found if match[0]] or found[:1]


class Launched:
    """A running launcher. All its output is kept; waiting for a line looks at it from the start.

    The pipes are read only while something waits here: a launcher that writes more than a pipe holds needs
    :meth:`wait_for_line` or :meth:`wait`, and a test of back-pressure simply does not wait.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int = subprocess.DEVNULL,
        ignore: Sequence[signal.Signals] = (),
    ) -> None:
        # Ignored dispositions are inherited, and subprocess offers no other way to pass them.
        previous = {signum: signal.signal(signum, signal.SIG_IGN) for signum in ignore}
        try:
            self._process = subprocess.Popen(
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
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._pipes = {self._process.stdout.fileno(): "stdout", self._process.stderr.fileno(): "stderr"}
        for fd in self._pipes:
            os.set_blocking(fd, False)

    # --- what it says ----------------------------------------------------------------------------------

    @property
    def stdout(self) -> str:
        """All of it so far."""
        return self._output["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        """All of it so far."""
        return self._output["stderr"].decode(errors="replace")

    @property
    def stdout_bytes(self) -> bytes:
        """All of it so far, as it came."""
        return bytes(self._output["stdout"])

    def wait_for_line(self, pattern: str, stream: str | None = None) -> re.Match[str]:
        """The first whole line that holds ``pattern``, in ``"stdout"``, ``"stderr"`` or either."""
        return self.wait_for_lines(pattern, 1, stream)[0]

    def wait_for_lines(self, pattern: str, count: int, stream: str | None = None) -> list[re.Match[str]]:
        """The first ``count`` matches in whole lines. Two lines may come as one, with two ends behind it:
        an unbuffered ``print`` writes text and newline apart.

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

    # --- what it does ----------------------------------------------------------------------------------

    @property
    def has_exited(self) -> bool:
        """Whether it has ended by now."""
        return procs.wait_readable(self.pidfd, 0)

    def sources(self) -> list[int]:
        """Descriptors to poll: one is readable when there is output to read, or it has ended."""
        return [*self._pipes, self.pidfd]

    def read_for(self, seconds: float) -> None:
        """Take what it writes until it ends or the time is over: for tests that act at a random moment."""
        deadline = time.monotonic() + seconds
        while self._pump(deadline):
            pass

    def wait(self, timeout: float = HANG) -> int:
        """Wait for its end; returns the exit code, or the negative number of the signal.

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
        """Wait for its end, which has this exit code.

        Raises:
            AssertionError: it hung, or ended otherwise; the message has its output.
        """
        ended = self.wait(timeout)
        assert ended == code, self._story(f"ended with {ended}, not {code}")
        return self

    def feed(self, data: bytes) -> None:
        """Write to its stdin, which has to be :data:`subprocess.PIPE`."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), data)

    def end_stdin(self) -> None:
        """Close its stdin, which has to be :data:`subprocess.PIPE`."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def signal(self, signum: int) -> None:
        """Signal the launcher alone."""
        signal.pidfd_send_signal(self.pidfd, signum)

    def insist(self, signum: int) -> None:
        """Signal the launcher until it ends: the same signal again within a moment counts as one."""
        deadline = time.monotonic() + HANG
        while not self.has_exited and time.monotonic() < deadline:
            self.signal(signum)
            self.read_for(0.2)

    def wait_stopped(self) -> None:
        """Wait until it has been stopped by a signal."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED)

    def descendants(self) -> list[procs.Process]:
        """Everything below the launcher."""
        return procs.descendants(self.pid)

    def close(self) -> bool:
        """End it if the test did not, and release everything; true when it had ended by itself."""
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
        """Wait for output and take it; false at the deadline, or when it has ended and all is read."""
        poll = select.poll()
        for fd in (*self._pipes, self.pidfd):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        # Something that escaped may hold the pipes open for ever: after its end, what is there is all.
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
