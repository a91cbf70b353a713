"""Metrics of a job under torch's names; see ``docs/metrics.md``.

Torch measures its own methods and polls the workers. This agent measures the corresponding parts of its work,
and publishes a state when it changes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elasticrs._engine import public
from elasticrs._engine.supervise.attempts.state_machine import Phase, Rendezvous, Start
from elasticrs._engine.supervise.observe.observer import Observer

if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.attempts.state_machine import Action
    from elasticrs._engine.workers.plan import Plan


class MetricRecorder(Observer):
    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._began = self._meeting_since = self._starting_since = time.monotonic()
        self._failed_at: float | None = None
        self._restarts = 0

    def opened(self, supervisor: _core.Supervisor) -> None:  # noqa: ARG002 -- the base class's signature
        self._meeting_since = time.monotonic()

    def acting(self, action: Action, plan: Plan | None) -> None:  # noqa: ARG002 -- the base class's signature
        if isinstance(action, Rendezvous):
            self._meeting_since = time.monotonic()
        elif isinstance(action, Start):
            self._starting_since = time.monotonic()
            self._restarts = action.restarts
            took = self._starting_since - self._meeting_since
            _measured("SimpleElasticAgent._rendezvous", took)
            _measured("SimpleElasticAgent._assign_worker_ranks", 0.0)

    def running(self, result: JobResult) -> None:  # noqa: ARG002 -- the base class's signature
        now = time.monotonic()
        _measured("LocalElasticAgent._start_workers", now - self._starting_since)
        _measured("SimpleElasticAgent._initialize_workers", now - self._meeting_since)
        if self._failed_at is not None:
            _measured("SimpleElasticAgent._restart_workers", now - self._failed_at)
            self._failed_at = None
        self._state("healthy")

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:  # noqa: ARG002 -- the base class's signature
        self._restarts = attempt.restarts
        self._state("healthy")

    def not_started(self) -> None:
        took = time.monotonic() - self._starting_since
        _measured("LocalElasticAgent._start_workers", took, succeeded=False)

    def failed(self, attempt: Attempt) -> None:
        self._failed_at = attempt.failed_ns / 1e9
        self._state("failed")

    def over(self, attempt: Attempt, outcome: str) -> None:
        """Publish the workers' final state, or, if they failed before, how long it took to stop them."""
        self._meeting_since = now = time.monotonic()
        if attempt.silent:
            self.failed(attempt)
        elif outcome == "succeeded":
            self._state("succeeded")
        elif self._failed_at is not None:
            _measured("LocalElasticAgent._stop_workers", now - attempt.stamps["failure_seen"] / 1e9)

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        """Publish the run's metrics; only its duration if a signal or an exception ended it."""
        has_run = error is None and result.signum is None
        _measured("SimpleElasticAgent.run", time.monotonic() - self._began, succeeded=has_run)
        if not has_run:
            return
        if result.attempts:
            # Take the attempt's count of restarts, because it also includes replaced workers and restarts
            # that other nodes have caused.
            self._restarts = result.attempts[-1].restarts
        is_failed, has_retried = result.phase is not Phase.SUCCEEDED, self._restarts > 0
        # With a restart window, `_restarts` can exceed `max_restarts`.
        most = self._job.max_restarts
        left = max(0, most - self._restarts)
        self._put("flakiness", 100 if is_failed else int(100.0 - 100.0 * (left + 1) / (most + 1)))
        self._put("run_total", 1)
        self._put("run_success_with_retries", int(not is_failed and has_retried))
        self._put("run_success_no_retries", int(not is_failed and not has_retried))
        self._put("run_failed_with_retries", int(is_failed and has_retried))
        self._put("run_failed_no_retries", int(is_failed and not has_retried))

    def _state(self, name: str) -> None:
        if self._job.restart_settings.window is None:
            self._put("remaining_restarts", self._job.max_restarts - self._restarts)
        self._put(name, 1)

    def _put(self, name: str, value: int) -> None:
        public("metrics.api.put_metric")(f"workers.{self._job.role}.{name}", value)


def _measured(name: str, seconds: float, *, succeeded: bool = True) -> None:
    public("metrics.api.put_metric")(f"{name}.success" if succeeded else f"{name}.failure", 1)
    public("metrics.api.put_metric")(f"{name}.duration.ms", int(seconds * 1000))
