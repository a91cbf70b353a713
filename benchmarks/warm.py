"""Workers that import torch, under torchrun, elasticrs (cold) and elasticrs ``--warm``: ``python -m
benchmarks.warm``.

The option ``--only`` selects a benchmark:

- ``launch``: time from the start of the launcher until every rank has used torch.
- ``restart``: time from the SIGKILL of a rank until every rank of the next attempt has used torch.
- ``raise``: time from an exception or ``sys.exit(3)`` in a rank until the other ranks have been signalled,
  until all workers have exited, and until every rank of the next attempt has used torch.
- ``step``: time from the SIGKILL of a rank until every rank has finished its first step of DDP with gloo.
- ``plain``: time from the SIGKILL of a worker that imports little until its replacement prints a line.
- ``idle``: processor time and wake-ups of the nursery while all workers wait.
- ``memory``: memory of each worker and of the nursery after a step.
- ``opens``: number of calls that open a file during a launch, counted by strace.
- ``slow-opens``: ``launch`` with each of these calls delayed by a millisecond, as on a network file system.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import idle, raised, report, restart
from benchmarks.harness import (
    LAUNCHERS,
    Launcher,
    Options,
    Row,
    Run,
    Samples,
    run,
    take_turns,
    wait_readable,
    worker,
)

PATIENCE = 300.0
"""Eight ranks that import torch on two cores take long."""


def start(launcher: Launcher, ranks: int, mode: str, restarts: int = 0) -> AbstractContextManager[Run]:
    """Start a job whose workers run ``warm.py`` in the given mode."""
    arguments = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts), worker("warm.py"), mode)
    return run(launcher, *arguments)


class LauncherEndedError(Exception):
    """The launcher exited before all ranks had reported."""


def last(running: Run, event: str, ranks: int, attempt: int = 0) -> int:
    """Return the time at which the last rank reported.

    Raises:
        LauncherEndedError: it will not.
        TimeoutError: it takes too long.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        has_ended = wait_readable(running.pidfd, 0.0)
        try:
            return max(each.at_ns for each in running.reports.peek(event, ranks, attempt, timeout=1.0))
        except TimeoutError:
            if has_ended:
                raise LauncherEndedError from None
            if time.monotonic() > deadline:
                raise


def measure_launch(options: Options, ranks: int) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with start(launcher, ranks, "import") as running:
            samples.add(launcher, (last(running, "torch", ranks) - running.started_ns) / 1e6)

    take_turns(options, options.repeats(5, 1), one)
    return samples.rows(f"launch of {ranks}: torch usable in all", "ms", "from before fork of the launcher")


def measure_restart(options: Options, ranks: int) -> list[Row]:
    return _restarts(options, ranks, "import", "torch", "torch usable in all")


def measure_step(options: Options, ranks: int) -> list[Row]:
    return _restarts(options, ranks, "step", "step", "first DDP step of all done (gloo)")


def _restarts(options: Options, ranks: int, mode: str, event: str, what: str) -> list[Row]:
    samples = Samples(options)
    rng = random.Random(3)
    kills = options.repeats(4, 1)

    def one(launcher: Launcher) -> None:
        with start(launcher, ranks, mode, kills) as running:
            for attempt in range(kills):
                last(running, event, ranks, attempt)
                time.sleep(rng.uniform(0.4, 0.6))
                victim = rng.choice(running.reports.peek(event, ranks, attempt)).pid
                killed_ns = time.monotonic_ns()
                os.kill(victim, signal.SIGKILL)
                try:
                    samples.add(launcher, (last(running, event, ranks, attempt + 1) - killed_ns) / 1e6)
                except LauncherEndedError:
                    # With torchrun 2.15, gloo sometimes finds the addresses of the previous attempt.
                    print(f"{launcher.name}: the restarted workers failed", file=sys.stderr)
                    return

    take_turns(options, options.repeats(3, 1), one)
    return samples.rows(f"SIGKILL of one of {ranks}: {what}", "ms", "idle machine")


def measure_memory(options: Options, ranks: int) -> list[Row]:
    shares, own, parents = Samples(options), Samples(options), Samples(options)

    def one(launcher: Launcher) -> None:
        with start(launcher, ranks, "step") as running:
            last(running, "step", ranks)
            pids = [each.pid for each in running.reports.peek("step", ranks)]
            sizes = [memory(pid) for pid in pids]
            shares.add(launcher, *(size["Pss"] for size in sizes))
            own.add(launcher, *(size["Private_Clean"] + size["Private_Dirty"] for size in sizes))
            if (parent := parent_of(pids[0])) != running.process.pid:
                parents.add(launcher, memory(parent)["Pss"])

    take_turns(options, 1, one)
    conditions = "after a step of DDP, MB of smaps_rollup"
    return [
        *shares.rows(f"memory of {ranks}: PSS of a worker", "MB", conditions),
        *own.rows(f"memory of {ranks}: private to a worker", "MB", conditions),
        *parents.rows(f"memory of {ranks}: PSS of the nursery", "MB", conditions),
    ]


def memory(pid: int) -> dict[str, float]:
    """Return the memory sizes of a process in MB, by name."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    return {name: int(value.split()[0]) / 1000 for name, _, value in (line.partition(":") for line in lines)}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def measure_plain(options: Options, ranks: int) -> list[Row]:
    return restart.measure_plain(options, ranks)


def measure_idle(options: Options, ranks: int) -> list[Row]:
    """Measure the idle nursery (the process that forks warm workers). torchrun has none."""
    seconds = options.repeats(20, 3)
    wakeups, cpu = Samples(options), Samples(options)

    def one(launcher: Launcher) -> None:
        with start(launcher, ranks, "import") as running:
            last(running, "torch", ranks)
            nursery = parent_of(running.reports.peek("torch", 1)[0].pid)
            if nursery == running.process.pid:
                return
            before = _settled(nursery)
            time.sleep(seconds)
            after = idle.use([nursery])
            wakeups.add(launcher, after.wakeups - before.wakeups)
            cpu.add(launcher, (after.cpu_ns - before.cpu_ns) / 1e6)

    take_turns(options, 1, one)
    conditions = f"{ranks} workers that wait, {seconds} s, after it has asked for huge pages"
    return [
        *wakeups.rows(f"idle nursery of {ranks}: wake-ups", "", conditions),
        *cpu.rows(f"idle nursery of {ranks}: CPU", "ms", conditions),
    ]


def _settled(pid: int) -> idle.Use:
    """Wait until the process has been idle for two seconds, but at most a minute."""
    now = idle.use([pid])
    for _ in range(30):
        before = now
        time.sleep(2.0)
        now = idle.use([pid])
        if now.wakeups == before.wakeups:
            break
    return now


STRACE = ("strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=open,openat,openat2")


def measure_opens(options: Options, ranks: int) -> list[Row]:
    """Count the files opened until all ranks have exited. Measure no time, because tracing slows the launch
    down.
    """
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        with TemporaryDirectory(prefix="bench-") as folder:
            log = Path(folder, "opens")
            traced = Launcher(launcher.name, (*STRACE, "-o", str(log), *launcher.command))
            with start(traced, ranks, "leave") as running:
                last(running, "torch", ranks)
                running.wait()
            # strace writes an interrupted call on two lines. Count only the first one.
            calls = [line for line in log.read_text(errors="replace").splitlines() if "resumed>" not in line]
            samples.add(launcher, len(calls))

    take_turns(options, 1, one)
    return samples.rows(
        f"launch of {ranks}: files opened", "", "open, openat, openat2 of all processes, strace"
    )


def measure_slow_opens(options: Options, ranks: int) -> list[Row]:
    samples = Samples(options)
    delay = ("-e", "inject=open,openat,openat2:delay_enter=1000", "-o", os.devnull)

    def one(launcher: Launcher) -> None:
        with start(Launcher(launcher.name, (*STRACE, *delay, *launcher.command)), ranks, "leave") as running:
            samples.add(launcher, (last(running, "torch", ranks) - running.started_ns) / 1e6)
            running.wait()

    take_turns(options, 1, one)
    return samples.rows(f"launch of {ranks}, opens of 1 ms: torch usable in all", "ms", "delayed by strace")


MEASURES: dict[str, Callable[[Options, int], list[Row]]] = {
    "launch": measure_launch,
    "restart": measure_restart,
    "raise": raised.measure_torch,
    "step": measure_step,
    "plain": measure_plain,
    "idle": measure_idle,
    "memory": measure_memory,
    "opens": measure_opens,
    "slow-opens": measure_slow_opens,
}
NEED_STRACE = {"opens", "slow-opens"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm", description=__doc__)
    parser.add_argument("--only", action="append", choices=MEASURES, help="may be given several times")
    parser.add_argument("--ranks", default="1,2,4,8", help="with commas (default 1,2,4,8)")
    parser.add_argument("--warm", default="auto", metavar="MODULES", help="of the warm column (default auto)")
    parser.add_argument(
        "--launcher", action="append", choices=["torchrun", "cold", "warm"], help="default: all"
    )
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it works")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    torchrun, ours = LAUNCHERS
    launchers = {
        "torchrun": torchrun,
        "cold": Launcher("cold", ours.command),
        "warm": Launcher("warm", (*ours.command, "--warm", arguments.warm)),
    }
    chosen = arguments.launcher or list(launchers)
    options = Options(tuple(launchers[name] for name in chosen), arguments.quick)
    facts = report.machine()
    rows: list[Row] = []
    for name in arguments.only or MEASURES:
        if name in NEED_STRACE and shutil.which("strace") is None:
            print(f"{name} needs strace", file=sys.stderr)
            continue
        for ranks in map(int, arguments.ranks.split(",")):
            print(f"{name}, {ranks} …", file=sys.stderr)
            rows += MEASURES[name](options, ranks)
    print(report.table(rows, chosen))
    moment = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H%M%SZ-warm")
    print(f"kept in {report.write(rows, facts, moment)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
