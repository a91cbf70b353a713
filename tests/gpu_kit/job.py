"""A job that the kit launches, and the events that its workers report through a FIFO."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER = ("-m", "elasticrs.launch")
LEADING = ("--standalone", "--shutdown-timeout", "3")


Figures = dict[str, Any]
"""Measurements of a check, by name."""
CONTEXT_BYTES = 128 << 20
"""Maximum difference of the free device memory between two attempts. The sizes of CUDA contexts vary."""


class CheckFailedError(Exception):
    """Raised if a check fails. The message says what the check found."""


class Skipped(Exception):  # noqa: N818 -- a skipped check is no error
    """Raised if a check cannot run on this machine. The message says why."""


def expect(condition: object, message: str) -> None:
    if not condition:
        raise CheckFailedError(message)


class Context(NamedTuple):
    """Arguments that every check gets.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        gpus: the number of GPUs; 0 with ``"cpu"``.
        nccl: the version of NCCL, such as ``(2, 30, 7)``; ``None`` with ``"cpu"``.
        folder: an existing folder for the files of this check.
        deadline: the time limit of the check, in seconds of the monotonic clock.
        environment: the environment variables of the launcher.
    """

    device: str
    gpus: int
    nccl: tuple[int, ...] | None
    folder: Path
    deadline: float
    environment: dict[str, str]


class Job:
    """A program of the kit, run with ``elasticrun``. Leaving the context manager stops the launcher."""

    def __init__(
        self,
        context: Context,
        options: Sequence[str],
        program: str,
        arguments: Sequence[str] = (),
        variables: dict[str, str] | None = None,
        launcher: Sequence[str] = LAUNCHER,
    ) -> None:
        self._context = context
        self.seen: list[dict[str, Any]] = []
        self._partial = b""
        fifo = context.folder / "events"
        os.mkfifo(fifo)
        # Also open the FIFO for writing. Otherwise, this process would see the end of the file while no
        # worker has it open.
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._output = context.folder / "output.txt"
        self.events = context.folder / "events.jsonl"
        environment = {
            **context.environment,
            "KIT_DEVICE": context.device,
            "KIT_EVENTS": str(fifo),
            **(variables or {}),
        }
        self.report = context.folder / "report.json"
        command = [sys.executable, *launcher, *LEADING, "--log-dir", str(context.folder / "logs")]
        command += ["--report", f"file:{self.report}"]
        command += ["--event-log-handler", f"file:{self.events}", *options]
        command += [str(PROGRAMS / program), *arguments]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=context.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Job":  # noqa: PYI034 -- `Self` needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        os.close(self._fifo)

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, what: str, count: int = 1, **facts: object) -> list[dict[str, Any]]:
        """Wait for events of one kind.

        Args:
            what: the kind of the events, as the programs report it.
            count: the number of events to wait for.
            facts: values that the events must have.

        Returns:
            The first ``count`` matching events.

        Raises:
            CheckFailedError: the job ended, or the time was over, before there were enough events.
        """

        def matching() -> list[dict[str, Any]]:
            return [
                event
                for event in self.seen
                if event["what"] == what and all(event.get(name) == value for name, value in facts.items())
            ]

        self._until(lambda: len(matching()) >= count, f"{count} events {what!r} {facts or ''}")
        return matching()[:count]

    def exits(self, expected: int = 0) -> None:
        """Wait until the launcher exits.

        Raises:
            CheckFailedError: the exit code was not ``expected``, or the launcher did not exit in time.
        """
        self._until(lambda: self._process.poll() is not None, "the end of the launcher", may_end=True)
        if self._process.returncode != expected:
            raise CheckFailedError(
                f"elasticrun ended with exit code {self._process.returncode}, not {expected}: {self._last()}"
            )

    def job_events(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this name from the event log of the launcher, which must have exited."""
        lines = self.events.read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["name"] == name]

    def _until(self, is_there: Callable[[], bool], wanted: str, *, may_end: bool = False) -> None:
        while not is_there():
            # Poll the process before reading: if it has exited, all of its events have been written and can
            # be read now.
            has_ended = self._process.poll() is not None
            left = self._context.deadline - time.monotonic()
            if left <= 0:
                raise CheckFailedError(f"no {wanted} in time: {self._last()}")
            if select.select([self._fifo], [], [], min(left, 0.1))[0]:
                self._read()
            elif has_ended and not may_end:
                raise CheckFailedError(f"the job ended before {wanted}: {self._last()}")

    def _read(self) -> None:
        *lines, self._partial = (self._partial + os.read(self._fifo, 1 << 16)).split(b"\n")
        self.seen += map(json.loads, lines)

    def _last(self) -> str:
        return " | ".join(self.output.strip().splitlines()[-12:])
