"""``elasticctl status --watch``: the status of a job on the whole terminal, and keys that act on the job."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from contextlib import contextmanager
from textwrap import wrap
from threading import Event, Thread
from typing import TYPE_CHECKING

from elasticrs._engine.cli.control_client import SIGNAL_LIMIT, Problem
from elasticrs._engine.cli.log_lines import LogLines
from elasticrs._engine.cli.stacks_text import spied, text
from elasticrs._engine.process.console import visible
from elasticrs._engine.supervise.observe.status_text import letters, ranks_table, remarks, sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from elasticrs._engine.cli.control_client import Agent

_PERIOD = 1.0
"""Seconds between two requests to the agent for the job's status."""

_LOG_LINES = 5
_KEYS = " t stacks  l logs  c checkpoint  d drain  r restart  s stop  h help  q quit "
_HELP = [
    "t  where each rank is, and who waits for whom; again to hide them",
    "l  the last lines of the workers' log files; again to hide them",
    "c  ask the workers to save, after a question",
    "d  have a node leave the job, after a question for its name",
    "r  restart all workers of the job, after a question",
    "s  stop the job, after a question",
    "h  these lines",
    "q  leave this screen; the job goes on",
]
_ORDERS = {"c": "checkpoint", "r": "restart", "s": "stop"}
"""Orders to the agent, by the key that sends them, after the user has confirmed."""

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def screen(status: dict[str, Any], below: list[str], footer: str, width: int, height: int) -> list[str]:
    """Return the lines to show: the job's status, its ranks, what a key has asked for (``below``), keys."""
    lines = [
        *wrap(sentence(status), width),
        *remarks(status),
        "",
        *ranks_table(status),
        *letters(status),
        "",
        *below,
    ]
    shown = [_cut(visible(line), width) for line in lines[: height - 1]]
    return [*shown, *[""] * (height - 1 - len(shown)), footer[:width]]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


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


class _Panel:
    """Lines shown below the table of ranks. While the panel is shown, a thread takes the lines from
    ``source``, and calls ``is_new`` after each change.
    """

    def __init__(self, source: Iterator[list[str]], is_new: Callable[[], object]) -> None:
        self.lines = ["…"]
        self._source, self._is_new, self._is_closed = source, is_new, Event()
        Thread(target=self._renew, daemon=True).start()

    def _renew(self) -> None:
        begun = time.monotonic()
        for lines in self._source:
            self.lines = lines
            self._is_new()
            # Spend at most half of the time on requests to the agent. They may be slow in a large job.
            if self._is_closed.wait(max(_PERIOD, time.monotonic() - begun)):
                return
            begun = time.monotonic()

    def close(self) -> None:
        self._is_closed.set()


def _again(read: Callable[[], list[str]]) -> Iterator[list[str]]:
    """Call ``read`` repeatedly. Yield each result, or the message of the error."""
    while True:
        try:
            yield read()
        except (OSError, Problem) as problem:  # noqa: PERF203 -- each call may fail
            yield [str(problem)]


class Watch:
    """Shows the status of a job on the terminal until the job ends or the user quits."""

    def __init__(self, agent: Agent, status: dict[str, Any]) -> None:
        self._agent, self._status = agent, status
        self._panel: _Panel | None = None
        self._below: list[str] = []
        self._shown_key = ""
        self._question: str | None = None
        self._node: str | None = None
        self._news = -1

    def run(self) -> None:
        """Show the job. Raises :class:`.Problem` if the agent does not answer any more."""
        fd, due = sys.stdin.fileno(), time.monotonic() + _PERIOD
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with _whole_terminal(fd):
            while True:
                self._draw()
                left = max(0.0, due - time.monotonic())
                ready = select.select([fd, self._news], [], [], left)[0]
                if self._news in ready:
                    os.eventfd_read(self._news)
                if fd in ready:
                    key = os.read(fd, 1).decode("ascii", "replace")
                    if key in ("q", "", "\x04") and self._question is None and self._node is None:
                        return
                    self._on_key(key)
                elif not ready:
                    self._status = self._agent.with_others(self._agent.asked_again())
                    due = time.monotonic() + _PERIOD

    def _draw(self) -> None:
        width, height = os.get_terminal_size(sys.stdout.fileno())
        footer = _KEYS
        if self._node is not None:
            footer = f" which node leaves the job? {self._node}_  Enter drain it, Esc cancel "
        elif self._question is not None:
            footer = f" {self._question} this job? y yes, any other key no "
        below = self._below if self._panel is None else self._panel.lines
        lines = screen(self._status, below, footer, width, height)
        *rest, last = (f"{line}{_END_OF_LINE}" for line in lines)
        sys.stdout.write(_HOME + "\r\n".join([*rest, f"\x1b[7m{last}\x1b[0m"]) + _END_OF_SCREEN)
        sys.stdout.flush()

    def _on_key(self, key: str) -> None:
        question, self._question = self._question, None
        if self._node is not None:
            self._type(self._node, key)
        elif question is not None:
            self._show("", self._carry_out({"do": question}) if key == "y" else None)
        elif key in _ORDERS:
            self._question = _ORDERS[key]
        elif key == "d":
            self._node = ""
        elif key in ("t", "l") and key != self._shown_key:
            self._show(key, _again(self._stacks if key == "t" else self._log_lines))
        elif key in ("t", "l", "h", "?"):
            self._show("", None)
            self._below = _HELP if key in ("h", "?") else []

    def _type(self, node: str, key: str) -> None:
        """Handle a key at the prompt for the name of the node to drain. Enter confirms the name."""
        if key in ("\r", "\n", "\x1b", "\x04", ""):
            self._node = None
            if key in ("\r", "\n") and node:
                self._show("", self._carry_out({"do": "drain", "node": node, "stay_out": False}))
        elif key in ("\b", "\x7f"):
            self._node = node[:-1]
        elif key.isprintable():
            self._node = node + key

    def _show(self, key: str, source: Iterator[list[str]] | None) -> None:
        if self._panel is not None:
            self._panel.close()
        self._shown_key, self._below = key, []
        self._panel = None if source is None else _Panel(source, lambda: os.eventfd_write(self._news, 1))

    def _carry_out(self, order: dict[str, Any]) -> Iterator[list[str]]:
        said: list[str] = []
        try:
            for answer in self._agent.ask(order, SIGNAL_LIMIT):
                said = [*said, str(answer.get("message"))]
                yield said
        except Problem as problem:
            yield [*said, str(problem)]

    def _stacks(self) -> list[str]:
        return text(spied(self._agent.stacks(self._status)), is_whole=False)

    def _log_lines(self) -> list[str]:
        lines = LogLines(self._agent, self._status, rank=None, events=False, count=_LOG_LINES)
        try:
            return [line.decode(errors="replace") for line in lines.new_lines()]
        finally:
            lines.close()
