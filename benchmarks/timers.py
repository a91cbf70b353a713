"""Expiration timers and heartbeats: how late the agent is, how many records it can process, and what a call
costs.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Launcher, Options, Row, Run, Samples, percentile, run, take_turns, worker

WORKERS = 64
TIMERS = 16
RECORDS = 200_000
# Few enough to fit in a pipe, because torch's client fails when the pipe is full.
REQUESTS = 200
BEATS = 100_000
HANG_WORKERS = 16
HANG_LIMIT = 1.0


def measure(options: Options) -> list[Row]:
    """Measure lateness, throughput and cost. Measure heartbeats for elasticrs only, because torchrun has
    none.
    """
    ours = options._replace(launchers=tuple(each for each in options.launchers if each.name == "elasticrs"))
    return _lateness(options) + _throughput(options) + _cost(options) + _beats(ours) + _hang(ours)


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
            # The workers have blocked SIGTERM, because the measurement would otherwise include the exit of 63
            # processes. SIGUSR2 makes them exit.
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


def _beats(options: Options) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        arguments = ("--hang-timeout", "600", worker("timers.py"), "beat", str(BEATS))
        with run(launcher, *arguments) as running:
            spans = running.reports.take("span", 1)
            samples.add(launcher, *(report.at_ns / BEATS / 1e3 for report in spans))

    take_turns(options, options.repeats(10, 1), one)
    conditions = f"{BEATS} heartbeats with a step in a loop, the loop included; a job for each sample"
    return samples.rows("heartbeat: one call, p50", "µs", conditions)


def _hang(options: Options) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        arguments = ("--hang-timeout", str(HANG_LIMIT), "--nproc-per-node", str(HANG_WORKERS))
        with run(launcher, *arguments, worker("timers.py"), "hang") as running:
            last = running.reports.take("last", 1)[0].at_ns
            told = max(each.at_ns for each in running.reports.take("told", HANG_WORKERS - 1))
            samples.add(launcher, (told - last) / 1e6 - HANG_LIMIT * 1e3)

    take_turns(options, options.repeats(20, 2), one)
    conditions = (
        f"{HANG_WORKERS} Python workers, --hang-timeout {HANG_LIMIT:g}, one stops beating; from the end of "
        "its limit, with the stacks of all ranks taken, until SIGTERM has arrived in the last sibling"
    )
    return [
        *samples.rows("hang: found, evidence, signal, p50", "ms", conditions),
        *samples.rows("hang: found, evidence, signal, max", "ms", conditions, max),
    ]
