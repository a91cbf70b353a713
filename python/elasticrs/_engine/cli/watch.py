"""``elasticctl status --watch``: the status of a job on the whole terminal, and keys that act on the job."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

from elasticrs._engine.cli.control_client import Problem
from elasticrs._engine.cli.log_lines import LogLines
from elasticrs._engine.cli.stacks_text import spied, text
from elasticrs._engine.process.console import visible
from elasticrs._engine.supervise.observe.status_text import letters, ranks_table, remarks, sentence
from elasticrs._engine.supervise.run.orders import DONE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from elasticrs._engine.cli.control_client import Agent

_PERIOD = 1.0
"""Seconds between two requests to the agent for the job's status."""

_LOG_LINES = 5
_KEYS = " t stacks  l logs  r restart  s stop  h help  q quit "
_HELP = [
    "t  where each rank is, and who waits for whom",
    "l  the last lines of the workers' log files",
    "r  restart all workers of the job, after a question",
    "s  stop the job, after a question",
    "h  these lines",
    "q  leave this screen; the job goes on",
]
_ORDERS = {"r": "restart", "s": "stop"}
"""Orders to the agent, by the key that sends them, after the user has confirmed."""

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def screen(status: dict[str, Any], below: list[str], footer: str, width: int, height: int) -> list[str]:
    """Return the lines to show: the job's status, its ranks, what a key has asked for (``below``), keys."""
    lines = [sentence(status), *remarks(status), "", *ranks_table(status), *letters(status), "", *below]
    shown = [visible(line)[:width] for line in lines[: height - 1]]
    return [*shown, *[""] * (height - 1 - len(shown)), footer[:width]]


@contextmanager
def _whole_terminal(fd: int) -> Iterator[None]:
    before = termios.tcgetattr(fd)
    # Exit by an exception on SIGTERM, so that the terminal is restored, and shows again what is typed.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        tty.setcbreak(fd)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, previous)


class Watch:
    """Shows the status of a job on the terminal until the job ends or the user quits."""

    def __init__(self, agent: Agent, status: dict[str, Any]) -> None:
        self._agent, self._status = agent, status
        self._below: list[str] = []
        self._question: str | None = None

    def run(self) -> None:
        """Show the job. Raises :class:`.Problem` if the agent does not answer any more."""
        fd = sys.stdin.fileno()
        with _whole_terminal(fd):
            while True:
                self._draw()
                if select.select([fd], [], [], _PERIOD)[0]:
                    key = os.read(fd, 1).decode("ascii", "replace")
                    if key in ("q", "", "\x04") and self._question is None:
                        return
                    self._on_key(key)
                else:
                    self._status = self._agent.with_others(self._agent.asked_again())

    def _draw(self) -> None:
        width, height = os.get_terminal_size(sys.stdout.fileno())
        footer = _KEYS if self._question is None else f" {self._question} this job? y yes, any other key no "
        lines = screen(self._status, self._below, footer, width, height)
        *rest, last = (f"{line}{_END_OF_LINE}" for line in lines)
        sys.stdout.write(_HOME + "\r\n".join([*rest, f"\x1b[7m{last}\x1b[0m"]) + _END_OF_SCREEN)
        sys.stdout.flush()

    def _on_key(self, key: str) -> None:
        question, self._question = self._question, None
        try:
            if question is not None:
                self._below = self._asked({"do": question}) if key == "y" else []
            elif key in _ORDERS:
                self._question = _ORDERS[key]
            elif key in ("h", "?"):
                self._below = _HELP
            elif key == "t":
                self._below = self._stacks()
            elif key == "l":
                self._below = self._log_lines()
        except Problem as problem:
            self._below = [str(problem)]

    def _asked(self, order: dict[str, Any]) -> list[str]:
        # Do not wait for further lines of the answer, because the status shows what happens then.
        return [str(answer.get("message")) for answer in islice(self._agent.ask(order), 1)]

    def _stacks(self) -> list[str]:
        (answer,) = self._agent.ask({"do": "stacks"})
        return text(spied(answer), is_whole=False) if answer["code"] == DONE else [str(answer["message"])]

    def _log_lines(self) -> list[str]:
        lines = LogLines(self._agent, self._status, rank=None, events=False, count=_LOG_LINES)
        try:
            return [line.decode(errors="replace") for line in lines.new_lines()]
        finally:
            lines.close()
