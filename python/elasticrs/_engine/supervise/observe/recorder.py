"""Records a job's events and metrics under torch's names; see ``docs/events.md`` and ``docs/metrics.md``.

Torch measures its own methods and polls the workers. This agent measures the same parts of its own work, and
publishes the workers' state when it changes. Imported only if a job records events or metrics.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from typing import TYPE_CHECKING, Any

from elasticrs._engine import public
from elasticrs._engine.failures.failure import NOT_AVAILABLE
from elasticrs._engine.job import phrases
from elasticrs._engine.supervise.failed_attempt import failures, why_expired
from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.supervise.state_machine import Phase, Rendezvous, Start

if TYPE_CHECKING:
    from elasticrs import _core
    from elasticrs._engine.failures.failure import ProcessFailure
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.state_machine import Action
    from elasticrs._engine.workers.plan import Plan, WorkerRanks

events = public("events")


class _Recorder(Observer):
    """Keeps the start times, ranks and restarts of the current attempt, for the events and metrics."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._began = self._meeting_since = self._starting_since = time.monotonic()
        self._plan: Plan | None = None
        self._restarts = 0
        self._is_meeting = False

    def opened(self, *_: object) -> None:
        self._meeting_since = time.monotonic()

    def acting(self, action: Action, plan: Plan | None) -> None:
        if isinstance(action, Rendezvous):
            self._is_meeting = True
            self._meeting_since = time.monotonic()
        elif isinstance(action, Start):
            self._is_meeting = False
            self._plan, self._restarts = plan, action.restarts
            self._starting_since = time.monotonic()

    def over(self, attempt: Attempt, outcome: str) -> None:  # noqa: ARG002 -- the base class's signature
        self._meeting_since = time.monotonic()


class EventRecorder(_Recorder):
    """Records the events of torch's agent and launcher. Records the agent's end only if ``tells_end``."""

    def __init__(self, job: JobSpec, *, tells_end: bool = True) -> None:
        super().__init__(job)
        self._tells_end = tells_end
        self._watches = False
        self._handler = events.get_logging_handler(job.event_log_handler)
        if isinstance(self._handler, events.handlers.LineFileHandler):
            self._handler.write_behind()
        # The failed attempt, and all later events. To not delay the restart, they are recorded after it.
        self._failed: Attempt | None = None
        self._later: list[Any] = []
        self._hung: _core.WorkerHung | None = None

    def acting(self, action: Action, plan: Plan | None) -> None:
        """Record a timer watchdog for each rendezvous round, because torch creates one for each round."""
        super().acting(action, plan)
        if isinstance(action, Rendezvous):
            self._record_watching(False)
        elif isinstance(action, Start):
            self._record_rendezvous(self._starting_since)
            # The duration is 0, because the plan for the attempt already contains the ranks.
            self._record("ASSIGN_WORKER_RANKS", events.EventSource.AGENT, duration_ms=0.0)
            self._record_watching(True)

    def _record_rendezvous(self, until: float) -> None:
        span = (until - self._meeting_since) * 1000
        self._record("RENDEZVOUS", events.EventSource.AGENT, duration_ms=span)

    def running(self, result: JobResult) -> None:
        attempt = result.attempts[-1]
        # These workers may have failed before now, so record their start times.
        started_ns = _wall_ns(attempt.stamps["started"])
        for ranks in attempt.plan.ranks:
            self._record_worker("START", attempt, ranks, at_ns=started_ns)
        if attempt.phases or attempt.warm is not None:
            about: dict[str, object] = {
                "warm": attempt.warm,
                "why_cold": attempt.why_cold,
                "phases_ms": attempt.phases,
                "kept": None if attempt.kept is None else attempt.kept.shown(),
            }
            span = sum(attempt.phases.values()) if attempt.phases else None
            self._record_of_agent("attempt running", "RUNNING", about, duration_ms=span)

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:
        (local_rank,) = failed.exits
        self._record_ends(failed, at_ns=_wall_ns(failed.failed_ns), only=local_rank)
        self._restarts = attempt.restarts
        started_ns = _wall_ns(failed.stamps["started"])
        self._record_worker("START", attempt, attempt.plan.ranks[local_rank], at_ns=started_ns)

    def over(self, attempt: Attempt, outcome: str) -> None:
        """Remember a failed attempt. :meth:`started` records it, so that the restart is not delayed."""
        super().over(attempt, outcome)
        if outcome in ("failed", "lost"):
            self._failed = attempt

    def timer_expired(self, timer: _core.TimerExpired) -> None:
        claim: dict[str, object] = {
            "worker_pid": str(timer.pid),
            "scope_id": timer.scope,
            "expiration_time": str(timer.deadline),
            "signal": str(timer.signal or 0),
        }
        self._record_watchdog("timer expired", claim)
        if timer.signal is not None:
            self._record_watchdog("kill worker process", claim)

    def hung(self, event: _core.WorkerHung) -> None:
        """Store the event. The next event will show whether this node or another node detected the hang."""
        self._hung = event

    def killed(self, attempt: Attempt, event: _core.WorkersKilled) -> None:
        for local_rank, pid in zip(event.local_ranks, event.pids, strict=True):
            message = phrases.killed(attempt.who(local_rank), event)
            self._record_watchdog("kill worker process", {"worker_pid": str(pid), "message": message})

    def kept(self, attempt: Attempt, event: _core.StateKept) -> None:
        ranks = attempt.global_ranks()
        about: dict[str, object] = {
            "asked": [ranks[local_rank] for local_rank in event.asked],
            "answered": [ranks[local_rank] for local_rank in event.answered],
        }
        span = (event.ended_ns - event.begun_ns) / 1e6
        self._record_of_agent("state kept", "RUNNING", about, duration_ms=span)

    def ordered(self, order: str, user: object, pid: object, node: object) -> None:
        about = {"order": order, "user": user, "pid": pid, "node": node}
        self._record_of_agent("order received", "RUNNING", about)

    def failed(self, attempt: Attempt) -> None:
        if attempt.first_failure is not None:
            self._record_hung(attempt.first_failure, attempt)

    def exited(self, attempt: Attempt, worker: _core.WorkerExited) -> None:
        self._record_hung(worker.local_rank, attempt)

    def started(self) -> None:
        if (attempt := self._failed) is not None:
            self._failed = None
            self._record_ends(attempt, at_ns=_wall_ns(attempt.stamps.get("ended", time.monotonic_ns())))
            self._catch_up()

    def _catch_up(self) -> None:
        self._failed = None
        later, self._later = self._later, []
        for event in later:
            self._pass_on(event)

    def _pass_on(self, event: Any) -> None:
        if self._failed is None:
            events.record(event, self._job.event_log_handler)
        else:
            self._later.append(event)

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        # A rendezvous that no longer needs this node may have stopped workers that had not failed.
        has_ends = result.has_taken_part or self._failed is not None
        self._catch_up()
        if result.phase is not Phase.SUCCEEDED:
            # As in torch, the stop of the timer watchdog precedes the workers' exits only if workers failed.
            self._record_watching(False)
        reason = _reason(result, error)
        if reason is None and result.attempts:
            has_succeeded = result.phase is Phase.SUCCEEDED and result.has_taken_part
            if has_ends:
                self._record_ends(result.attempts[-1], has_succeeded=has_succeeded)
            # As in torch, an agent has failed if it could not start the workers or if the rendezvous failed,
            # not if workers failed.
            is_workers = result.exit_code == 0 or (result.attempts[-1].pids and not result.is_outside)
            reason = None if is_workers else result.message
        self._record_watching(False)
        if self._is_meeting:
            self._restarts = result.restarts
            self._record_rendezvous(time.monotonic())
        if self._tells_end:
            state = "SUCCEEDED" if reason is None else "FAILED"
            self._record(state, events.EventSource.AGENT, raw_error=reason)
        if result.phase is Phase.FAILED and error is None:
            self._record_failed_job(result)
        self._write_all()

    def _record_failed_job(self, result: JobResult) -> None:
        from elasticrs._engine.supervise.observe.job_report import all_failures, headline_of

        failed = all_failures(result)
        about: dict[str, object] = {
            "message": headline_of(result, failed) if failed else result.message,
            "verdict": result.verdict.value,
            "reason": result.message,
        }
        self._record_of_agent("job failed", "FAILED", about)

    def _write_all(self) -> None:
        if isinstance(self._handler, events.handlers.LineFileHandler):
            self._handler.write_through()

    def _record_ends(
        self,
        attempt: Attempt,
        *,
        has_succeeded: bool = False,
        at_ns: int | None = None,
        only: int | None = None,
    ) -> None:
        """Record the final state of each worker, or only of local rank ``only``, and its failure, if any. As
        in torch, the state is ``TERMINATED`` if elasticrs stopped it and no signal killed it.
        """
        if not attempt.pids:
            return
        failed: dict[int, ProcessFailure] = {}
        if not has_succeeded:
            failed = {failure.local_rank: failure for failure in failures(attempt).values()}
        unfailed = "SUCCEEDED" if has_succeeded else "TERMINATED"
        global_ranks = attempt.shown_ranks()
        for ranks in attempt.plan.ranks:
            if only in (None, ranks.local_rank):
                failure, rank = failed.get(ranks.local_rank), global_ranks[ranks.local_rank]
                state = unfailed if failure is None else "FAILED"
                self._record_worker(state, attempt, ranks, failure, at_ns, global_rank=rank)

    def _record_worker(
        self,
        state: str,
        attempt: Attempt,
        ranks: WorkerRanks,
        failure: ProcessFailure | None = None,
        at_ns: int | None = None,
        **known: Any,
    ) -> None:
        self._record(
            state,
            events.EventSource.WORKER,
            events.details_of_worker(ranks, failure and failure.exitcode, failure and failure.pid),
            at_ns=at_ns,
            plan=attempt.plan,
            worker_id=str(attempt.pids[ranks.local_rank]),
            raw_error=None if failure is None else json.dumps(_error_of(failure)),
            **{"global_rank": ranks.global_rank, "agent_restarts": attempt.restarts, **known},
        )

    def _record(
        self,
        state: str,
        source: Any,
        inner: dict[str, object] | None = None,
        *,
        at_ns: int | None = None,
        plan: Plan | None = None,
        duration_ms: float | None = None,
        **known: Any,
    ) -> None:
        plan = plan or self._plan
        about: dict[str, object] = {
            "group_world_size": plan.ranks[0].group_world_size if plan is not None else None,
            "entry_point": self._job.entry_point,
            **(inner or {}),
        }
        metadata = self._metadata(state, about, plan, duration_ms=duration_ms, **known)
        self._pass_on(events.Event(events.STATUS + state, source, _milliseconds(at_ns), metadata))

    def _record_hung(self, local_rank: int, attempt: Attempt) -> None:
        event = self._hung
        why = attempt.expired.get(local_rank)
        if event is None or why is None or why.hung is None:
            return
        self._hung = None
        claim: dict[str, object] = {
            "worker_pid": str(attempt.pids[local_rank]),
            "message": why_expired(attempt, local_rank),
        }
        self._record_watchdog("worker hung", claim)
        self._record_watchdog("kill worker process", {**claim, "worker_pid": str(event.pid)})

    def _record_watching(self, watches: bool) -> None:
        if watches != self._watches and os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
            self._watches = watches
            self._record_watchdog("watchdog started" if watches else "watchdog stopped", {})

    def _record_watchdog(self, name: str, claim: dict[str, object]) -> None:
        self._record_of_agent(name, "RUNNING", {"watchdog_event": name, **claim})

    def _record_of_agent(self, name: str, state: str, about: dict[str, object], **known: Any) -> None:
        metadata = self._metadata(state, about, self._plan, **known)
        self._pass_on(events.Event(name, events.EventSource.AGENT, _milliseconds(), metadata))

    def _metadata(
        self, state: str, inner: dict[str, object], plan: Plan | None, **known: Any
    ) -> dict[str, Any]:
        about = {
            "run_id": self._job.run_id,
            "group_rank": plan.ranks[0].group_rank if plan is not None else None,
            "role": self._job.role,
            "total_run_time": int(time.monotonic() - self._began),
            "rdzv_backend": self._job.rdzv_backend,
            "agent_restarts": self._restarts,
        }
        found: dict[str, Any] = events.status_metadata(state, inner, **{**about, **known})
        return found


class WatchdogRecorder(EventRecorder):
    """Observer that records only watchdog events, for an agent whose hooks record all other events."""

    def acting(self, action: Action, plan: Plan | None) -> None:
        _Recorder.acting(self, action, plan)
        if isinstance(action, Start):
            self._record_watching(True)

    def running(self, result: JobResult) -> None:
        """Do nothing, because the agent's hooks record the start of the workers."""

    def over(self, attempt: Attempt, outcome: str) -> None:  # noqa: ARG002 -- the base class's signature
        self._record_watching(False)

    def ended(self, result: JobResult, error: BaseException | None) -> None:  # noqa: ARG002 -- the base class's signature
        self._record_watching(False)
        self._write_all()


def _wall_ns(at_ns: int) -> int:
    """Convert monotonic time to wall-clock time. If this process is interrupted between the readings of the
    two clocks, read them again, at most ten times.
    """
    for _ in range(10):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after_ns - before_ns < 100_000:
            break
    return at_ns + wall_ns - before_ns


def _milliseconds(at_ns: int | None = None) -> int:
    return (time.time_ns() if at_ns is None else at_ns) // 1_000_000


def _error_of(failure: ProcessFailure) -> dict[str, object]:
    """Return the contents of the worker's error file, or, without such a file, the message in the report."""
    if failure.error_file != NOT_AVAILABLE or failure.cause is not None:
        return failure.error_file_data
    from elasticrs._engine.failures.failure import traceback_text

    return {**failure.error_file_data, "message": traceback_text(failure)}


def _reason(result: JobResult, error: BaseException | None) -> str | None:
    if error is not None:
        return "".join(traceback.format_exception(error))
    if result.signum is not None:
        return result.how_stopped
    if not result.attempts and result.exit_code != 0:
        return result.message or "the workers could not be started"
    return None


# --- metrics ---


class MetricRecorder(_Recorder):
    def acting(self, action: Action, plan: Plan | None) -> None:
        super().acting(action, plan)
        if isinstance(action, Start):
            _measured("SimpleElasticAgent._rendezvous", self._starting_since - self._meeting_since)
            _measured("SimpleElasticAgent._assign_worker_ranks", 0.0)

    def running(self, result: JobResult) -> None:
        now, failed = time.monotonic(), result.attempts[-1].after
        _measured("LocalElasticAgent._start_workers", now - self._starting_since)
        _measured("SimpleElasticAgent._initialize_workers", now - self._meeting_since)
        if failed is not None and failed.first_failure is not None:
            _measured("SimpleElasticAgent._restart_workers", now - failed.failed_ns / 1e9)
        self._state("healthy")

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:  # noqa: ARG002 -- the base class's signature
        self._restarts = attempt.restarts
        self._state("healthy")

    def not_started(self) -> None:
        took = time.monotonic() - self._starting_since
        _measured("LocalElasticAgent._start_workers", took, succeeded=False)

    def failed(self, attempt: Attempt) -> None:  # noqa: ARG002 -- the base class's signature
        self._state("failed")

    def over(self, attempt: Attempt, outcome: str) -> None:
        """Publish the workers' final state, or, if they failed before, how long it took to stop them."""
        super().over(attempt, outcome)
        if attempt.silent:
            self._state("failed")
        elif outcome == "succeeded":
            self._state("succeeded")
        elif attempt.first_failure is not None:
            stopping = self._meeting_since - attempt.stamps["failure_seen"] / 1e9
            _measured("LocalElasticAgent._stop_workers", stopping)

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        """Publish the run's metrics; only its duration if no result of workers ended it, but a signal, an
        exception or the rendezvous.
        """
        now = time.monotonic()
        if self._is_meeting:
            _measured("SimpleElasticAgent._rendezvous", now - self._meeting_since, succeeded=False)
            _measured("SimpleElasticAgent._initialize_workers", now - self._meeting_since, succeeded=False)
            failed = result.attempts[-1] if result.attempts else None
            if failed is not None and failed.first_failure is not None:
                took = now - failed.failed_ns / 1e9
                _measured("SimpleElasticAgent._restart_workers", took, succeeded=False)
        has_run = error is None and result.signum is None and not result.is_outside
        _measured("SimpleElasticAgent.run", now - self._began, succeeded=has_run)
        if not (has_run and result.has_taken_part):
            return
        if result.attempts:
            # Use the attempt's number of restarts. It includes replaced workers and restarts by other nodes.
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
    put_metric = public("metrics.api.put_metric")
    put_metric(f"{name}.success" if succeeded else f"{name}.failure", 1)
    put_metric(f"{name}.duration.ms", int(seconds * 1000))
