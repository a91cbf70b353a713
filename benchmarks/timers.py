"""Expiration timers in the agent: how late they are, how many records a FIFO takes, what a request costs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Launcher, Options, Row, Run, Samples, percentile, run, take_turns, worker

WORKERS = 64
TIMERS = 16
RECORDS = 200_000
# As many as a pipe holds with room to spare: torch's client fails when it is full.
REQUESTS = 200


def measure(options: Options) -> list[Row]:
    """Lateness, throughput and cost."""
    return _lateness(options) + _throughput(options) + _cost(options)


@contextmanager
def _job(launcher: Launcher, workers: int, *arguments: str) -> Iterator[Run]:
    with run(
        launcher,
        "--nproc-per-node",
        str(workers),
        worker("timers.py"),
        *arguments,
        environ={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
    ) as running:
        yield running


def _lateness(options: Options) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with _job(launcher, WORKERS, "expire", str(TIMERS)) as running:
            pids = {each.rank: each.pid for each in running.reports.take("ready", WORKERS)}
            os.kill(pids.pop(0), signal.SIGUSR2)
            due = running.reports.take("due", 1)[0].at_ns
            samples.add(launcher, (running.reports.take("expired", 1)[0].at_ns - due) / 1e6)
            # SIGTERM has woken nobody: the end of 63 processes would be what is measured.
            for pid in pids.values():
                os.kill(pid, signal.SIGUSR2)

    take_turns(options, options.repeats(20, 2), one)
    conditions = (
        f"{WORKERS} workers with {TIMERS} timers each, one of which expires; from its deadline until the "
        "signal has arrived in the worker; a job for each sample"
    )
    return [
        *samples.rows("timer: lateness, p50", "ms", conditions),
        *samples.rows("timer: lateness, max", "ms", conditions, max),
    ]


def _throughput(options: Options) -> list[Row]:
    samples = Samples(options)
    records = options.repeats(RECORDS, 20_000)

    def one(launcher: Launcher) -> None:
        with _job(launcher, 1, "pour", str(records)) as running:
            began, ended = (running.reports.take(event, 1)[0].at_ns for event in ("began", "poured"))
            samples.add(launcher, records / ((ended - began) / 1e9))

    take_turns(options, options.repeats(5, 1), one)
    conditions = (
        f"{records} records, acquire and release in turns, through one FIFO, as fast as the agent takes them"
    )
    return samples.rows("timer: records per second", "1/s", conditions)


def _cost(options: Options) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with _job(launcher, 1, "acquire", launcher.name, str(REQUESTS)) as running:
            spans = running.reports.take("span", REQUESTS)
            samples.add(launcher, *(report.at_ns / 1e3 for report in spans))

    take_turns(options, options.repeats(10, 1), one)
    conditions = "the client of each, one acquire, then a release that is not counted"
    return [
        *samples.rows("timer: acquire, p50", "µs", conditions),
        *samples.rows("timer: acquire, p99", "µs", conditions, lambda values: percentile(values, 99)),
    ]
