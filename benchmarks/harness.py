"""Launchers to measure, a channel for reports of the workers, and result rows.

Workers report through a FIFO, never through the launcher: what is measured must not depend on how logs are
carried. A report is one line, ``<event> <rank> <attempt> <pid> <nanoseconds>``, written at once (shorter
than PIPE_BUF).
"""

import math
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

WORKERS = Path(__file__).resolve().parent / "workers"
HANG = 60.0
MAX_LOST_TURNS = 3


class Launcher(NamedTuple):
    name: str
    command: tuple[str, ...]

    def is_there(self) -> bool:
        command = (*self.command, "--help")
        return subprocess.run(command, env=environment(), capture_output=True, check=False).returncode == 0


LAUNCHERS = (
    Launcher("torchrun", (str(Path(sys.executable).parent / "torchrun"),)),
    Launcher("elasticrs", (sys.executable, "-m", "elasticrs.launch")),
)


def stamped(launcher: Launcher) -> Launcher:
    """Return a variant of the launcher that writes the timestamps for :meth:`Run.signalled`. Return torchrun
    unchanged, because it has no such timestamps.
    """
    if launcher.name == "torchrun":
        return launcher
    _, ours = LAUNCHERS
    options = launcher.command[len(ours.command) :]
    return launcher._replace(command=(sys.executable, worker("stamped_launcher.py"), *options))


class Options(NamedTuple):
    launchers: tuple[Launcher, ...]
    is_quick: bool

    def repeats(self, usual: int, quick: int) -> int:
        return quick if self.is_quick else usual


class Row(NamedTuple):
    name: str
    launcher: str
    value: float
    unit: str
    conditions: str
    """N, load, end point: without these a figure says nothing."""

    samples: int
    is_bound: bool = False
    """It had not happened by then: the true value is larger, or there is none."""

    span: tuple[float, float] | None = None
    """The smallest and the largest measured value, if the table is to show them."""


class Report(NamedTuple):
    """A line written by a worker."""

    event: str
    rank: int
    attempt: int
    pid: int
    at_ns: int


class Reports:
    """Reading end of the channel to which the workers write reports."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        """``check`` is called at least once a second. It raises an exception if no more reports can
        arrive.
        """
        self._check = check
        os.mkfifo(path)
        # Open the FIFO for writing too, because it would otherwise report end of file between two attempts.
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._rest = b""
        self._seen: list[Report] = []

    def close(self) -> None:
        os.close(self._fd)

    def take(
        self,
        event: str,
        count: int,
        attempt: int | None = None,
        pids: Container[int] | None = None,
        timeout: float = HANG,
    ) -> list[Report]:
        """Wait for ``count`` reports of this event, attempt and these processes, and remove them from the
        queue.
        """
        found = self.peek(event, count, attempt, pids, timeout)
        self._seen = [each for each in self._seen if each not in found]
        return found

    def peek(
        self,
        event: str,
        count: int,
        attempt: int | None = None,
        pids: Container[int] | None = None,
        timeout: float = HANG,
    ) -> list[Report]:
        """Like :meth:`take`, but do not remove the reports."""
        deadline = time.monotonic() + timeout
        while True:
            found = [each for each in self._seen if _matches(each, event, attempt, pids)][:count]
            if len(found) == count:
                return found
            self._check()
            left = deadline - time.monotonic()
            if wait_readable(self._fd, min(left, 1.0)):
                *lines, self._rest = (self._rest + os.read(self._fd, 1 << 16)).split(b"\n")
                self._seen += map(_parse, lines)
            elif left <= 0:
                raise TimeoutError(f"{len(found)} of {count} workers reported {event!r} (attempt {attempt})")


def _parse(line: bytes) -> Report:
    event, *numbers = line.split()
    rank, attempt, pid, at_ns = map(int, numbers)
    return Report(event.decode(), rank, attempt, pid, at_ns)


def _matches(report: Report, event: str, attempt: int | None, pids: Container[int] | None) -> bool:
    return (
        report.event == event and attempt in {None, report.attempt} and (pids is None or report.pid in pids)
    )


class Run:
    def __init__(
        self,
        launcher: Launcher,
        arguments: Sequence[str],
        stdout: int,
        folder: Path,
        environ: Mapping[str, str],
    ) -> None:
        self.reports = Reports(folder / "reports")
        self._signalled = folder / "signalled"
        own = {"BENCH_REPORTS": str(folder / "reports"), "BENCH_SIGNALLED": str(self._signalled)}
        self.started_ns = time.monotonic_ns()
        self.process = subprocess.Popen(
            (*launcher.command, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            env=environment() | own | dict(environ),
            cwd=folder,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.usage_s = 0.0

    def wait(self) -> int:
        """Wait until the launcher has exited, and return the time. Keep the CPU time of the launcher and of
        all children that it waited for.
        """
        if not wait_readable(self.pidfd, HANG):
            raise TimeoutError("the launcher does not end")
        gone_ns = time.monotonic_ns()
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.usage_s = usage.ru_utime + usage.ru_stime
        return gone_ns

    def stop(self) -> None:
        """Stop the launcher with SIGTERM and wait for it."""
        if self.process.returncode is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
            self.wait()

    def signalled(self) -> dict[int, int]:
        """Return the time at which all siblings of the failed worker had been signalled, by attempt. Call
        this after the launcher has exited. Only the launcher from :func:`stamped` writes these timestamps.
        """
        if not self._signalled.exists():
            return {}
        lines = self._signalled.read_text(encoding="ascii").splitlines()
        return {int(attempt): int(at_ns) for attempt, at_ns in map(str.split, lines)}

    def close(self) -> None:
        self.reports.close()
        os.close(self.pidfd)


@contextmanager
def run(
    launcher: Launcher,
    *arguments: str,
    stdout: int = subprocess.DEVNULL,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Run]:
    """Start a launcher on one node. Stop it at the end of the block."""
    with TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        arguments = ("--standalone", "--log-dir", str(folder / "logs"), *arguments)
        started = Run(launcher, arguments, stdout, folder, environ)
        try:
            yield started
        finally:
            started.stop()
            started.close()


def environment() -> dict[str, str]:
    """Return this process's environment, without settings that would slow down one launcher more than
    another.
    """
    # Exclude the warning about OMP_NUM_THREADS and the missing .pyc files from the comparison.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1"}


def wait_readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def worker(name: str) -> str:
    return str(WORKERS / name)


def take_turns(options: Options, rounds: int, measure: Callable[[Launcher], None]) -> None:
    """Measure the launchers alternately (A B A B …), ``rounds`` times each.

    A turn in which the launcher hung is told of, and repeated; what it had measured before counts.
    """
    lost = 0
    for number in range(rounds):
        for launcher in options.launchers:
            print(f"  {launcher.name} {number + 1}/{rounds}", end="\r", file=sys.stderr, flush=True)
            while True:
                try:
                    measure(launcher)
                    break
                except TimeoutError as error:
                    lost += 1
                    print(
                        f"  {launcher.name} {number + 1}/{rounds} hung: {error}", file=sys.stderr, flush=True
                    )
                    if lost > MAX_LOST_TURNS:
                        raise
    print(" " * 40, end="\r", file=sys.stderr)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that is not exceeded by at least ``percent`` percent of all values."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def time_box(seconds: float, at_most: int) -> Iterator[int]:
    """Count from 0 until the time is over, and at least once. A slow launcher gets fewer samples instead of
    more time.
    """
    deadline = time.monotonic() + seconds
    for number in range(at_most):
        yield number
        if time.monotonic() >= deadline:
            return


class Samples:
    def __init__(self, options: Options) -> None:
        self._values: dict[str, list[float]] = {launcher.name: [] for launcher in options.launchers}
        self._limits: dict[str, float] = {}

    def add(self, launcher: Launcher, *values: float) -> None:
        self._values[launcher.name] += values

    def add_limit(self, launcher: Launcher, limit: float) -> None:
        """Record that the event had not happened when ``limit`` was reached. All samples have the
        same limit.
        """
        self._limits[launcher.name] = limit
        self.add(launcher, limit)

    def rows(
        self,
        name: str,
        unit: str,
        conditions: str,
        pick: Callable[[Sequence[float]], float] = median,
        *,
        has_span: bool = False,
    ) -> list[Row]:
        return [
            Row(
                name,
                launcher,
                value,
                unit,
                conditions,
                len(values),
                value >= self._limit(launcher),
                (min(values), max(values)) if has_span else None,
            )
            for launcher, values in self._values.items()
            if values
            for value in [pick(values)]
        ]

    def _limit(self, launcher: str) -> float:
        return self._limits.get(launcher, math.inf)
