"""Measures the time from an uncaught exception or ``sys.exit(3)`` in a worker until its siblings are
signalled, until all workers have exited, and until the restarted workers run.
"""

import os
import random
import select
import signal
import time
from collections.abc import Sequence

from benchmarks.harness import (
    HANG,
    Launcher,
    Options,
    Report,
    Row,
    Run,
    Samples,
    percentile,
    run,
    stamped,
    take_turns,
    worker,
)

N = 4
FAILURES_PER_LAUNCH = 25


class Measured:
    """Samples for one kind of failure."""

    def __init__(self, options: Options, ranks: int) -> None:
        self._ranks = ranks
        self._arrived, self._sent = Samples(options), Samples(options)
        self._ended, self._restarted = Samples(options), Samples(options)

    def one(
        self,
        launcher: Launcher,
        program: str,
        how: str,
        ready: str,
        failures: int,
        rng: random.Random,
    ) -> None:
        """Run a job and make a random worker fail, ``failures`` times in all. Before each failure, wait until
        all workers have reported ``ready``.
        """
        options = ("--nproc-per-node", str(self._ranks), "--max-restarts", str(failures))
        # Disable the limit for repeated failures. Otherwise, elasticrs would end the job when the same
        # failure occurs again.
        environ = {"PET_MAX_SAME_FAILURES": "0"}
        with run(stamped(launcher), *options, worker(program), how, environ=environ) as running:
            failed = {}
            for attempt in range(failures):
                running.reports.peek(ready, self._ranks, attempt)
                workers = running.reports.take("first-line", self._ranks, attempt)
                # Wait until all processes are idle. Use a random delay, because some launchers poll at fixed
                # intervals.
                time.sleep(rng.uniform(0.2, 0.4))
                failed[attempt], ended_ns = _fail_one(running, workers, rng, attempt)
                stamps = [each.at_ns for each in running.reports.take("terminated", self._ranks - 1, attempt)]
                usable = [each.at_ns for each in running.reports.peek(ready, self._ranks, attempt + 1)]
                self._arrived.add(launcher, (max(stamps) - failed[attempt]) / 1e6)
                self._ended.add(launcher, (ended_ns - failed[attempt]) / 1e6)
                self._restarted.add(launcher, (max(usable) - failed[attempt]) / 1e6)
            running.stop()
            signalled = running.signalled()
            # Leave out the last attempt, because this program stopped it and no worker failed in it.
            sent = [signalled[attempt] - at_ns for attempt, at_ns in failed.items() if attempt in signalled]
            self._sent.add(launcher, *(each / 1e6 for each in sent))

    def rows(self, what: str, conditions: str, usable: str) -> list[Row]:
        """Return the results as rows of a table.

        Args:
            what: how the worker fails.
            conditions: conditions of the measurement.
            usable: name of the event at which the restarted workers count as running.
        """
        rows = []
        for percent in (50, 99):

            def pick(values: Sequence[float], percent: int = percent) -> float:
                return percentile(values, percent)

            for name, samples in (
                ("SIGTERM in all siblings", self._arrived),
                ("all siblings signalled", self._sent),
                ("all workers have exited", self._ended),
                (usable, self._restarted),
            ):
                rows += samples.rows(f"{what}: {name}, p{percent}", "ms", conditions, pick)
        return rows


def _fail_one(running: Run, workers: Sequence[Report], rng: random.Random, attempt: int) -> tuple[int, int]:
    """Make a random worker fail. Return the time of the failure and the time at which the last worker had
    exited.
    """
    pidfds = [os.pidfd_open(each.pid) for each in workers]
    try:
        poll = select.poll()
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        signal.pidfd_send_signal(rng.choice(pidfds), signal.SIGUSR1)
        deadline, left = time.monotonic() + HANG, len(pidfds)
        while left:
            ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            ended_ns = time.monotonic_ns()
            if not ended:
                raise TimeoutError("the workers do not exit")
            for pidfd, _ in ended:
                poll.unregister(pidfd)
            left -= len(ended)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
    return running.reports.take("raised", 1, attempt)[0].at_ns, ended_ns


def measure_plain(options: Options, ranks: int = N) -> list[Row]:
    return _measure(options, ranks, options.repeats(8, 1), "first-line", "last worker's first line")


def measure_torch(options: Options, ranks: int = N) -> list[Row]:
    return _measure(options, ranks, options.repeats(2, 1), "torch", "torch usable in all")


def _measure(options: Options, ranks: int, rounds: int, ready: str, usable: str) -> list[Row]:
    rows, is_plain = [], ready == "first-line"
    program = "raises.py" if is_plain else "raises_with_torch.py"
    for how, what in (("raise", "exception"), ("exit", "sys.exit(3)")):
        measured, rng = Measured(options, ranks), random.Random(5)

        def one(
            launcher: Launcher,
            how: str = how,
            measured: Measured = measured,
            rng: random.Random = rng,
        ) -> None:
            failures = options.repeats(FAILURES_PER_LAUNCH, 3)
            measured.one(launcher, program, how, ready, failures, rng)

        take_turns(options, rounds, one)
        kind = "in plain Python" if is_plain else "that imports torch"
        rows += measured.rows(what, f"N = {ranks}, worker {kind}, idle machine", usable)
    return rows
