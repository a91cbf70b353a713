"""Delay until the core notices an expired timer, among about a thousand active timers of 64 processes.

Straight on the extension: no evidence is taken and no process is signalled, which takes most of the time in a
job.
"""

import json
import os
import random
import signal
import time

from benchmarks.harness import HANG, Options, Row, Samples, percentile
from elasticrs import _core

WORKERS = 64
TIMERS = 16
SPREAD = 1.0
AHEAD = 0.5
FAR = 3600.0


def measure(options: Options) -> list[Row]:
    """Let timers expire at random moments within a second, and repeat this several times."""
    [launcher] = (each for each in options.launchers if each.name == "elasticrs")
    samples = Samples(options)
    for _ in range(options.repeats(16, 4)):
        samples.add(launcher, *_lateness())
    conditions = (
        f"{WORKERS} processes with {TIMERS} timers each, of which one expires within {SPREAD:g} s and only "
        "tells; from the deadline until the core has seen it"
    )
    return [
        *samples.rows("timer: deadline seen, p50", "ms", conditions),
        *samples.rows("timer: deadline seen, p99", "ms", conditions, lambda values: percentile(values, 99)),
    ]


def _lateness() -> list[float]:
    supervisor = _core.Supervisor()
    try:
        fifo = supervisor.watch_timers()
        policy = _core.StopPolicy(signal.SIGKILL, 0.0)
        sleeper = ("sleep", "3600")
        specs = [_core.ProcessSpec(rank, sleeper, env=dict(os.environ)) for rank in range(WORKERS)]
        supervisor.start(_core.GroupSpec(specs, on_failure=policy, linger=0.0))
        pids: list[int] = []
        while not pids:
            event = supervisor.next_event(HANG)
            if isinstance(event, _core.GroupStarted):
                pids = event.pids
            elif event is None or isinstance(event, _core.StartFailed):
                raise RuntimeError(f"the workers do not start: {event}")
        _write(fifo, pids)
        # Convert between the clocks with a constant offset, because they drift very little in a few seconds.
        offset_ns = time.time_ns() - time.monotonic_ns()
        late: list[float] = []
        while len(late) < WORKERS:
            event = supervisor.next_event(HANG)
            if event is None:
                raise TimeoutError(f"{len(late)} of {WORKERS} timers have expired")
            if isinstance(event, _core.TimerExpired):
                late.append((event.seen_ns + offset_ns) / 1e6 - event.deadline * 1e3)
        return late
    finally:
        supervisor.close()


def _write(fifo: str, pids: list[int]) -> None:
    now = time.time()
    with open(fifo, "wb", buffering=0) as file:
        for pid in pids:
            for number in range(TIMERS):
                record = {
                    "version": 1,
                    "pid": pid,
                    "scope_id": f"timer/{number}",
                    # Let one timer per process expire, because the core limits the reports of timers without
                    # a signal to 64 a minute.
                    "expiration_time": now + (FAR if number else AHEAD + random.uniform(0.0, SPREAD)),
                    "signal": 0,
                }
                file.write(json.dumps(record).encode() + b"\n")
