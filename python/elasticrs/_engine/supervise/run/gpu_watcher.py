"""Watches this node's NVIDIA GPUs through a child process that runs :mod:`.gpu_watch`.

Adds Xids (NVIDIA driver errors) to the current attempt, and delays a restart until the dead workers' device
memory is free. Only :meth:`GpuWatcher.close` blocks, for at most one second.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time

from elasticrs._engine.gpus import MEMORY_LIMIT
from elasticrs._engine.gpus.xids import Xid
from elasticrs._engine.process.other_processes import command
from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.supervise.state_machine import Stop
from elasticrs._engine.workers.event_log import Stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.state_machine import Action
    from elasticrs._engine.workers.plan import Plan

KERNEL_LOG = "/dev/kmsg"
KERNEL_PID_NAMESPACE = "pid:[4026531836]"
"""Initial pid namespace of the machine. The kernel log contains pids of this namespace."""
ANSWER_LIMIT = 1.0
"""Seconds to wait for an attempt's last Xids if no further attempt can follow."""
START_LIMIT = 0.0
"""Seconds to wait for a child that is still starting at the attempt's end. Such workers hardly used a GPU."""
_EXIT_LIMIT = 1.0
"""Seconds to wait for the child's exit after SIGKILL. It takes longer only if it hangs in the driver."""
_WORTH_A_LINE = 1.0
"""Longest wait for device memory, in seconds, that is not reported to the user."""
_MAX_LINES = 4
"""Maximum number of an attempt's Xids that are printed before a restart."""


class GpuWatcher(Observer):
    def __init__(self, job: JobSpec, result: JobResult, say: Callable[[str], None]) -> None:
        self._job = job
        self._result = result
        self._say = say
        self._supervisor: _core.Supervisor | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._problems: list[str] = []
        self._attempt = -1
        self._was_started = self._is_blind = self._is_stopping = False
        self._has_begun = self._is_asked = self._is_settled = False
        self._held: dict[str, int] = {}
        self._was_in_use = False
        self._until: float | None = None
        self._held_since = 0.0

    def opened(self, supervisor: _core.Supervisor, _result: object) -> None:
        self._supervisor = supervisor

    def _start(self, supervisor: _core.Supervisor) -> None:
        self._child = subprocess.Popen(
            command("elasticrs._engine.gpus.gpu_watch", KERNEL_LOG, KERNEL_PID_NAMESPACE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal must not interrupt the child process.
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        for pipe in (self._child.stdin, self._child.stdout):
            os.set_blocking(pipe.fileno(), False)
        supervisor.watch_fd(self._child.stdout.fileno())

    def fd_ready(self, fd: int) -> bool:
        if self._child is None or self._child.stdout is None or fd != self._child.stdout.fileno():
            return False
        self._read()
        return True

    def started(self) -> None:
        if self._child is None and not self._was_started and self._supervisor is not None:
            # Start the child process only now, so that it does not delay the start of the workers.
            self._was_started = True
            self._start(self._supervisor)
        self._attempt = len(self._result.attempts) - 1
        self._has_begun = self._is_asked = self._is_settled = False
        self._held, self._until, self._was_in_use = {}, None, False
        self._ask(begin=self._attempt)

    def running(self, result: JobResult) -> None:
        self._ask(workers=result.attempts[-1].pids)

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:  # noqa: ARG002 -- the base class's signature
        self._ask(workers=attempt.pids)

    def acting(self, action: Action, plan: Plan | None) -> None:  # noqa: ARG002 -- the base class's signature
        if isinstance(action, Stop):
            self._settle()

    def failed(self, attempt: Attempt) -> None:  # noqa: ARG002 -- the base class's signature
        self._settle()

    def over(self, attempt: Attempt, outcome: str) -> None:
        if outcome != "failed" or not self._may_restart(attempt):
            return
        notes = [xid.note() for xid in attempt.xids.values()]
        for note in notes[:_MAX_LINES]:
            self._say(note)
        if len(notes) > _MAX_LINES:
            self._say(f"{len(notes) - _MAX_LINES} other Xids are not shown")

    def hold(self, attempt: Attempt) -> None:
        """Delay the end of an attempt until the dead workers' device memory is free. In the last attempt,
        wait only until errors of NVIDIA's driver (Xids) have been reported.
        """
        self._read()
        self._settle()
        for problem in self._problems:
            self._say(problem)
        self._problems.clear()
        if self._child is not None and not self._is_blind:
            self._held_since = time.monotonic()
            self._until = self._held_since + self._limit(attempt)
            self._was_in_use = bool(self._held)

    def _limit(self, attempt: Attempt) -> float:
        if not self._has_begun:
            return START_LIMIT
        return MEMORY_LIMIT if self._may_restart(attempt) else ANSWER_LIMIT

    def seconds_left(self) -> float | None:
        """Return the maximum number of seconds that the delay can still last; ``None`` without a delay."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def is_held(self, attempt: Attempt) -> bool:
        if self._until is None:
            return False
        waits_for_memory = bool(self._held) and self._may_restart(attempt)
        now = time.monotonic()
        if not self._is_blind and (not self._is_settled or waits_for_memory) and now < self._until:
            return True
        self._until = None
        if self._was_in_use and self._may_restart(attempt):
            self._report_memory(attempt, now - self._held_since)
        return False

    def _report_memory(self, attempt: Attempt, waited: float) -> None:
        attempt.append(Stamp("memory_free", time.monotonic_ns()))
        if self._held:
            shown = ", ".join(f"{size / (1 << 30):.1f} GiB of GPU {gpu}" for gpu, size in self._held.items())
            self._say(f"dead workers still hold {shown} after {waited:.0f} s; starting workers nevertheless")
        elif waited > _WORTH_A_LINE:
            self._say(f"waited {waited:.1f} s until the dead workers' device memory was free")

    def stop_waiting(self) -> None:
        self._until = None
        self._is_stopping = True

    def _may_restart(self, attempt: Attempt) -> bool:
        policy = self._job.restart_settings
        is_counted = not self._job.is_multi_node and policy.window is None
        return not self._is_stopping and (not is_counted or attempt.restarts < policy.max_restarts)

    def _settle(self) -> None:
        if self._has_begun and not self._is_asked:
            self._is_asked = True
            self._ask(settle=self._attempt)

    def _ask(self, **request: object) -> None:
        if self._child is None or self._child.stdin is None:
            return
        try:
            os.write(self._child.stdin.fileno(), json.dumps(request).encode() + b"\n")
        except (BrokenPipeError, BlockingIOError):
            # The child process has died (`_read` will see EOF) or no longer reads its input.
            self._is_blind = True

    def _read(self) -> None:
        if self._child is None or self._child.stdout is None:
            return
        fd = self._child.stdout.fileno()
        try:
            part = os.read(fd, 65536)
        except BlockingIOError:
            return
        *lines, self._unread = (self._unread + part).split(b"\n")
        for message in map(json.loads, lines):
            self._take(message)
        if not part:
            self._problems.append("the process that watches the GPUs has died, so their Xids are unknown")
            if self._supervisor is not None:
                self._supervisor.unwatch_fd(fd)
            self.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "xid" in message:
            fields = message["xid"]
            xid = Xid(**{**fields, "pids": tuple(fields["pids"]), "workers": tuple(fields["workers"])})
            self._result.attempts[message["attempt"]].xids[xid.gpu, xid.code] = xid
        elif "problem" in message:
            self._problems.append(message["problem"])
            self._is_blind = self._is_blind or message.get("is_blind", False)
        elif message.get("begun") == self._attempt:
            self._has_begun = True
            if self._until is not None:
                self._settle()
                self._until = time.monotonic() + self._limit(self._result.attempts[-1])
        elif message.get("settled") == self._attempt:
            self._is_settled, self._held = True, message["held"]
            self._was_in_use = self._was_in_use or (bool(self._held) and self._until is not None)

    def close(self) -> None:
        """Kill the child process. Idempotent. The supervisor must have stopped watching its output."""
        child, self._child = self._child, None
        if child is None:
            return
        self._is_blind = True
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        # Open the pidfd before the child is reaped, because its pid may be reused afterwards.
        exit_fd = os.pidfd_open(child.pid)
        child.kill()
        try:
            poll = select.poll()
            poll.register(exit_fd, select.POLLIN)
            if poll.poll(1000 * _EXIT_LIMIT):
                child.wait()
            else:
                self._say(
                    f"the process that watches the GPUs ({child.pid}) hangs in the driver; leaving it behind"
                )
        finally:
            os.close(exit_fd)
