"""A job of `tests/workers/steady.py`: starting it, stopping it, and checking its logs."""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helpers import procs
from helpers.launcher import Launched

SCRIPT = Path(__file__).resolve().parent.parent / "workers" / "steady.py"

WIDTH = 120
"""Bytes of a line."""

EXIT_0, EXIT_1 = signal.SIGUSR1, signal.SIGUSR2


class SteadyJob:
    """A launcher with N steady workers, with all streams tee'd.

    Args:
        launch: the fixture.
        folder: for logs and counts.
        n: number of workers.
        stubborn: workers go on when told to stop.
        env: more variables of the launcher.
        how: passed on to ``launch``.
    """

    def __init__(
        self,
        launch: Callable[..., Launched],
        folder: Path,
        n: int,
        *args: str,
        stubborn: bool = False,
        env: Mapping[str, str] = MappingProxyType({}),
        **how: Any,
    ) -> None:
        self.n = n
        self.logs, self._counts = folder / "logs", folder / "counts"
        self._counts.mkdir()
        own = {"COUNTS": str(self._counts)} | ({"STUBBORN": "1"} if stubborn else {})
        arguments = ("--nproc-per-node", str(n), "--log-dir", self.logs, "--tee", "3", *args, SCRIPT)
        self.launched = launch(*arguments, env={**own, **env}, **how)

    def ready(self, attempt: int = 0, count: int | None = None) -> dict[int, int]:
        """Wait until ``count`` workers of an attempt are running (by default, all), and return their pids by
        rank.
        """
        pattern = rf"READY (\d+) {attempt} (\d+)"
        lines = self.launched.wait_for_lines(pattern, self.n if count is None else count, "stderr")
        return {int(line[1]): int(line[2]) for line in lines}

    def nursery(self) -> int:
        """Return the pid of the nursery, the process between the launcher and the workers."""
        (found,) = procs.nurseries(self.launched.pid)
        return found.pid

    def check_logs(self, *, is_console_complete: bool = True) -> None:
        """Assert that every line that the kernel accepted is in its file, in order.

        Args:
            is_console_complete: all of them are on the console as well (not so when the launcher was killed).
        """
        in_files = self.check_files(self.logs)
        if is_console_complete:
            lines = re.findall(r"^\[default(\d+)\]:\d+$", self.launched.stdout, re.MULTILINE)
            assert Counter(lines) == +in_files

    def check_files(self, logs: Path) -> Counter[str]:
        """Assert that each log file contains exactly the bytes that the kernel accepted from its worker.

        Args:
            logs: the log directory, wherever it can be seen now.

        Returns:
            The number of lines of each rank.
        """
        in_files: Counter[str] = Counter()
        for count in self._counts.iterdir():
            rank, attempt = count.name.split(".")
            (log,) = logs.glob(f"*/attempt_{attempt}/{rank}/stdout.log")
            written, accepted = log.read_bytes(), int(count.read_bytes() or b"0")
            # A worker may be killed between a write and the update of the count.
            assert accepted <= len(written) <= accepted + WIDTH, log
            lines = b"".join(b"%0*d\n" % (WIDTH - 1, number) for number in range(len(written) // WIDTH + 1))
            assert lines.startswith(written), log
            in_files[rank] += written.count(b"\n")
        return in_files


def send(pid: int, signum: int) -> None:
    """Send a signal to a worker. Ignore a worker that has exited."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return
