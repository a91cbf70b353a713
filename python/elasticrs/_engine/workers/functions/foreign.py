"""Run programs through a user's replacement for ``api.get_subprocess_handler``, which torch supports too.

The replacement returns handlers. A handler has an attribute ``proc`` like :class:`subprocess.Popen`, and a
method ``close(death_sig)``. The programs are not children of the core, so they are polled, and each handler
is responsible for the descendants of its program.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticrs._engine.job.value import Record, fresh
from elasticrs.multiprocessing import api
from elasticrs.multiprocessing.subprocess_handler import handlers

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs._engine.gpus.numa import NumaOptions
    from elasticrs.multiprocessing.api import PContext

_log = logging.getLogger("elasticrs.multiprocessing")

_KILL_LIMIT = 10.0
"""Maximum number of seconds to wait for programs after SIGKILL, because a program may hang in the kernel."""


def replaced_factory() -> Callable[..., Any] | None:
    """Return the user's replacement for ``get_subprocess_handler``; ``None`` if there is none."""
    found: Callable[..., Any] = api.get_subprocess_handler
    return None if found is getattr(handlers, "_OWN", None) else found


class ForeignPrograms(Record):
    """Programs of a :class:`PContext` that are run by the user's replacement for ``get_subprocess_handler``.

    Attributes:
        handlers: handlers by local rank.
        exits: exit code, and monotonic time at which the exit was seen, by local rank, in the order of the
            exits.
        sent: last signal that was sent to the program, by local rank.
    """

    context: PContext
    numa_options: NumaOptions | None
    handlers: dict[int, Any] = fresh(factory=dict)
    exits: dict[int, tuple[int, int]] = fresh(factory=dict)
    sent: dict[int, int] = fresh(factory=dict)

    def start(self, make: Callable[..., Any]) -> None:
        """Start all programs by calling ``make``, which has the signature of ``get_subprocess_handler``. If
        this method fails, call :meth:`stop` to stop the programs that it has started.
        """
        context = self.context
        for rank in range(context.nprocs):
            self.handlers[rank] = make(
                entrypoint=context.entrypoint,
                args=context.args[rank],
                env=context.envs[rank],
                stdout=context.stdouts[rank],
                stderr=context.stderrs[rank],
                local_rank_id=rank,
                numa_options=self.numa_options,
            )

    def has_ended(self) -> bool:
        """Return true if all programs have exited, or if one has failed."""
        for rank, handler in self.handlers.items():
            if rank not in self.exits:
                exitcode = handler.proc.poll()
                if exitcode is not None:
                    self.exits[rank] = (exitcode, time.monotonic_ns())
        return len(self.exits) == len(self.handlers) or any(code for code, _ in self.exits.values())

    def stop(self, death_sig: signal.Signals, timeout: float) -> None:
        """Send a signal to the running programs, wait up to ``timeout`` seconds, and kill the remaining ones
        with SIGKILL. If a program does not exit within :data:`_KILL_LIMIT` seconds after SIGKILL, stop
        waiting for it.
        """
        self._send(death_sig)
        deadline = time.monotonic() + timeout
        for handler in self.handlers.values():
            with suppress(subprocess.TimeoutExpired):
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        deadline = time.monotonic() + _KILL_LIMIT
        for rank, handler in self.handlers.items():
            try:
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # noqa: PERF203 -- one iteration per worker
                _log.warning(
                    "local rank %d (pid %d) did not exit within %g s after SIGKILL; it is left behind",
                    *(rank, handler.proc.pid, _KILL_LIMIT),
                )
        self.has_ended()

    def kill(self) -> None:
        """Send SIGKILL to the programs that are still running."""
        self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        self.has_ended()
        for rank in self.handlers.keys() - self.exits.keys():
            self.sent[rank] = signum
            with suppress(ProcessLookupError):
                self.handlers[rank].close(death_sig=signum)
