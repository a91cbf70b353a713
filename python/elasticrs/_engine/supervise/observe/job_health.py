"""Observer that publishes the job's health through the health check server.

Important changes are published at once, so that the server shows them even if the agent's loop hangs.
Frequent changes, such as exits of workers, are published only when a client requests the status.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from elasticrs._engine import public
from elasticrs._engine.job import phrases
from elasticrs._engine.job.config import hang_limits
from elasticrs._engine.job.phrases import headline
from elasticrs._engine.supervise.failed_attempt import first_seen, seen_failure
from elasticrs._engine.supervise.observe.observer import Observer
from elasticrs._engine.supervise.observe.slow_workers import slowest
from elasticrs._engine.supervise.state_machine import AnnounceRestart, Phase, Start, Stop
from elasticrs._engine.workers.keep_files import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.hangs.late import Look
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
    from elasticrs._engine.supervise.observe.observer import TakeOrders
    from elasticrs._engine.supervise.state_machine import Action
    from elasticrs._engine.workers.node_page import Standing
    from elasticrs._engine.workers.plan import Plan

SCHEMA = 1
PROGRESS_LIMIT = 5.0
"""Seconds without a heartbeat of any worker after which the status says that there is no progress."""
LOOK_AGE = 30.0
"""Seconds for which the status shows the result of a search for late ranks. While a user watches the job, the
agent searches every ten seconds.
"""

_TIME_TO_ASK = 5.0
"""The status requests flight records only if the hang timeout is more than this number of seconds away."""

MAX_EARLIER_FAILURES = 16


class HealthObserver(Observer):
    """Observer that publishes the workers' health, and stops the server when the job ends. If ``is_asked`` is
    true, the agent's loop answers the requests, otherwise a thread of the server.
    """

    def __init__(
        self,
        job: JobSpec,
        server: HealthCheckServer,
        say: Callable[[str], None],
        *,
        is_asked: bool = True,
    ) -> None:
        self._job = job
        self._is_asked = is_asked
        self._server = server
        self._native = server.open()
        self._event_log = job.event_log
        self._take_orders: TakeOrders | None = None
        self._say = say
        self._state: _core.WorkersState = "INIT"
        self._attempt: Attempt | None = None
        self._ranks: dict[int, int | None] = {}
        self._result: JobResult | None = None
        self._outcome: str | None = None
        self._shown_budget = 0, 0
        self._last_failure: dict[str, Any] | None = None
        self._earlier_failures: deque[dict[str, Any]] = deque(maxlen=MAX_EARLIER_FAILURES)
        self._counted = 0
        self._standings: dict[int, Standing] = {}
        self._is_uncharged = False
        self._is_stale = self._is_hang_counted = False
        self._shown_look: Look | None = None
        self._supervisor: _core.Supervisor | None = None
        self._no_progress: dict[str, Any] | None = None
        self._asked_ns: int | None = None
        self._waits: str | None = None
        self._kept: dict[str, Any] | None = None
        self._progress: dict[int, dict[str, Any]] = {}
        self._native.identify(job.run_id, os.uname().nodename)
        self._publish()

    def opened(self, supervisor: _core.Supervisor, result: JobResult) -> None:
        self._server.supervisor = self._supervisor = supervisor
        self._result = result
        self._native.show(supervisor, is_asked=self._is_asked)
        if self._is_asked:
            supervisor.watch_fd(self._native.fd)
        public("metrics.api.add_sink")(self._native.put)
        if self._job.is_multi_node:
            self._native.enter("waiting_for_nodes")

    def catch_up(self, supervisor: _core.Supervisor, result: JobResult) -> None:
        """Learn what has happened so far, because this observer was created in the middle of the job."""
        self.opened(supervisor, result)
        begun = [attempt for attempt in result.attempts if "started" in attempt.stamps]
        for self._attempt in begun:
            if self._attempt.first_failure in self._attempt.exits:
                self._note_failure(self._attempt)
        if begun and begun[-1] is result.attempts[-1] and not begun[-1].has_ended:
            self.running(result)
            if begun[-1].first_failure is not None:
                self._enter_state("UNHEALTHY")
        elif begun:
            self._ranks = begun[-1].shown_ranks()
            self._enter_state("STOPPED")

    def control_server(self, take: TakeOrders) -> _core.HealthServer:
        self._take_orders = take
        return self._native

    def fd_ready(self, fd: int) -> bool:
        if not self._is_asked or fd != self._native.fd:
            return False
        self._measure_kept()
        attempt = self._attempt
        beats = [] if self._supervisor is None else self._supervisor.heartbeats()
        self._measure_progress(beats)
        if attempt is not None and attempt.running():
            self._no_progress = no_progress(
                beats, attempt.global_ranks(), len(attempt.exits), time.monotonic_ns()
            )
            if self._no_progress is not None:
                waits = self._who_waits(attempt, max(beat.at_ns for beat in beats))
                self._no_progress["what"] += f"; {waits}" if waits else ""
        if self._result is not None:
            # Ask for the nodes' names only for a status request, because with many nodes the answer is large.
            self._result.node_names(asks=True)
            if self._native.viewers:
                # The page also shows ranks of other nodes. Ask their agents now, and show the answers later.
                self._result.ask_others()
        # Publish the status again: failures of other nodes and time without progress cause no event here.
        changes = self._result is not None and (self._result.is_ending() or self._result.waits_for())
        self._is_stale |= self._job.is_multi_node or bool(changes) or self._no_progress is not None
        self._is_stale |= self._shown_look is not _recent_look(attempt)
        if attempt is not None and (attempt.shown_ranks(), self._budget()) != (
            self._ranks,
            self._shown_budget,
        ):
            # A new round may assign different ranks, and other nodes may have restarted workers.
            self._publish(self._workers_now(attempt))
        if self._is_stale:
            self._publish()
        # Only now, because the server sends the status once this answer has come.
        self._server.answer()
        for line in self._native.take_notices():
            self._say(line)
        if self._take_orders is not None:
            self._take_orders(self._native)
        return True

    def _who_waits(self, attempt: Attempt, since_ns: int) -> str | None:
        """Return which ranks wait in which collective; ``None`` if unknown. Request the flight records
        (torch's logs of collectives) on another thread, because that blocks, at most once after each
        heartbeat, and not shortly before the hang timeout, because the Rust core will then request them
        itself.
        """
        if self._asked_ns != since_ns:
            self._asked_ns, self._waits = since_ns, None
            limit = self._job.hang_timeout
            least = limit if isinstance(limit, float | int) else (hang_limits(limit)[1] if limit else None)
            left = (60.0 if least is None else least) - (time.monotonic_ns() - since_ns) / 1e9
            if left > _TIME_TO_ASK:
                from elasticrs._engine.supervise.hang_diagnosis import diagnose_running

                def ask() -> None:
                    found = diagnose_running(attempt, 1.0)
                    if self._asked_ns == since_ns and found is not None:
                        self._waits = found.summary

                attempt.files.begin(ask)
        return self._waits

    def acting(self, action: Action, plan: Plan | None) -> None:  # noqa: ARG002 -- the base class's signature
        if isinstance(action, Start):
            self._native.enter("starting" if self._attempt is None else "restarting")
        elif isinstance(action, Stop) and action.hung is not None:
            self._was_hung(action.hung.silence)
        elif isinstance(action, AnnounceRestart):
            self._is_uncharged = not action.charged

    def prepared(self, attempt: Attempt) -> None:
        """Let the server count the bytes in the workers' log files, except in those that the agent reads."""
        self._native.watch_files(attempt.paths.only_written(), attempt.paths.are_new)

    def not_started(self) -> None:
        self._native.files_ended()
        self._enter_state("STOPPED")

    def timer_expired(self, timer: _core.TimerExpired) -> None:
        if timer.signal is not None:
            self._was_hung((time.monotonic_ns() - timer.seen_ns) / 1e9)

    def hung(self, event: _core.WorkerHung) -> None:
        self._was_hung((time.monotonic_ns() - event.since_ns) / 1e9)

    def quiet(self) -> None:
        """Publish again if the restart budget has changed, for example because its window has moved on."""
        self._measure_kept()
        if self._budget() != self._shown_budget:
            self._publish()

    def paused(self) -> None:
        self._publish()

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        public("metrics.api.remove_sink")(self._native.put)
        has_succeeded = error is None and result.phase is Phase.SUCCEEDED
        was_stopped = error is None and result.phase is Phase.STOPPED
        self._outcome = "succeeded" if has_succeeded else "stopped" if was_stopped else "failed"
        self._enter_state("SUCCEEDED" if has_succeeded else "FAILED")
        self._native.watch_steps([])  # Otherwise, the kernel would keep the files until this process ends.
        self._server.stop()

    def _was_hung(self, seconds: float) -> None:
        """Count a hang once, because this node and another node may both report it."""
        if not self._is_hang_counted:
            self._is_hang_counted = True
            self._native.enter("hung")
            self._native.was_hung(max(0.0, seconds))

    def running(self, result: JobResult) -> None:
        for earlier in result.attempts[self._counted : -1]:
            self._native.restarted("port_taken" if self._is_uncharged else _cause(earlier))
        self._counted, self._is_uncharged = len(result.attempts) - 1, False
        self._attempt = result.attempts[-1]
        if self._is_asked:
            self._server.find_overdue = result.find_overdue
        self._is_hang_counted = False
        self._no_progress = self._kept = None
        self._progress = {}
        failed = self._attempt.after
        if failed is not None and failed.first_failure is not None:
            self._native.recovered((self._attempt.stamps["started"] - failed.failed_ns) / 1e9)
        self._native.enter("productive")
        if self._job.on_failure != "replace":
            # With `--on-failure replace`, the workers' rendezvous assigns the ranks.
            first = self._attempt.plan.ranks[0]
            placed = first.group_rank, first.world_size
            self._native.identify(self._job.run_id, os.uname().nodename, placed)
        self._state = "HEALTHY"
        self._publish(self._workers_now(self._attempt))

    def memory_opened(self, fds: Sequence[int]) -> None:
        if not self._native.port:
            return  # The server has no metrics.
        try:
            self._native.watch_steps(list(fds))
        except OSError as error:
            self._say(f"/metrics lacks the steps of the workers: {error}")

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:
        self._native.restarted(_cause(failed))
        self._native.recovered((failed.stamps["started"] - failed.failed_ns) / 1e9)
        self._publish(self._workers_now(attempt))

    def failed(self, attempt: Attempt) -> None:
        if self._attempt is not None and not self._attempt.expired:
            self._native.enter("restarting")
        if attempt.first_failure in attempt.exits:
            self._note_failure(attempt)
        self._enter_state("UNHEALTHY")

    def exited(self, attempt: Attempt, worker: _core.WorkerExited) -> None:
        self._is_stale = True
        if attempt is self._attempt and attempt.first_failure == worker.local_rank:
            self._note_failure(attempt)
        if not self._is_asked:
            self._publish()

    def over(self, attempt: Attempt, outcome: str) -> None:
        self._native.files_ended()
        if attempt.silent and attempt.first_failure is not None:
            self._note_failure(attempt)
        self._enter_state("SUCCEEDED" if outcome == "succeeded" else "STOPPED")
        self._native.enter("restarting" if not self._job.is_multi_node else "waiting_for_nodes")

    def _note_failure(self, attempt: Attempt) -> None:
        from elasticrs._engine.failures.failure import how_it_failed

        local_rank = first_seen(attempt)
        failure, raised = seen_failure(attempt, local_rank), attempt.raised.get(local_rank)
        if self._last_failure is not None:
            self._earlier_failures.append(self._last_failure)
        self._last_failure = {
            "rank": None if attempt.is_undecided else attempt.shown_ranks()[local_rank],
            "local_rank": local_rank,
            "pid": failure.pid,
            "exitcode": failure.exitcode,
            "what": how_it_failed(failure).lstrip(": "),
            "exception": headline(raised.text) if raised is not None else None,
            # Do not check that the file exists, which may be slow. The worker that told the error writes it.
            "error_file": None if raised is None else attempt.paths.error_files.get(local_rank) or None,
            "time_ms": _wall_ms(attempt.stamps.get("failure_seen")),
            "round": attempt.round,
            "attempt": attempt.name,
        }

    def training(self, standings: Sequence[Standing]) -> None:
        self._standings = {each.local_rank: each for each in standings}
        for each in standings:
            if each.rate is not None:
                self._native.put("elasticrs.train", f"rate.{each.local_rank}", each.rate)
        self._publish()

    def _measure_kept(self) -> None:
        """Read which training steps the workers have kept, and show that on the status page. Read it again
        each time, because the workers copy their state into memory without notice to the agent.
        """
        files = None if self._attempt is None else self._attempt.keep_files
        kept = None if files is None else files.standing()
        if kept is None and self._kept is None:
            return
        self._kept, self._is_stale = kept, True
        for name, value in (kept or {}).items():
            if isinstance(value, (int, float)):
                self._native.put("elasticrs.keep", name, value)

    def _measure_progress(self, beats: Sequence[_core.Heartbeat]) -> None:
        """Read the workers' last training steps for a request of the status."""
        before = self._progress
        self._progress = {} if self._attempt is None else progress_of(self._attempt, beats)
        self._is_stale |= bool(before or self._progress)

    def _enter_state(self, state: _core.WorkersState) -> None:
        self._state = state
        self._publish()

    def _publish(self, workers: list[tuple[int, int, int]] | None = None) -> None:
        self._is_stale, self._shown_look = False, _recent_look(self._attempt)
        # JSON cannot have the surrogates by which Python represents a path that is not valid UTF-8.
        status = json.dumps(self._status(), ensure_ascii=False).encode(errors="replace").decode()
        self._native.publish(self._state, status, workers)

    def _status(self) -> dict[str, Any]:
        job, attempt = self._job, self._attempt
        self._shown_budget = restarts, left = self._budget()
        shown = ("run_id", "role", "name", "nproc", "max_restarts")
        return {
            "schema": SCHEMA,
            "host": os.uname().nodename,
            "event_log": self._event_log,
            "log_folder": None if attempt is None else attempt.paths.run_folder or None,
            "has_log_files": attempt is not None and attempt.paths.have_output,
            "job": {
                **{name: getattr(job, name) for name in shown},
                "restart_window": job.restart_settings.window,
            },
            "state": "NO_PROGRESS" if self._state == "HEALTHY" and self._no_progress else self._state,
            "outcome": self._outcome,
            "is_ending": self._result is not None and self._result.is_ending(),
            "waits_for": None if self._result is None else self._result.waits_for(),
            "spare_of": 0 if self._result is None else self._result.others_running(),
            "round": None if attempt is None else attempt.agents_round,
            "attempt": None if attempt is None else attempt.name,
            "warm": None if attempt is None else attempt.warm,
            "why_cold": None if attempt is None else attempt.why_cold,
            "restart_phases_ms": {} if attempt is None else attempt.phases,
            "restarts": restarts,
            "restarts_left": left,
            "group": None if attempt is None else _group(attempt),
            "workers": [] if attempt is None else self._workers(attempt),
            "others": [] if self._result is None else self._result.others(),
            "slowest": _slowest(list(self._standings.values())),
            "no_progress": self._no_progress,
            "kept": self._kept,
            "continued": None if attempt is None or attempt.kept is None else attempt.kept.shown(),
            "nodes": None if self._result is None else self._result.node_names(),
            "cause": self._cause(),
            "last_failure": self._last_failure,
            "earlier_failures": list(self._earlier_failures),
        }

    def _cause(self) -> dict[str, Any] | None:
        cause = None if self._result is None else self._result.shared_cause()
        if cause is not None:
            from elasticrs._engine.nodes.protocol.round_outcome import failure_of

            said = failure_of(cause, names_pid=False)
            return {**{name: cause.get(name) for name in ("rank", "node", "round")}, "what": said}
        last = self._last_failure
        if last is None or self._job.is_multi_node:
            return None
        return {**{name: last[name] for name in ("rank", "round", "what")}, "node": os.uname().nodename}

    def _budget(self) -> tuple[int, int]:
        policy, result = self._job.restart_settings, self._result
        return (0, policy.max_restarts) if result is None else (result.restarts, result.restarts_left(policy))

    def _workers_now(self, attempt: Attempt) -> list[tuple[int, int, int]]:
        self._ranks = attempt.shown_ranks()
        return [
            (rank, local_rank, attempt.pids[local_rank])
            for local_rank, rank in self._ranks.items()
            if rank is not None
        ]

    def _training(self, local_rank: int, pid: int) -> dict[str, Any] | None:
        said = self._standings.get(local_rank)
        return None if said is None or said.pid != pid else {"steps": said.steps, "rate": said.rate}

    def _workers(self, attempt: Attempt) -> list[dict[str, Any]]:
        shown = workers_of(attempt, self._progress)
        for worker in shown:
            worker["rank"] = self._ranks[worker["local_rank"]]
            worker["training"] = self._training(worker["local_rank"], worker["pid"])
        return shown


def workers_of(attempt: Attempt, progress: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each worker of this node, the fields that the job's status has about it. ``progress`` has
    the workers' last training steps by local rank, as :func:`progress_of` returns them.
    """
    shown = []
    ranks = attempt.shown_ranks()
    for each, pid in zip(attempt.plan.ranks, attempt.pids, strict=True):
        exited = attempt.exits.get(each.local_rank)
        state = "PAUSED" if each.local_rank in attempt.paused else "RUNNING"
        shown.append({
            "rank": ranks[each.local_rank],
            "local_rank": each.local_rank,
            "role_rank": each.role_rank,
            "pid": pid,
            "state": state if exited is None else "EXITED",
            "exitcode": None if exited is None else exited.exitcode,
            # elasticrs also signals a failed worker that does not end.
            "was_stopped": (
                exited is not None
                and exited.sent_signal is not None
                and each.local_rank != attempt.first_failure
            ),
            "training": None,
            "progress": progress.get(each.local_rank),
            **late_of(attempt, each.local_rank),
        })  # fmt: skip
    return shown


def _recent_look(attempt: Attempt | None) -> Look | None:
    look = None if attempt is None else attempt.look
    return None if look is None or time.monotonic() - look.at > LOOK_AGE else look


def late_of(attempt: Attempt | None, local_rank: int) -> dict[str, Any]:
    """Return what a recent search for late workers has found about a worker."""
    look = _recent_look(attempt)
    if look is None:
        return {"late": None, "has_recorder": None}
    late = look.late.get(local_rank)
    recorder = look.recorders.get(local_rank)
    return {"late": None if late is None else late._asdict(), "has_recorder": recorder}


def progress_of(attempt: Attempt, beats: Sequence[_core.Heartbeat]) -> dict[int, dict[str, Any]]:
    """Return the last training step of each worker of this node, from its file or last heartbeat."""
    files, now_ns = attempt.keep_files, time.monotonic_ns()
    last = {beat.local_rank: beat for beat in beats}
    found = {}
    for local_rank in attempt.shown_ranks():
        told = None if files is None else files.progress(local_rank)
        shown = last_step(told, last.get(local_rank), now_ns)
        if shown is not None:
            found[local_rank] = shown
    return found


def no_progress(
    beats: Sequence[_core.Heartbeat], ranks: Mapping[int, int], exited: int, now_ns: int
) -> dict[str, Any] | None:
    """Return the seconds since the last progress, and the ranks' steps; ``None`` if there is progress."""
    if not beats:
        return None
    seconds = (now_ns - max(beat.at_ns for beat in beats)) / 1e9
    if seconds < PROGRESS_LIMIT:
        return None
    from elasticrs._engine.supervise.hang_diagnosis import step_text

    places: dict[tuple[float, str], list[int]] = {}
    for beat in beats:
        where = "before its first step"
        if beat.step is not None:
            where = step_text(beat.step, is_automatic=beat.is_automatic)
        where += f" in section '{phrases.printable(beat.section)}'" if beat.section else ""
        places.setdefault((-1 if beat.step is None else beat.step, where), []).append(ranks[beat.local_rank])
    told = [f"{phrases.ranks_text(sorted(places[key]), 8)} {key[1]}" for key in sorted(places)[:8]]
    told += [f"{exited} exited"] if exited else []
    return {"seconds": round(seconds, 3), "what": f"no progress for {seconds:.1f} s: {', '.join(told)}"}


def last_step(told: Progress | None, beat: _core.Heartbeat | None, now_ns: int) -> dict[str, Any] | None:
    """Return a worker's last training step for the status page. Steps that are counted across restarts come
    before those of the attempt. ``told``: what the worker has written into its file in memory.
    """
    if beat is not None and beat.step is not None and (told is None or told.counts != "keep"):
        told = Progress("attempt" if beat.is_automatic else "script", beat.step, beat.at_ns)
    if told is None:
        return None
    at_ns = max(told.at_ns, 0 if beat is None else beat.at_ns)
    age = max(0.0, (now_ns - at_ns) / 1e9) if at_ns else None
    return {"step": told.step, "counts": told.counts, "age_seconds": age}


def _wall_ms(monotonic_ns: int | None) -> int:
    """Return a time in milliseconds since 1970; the current time for ``None``."""
    age_ns = 0 if monotonic_ns is None else time.monotonic_ns() - monotonic_ns
    return (time.time_ns() - age_ns) // 1_000_000


def _slowest(standings: Sequence[Standing]) -> dict[str, Any] | None:
    found = slowest(standings)
    if found is None:
        return None
    worker, median = found
    return {"rank": worker.rank, "local_rank": worker.local_rank, "rate": worker.rate, "median": median}


def _group(attempt: Attempt) -> dict[str, Any]:
    ranks = attempt.plan.ranks[0]
    return {
        "rank": ranks.group_rank,
        "world_size": ranks.group_world_size,
        "workers": ranks.world_size,
        "master_addr": attempt.plan.master_addr,
        "master_port": attempt.plan.master_port,
    }


def _cause(attempt: Attempt) -> _core.RestartCause:
    if "started" not in attempt.stamps:
        return "start_failed"
    if attempt.expired and attempt.first_failure is not None:
        why = attempt.expired.values()
        if any(event.hung is not None for event in why):
            return "worker_hung"
        return "worker_failed" if any(event.is_blamed for event in why) else "timer_expired"
    if attempt.first_failure is not None:
        return "worker_failed"
    if attempt.nursery_end is not None:
        return "nursery_lost"
    return "nodes"
