"""Cost of a failure with kept state, beside torchrun with checkpoints, and the cost of steps without one."""

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Launcher, Options, Row, Samples, run, take_turns, worker

N = 2
PATIENCE = 180.0


def measure(options: Options) -> list[Row]:
    return [*_failures(options), *_costs(options)]


def _failures(options: Options) -> list[Row]:
    lost, spans, restores = Samples(options), Samples(options), Samples(options)
    rng = random.Random(3)

    def one(launcher: Launcher) -> None:
        kill_step, environ, warm = rng.randrange(26, 51), {}, ["--warm", "auto"]
        if launcher.name == "torchrun":
            # Without this, restarted ranks under torchrun 2.15 often find addresses of the attempt before.
            environ, warm = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, []
        with TemporaryDirectory(prefix="bench-") as folder:
            program = (worker("kept.py"), "train", str(kill_step), str(Path(folder, "checkpoint")))
            options = ("--nproc-per-node", str(N), "--max-restarts", "1", *warm)
            with run(launcher, *options, *program, environ=environ) as running:
                (death,) = running.reports.take("dies", 1, timeout=PATIENCE)
                again = running.reports.take("again", N, 1, timeout=PATIENCE)
                (begin, *_) = running.reports.take("from", N, 1)
                restored = running.reports.take("restore", N, 1)
                lost.add(launcher, kill_step - 1 - begin.at_ns)
                spans.add(launcher, (max(each.at_ns for each in again) - death.at_ns) / 1e6)
                restores.add(launcher, max(each.at_ns for each in restored) / 1e6)

    take_turns(options, options.repeats(10, 1), one)
    conditions = (
        f"{N} ranks, 9 million parameters (108 MB of state), torchrun with a checkpoint every 25 steps"
    )
    return [
        *lost.rows("keep: SIGKILL of a rank, steps lost (mean)", "", conditions, _mean),
        *spans.rows("keep: SIGKILL of a rank, until all have ended that step", "ms", conditions),
        *restores.rows("keep: loading the state", "ms", conditions),
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _costs(options: Options) -> list[Row]:
    """Measure elasticrs only, because torchrun has no counterpart."""
    ours = tuple(each for each in options.launchers if each.name == "elasticrs")
    options = options._replace(launchers=ours)
    rows = []
    for mode, number, event, name, unit, conditions, factor in (
        ("ends", 288, "end", "processor time of a step, 288 tensors", "ms", "AdamW, no copies", 1e6),
        ("ends", 2304, "end", "processor time of a step, 2304 tensors", "ms", "AdamW, no copies", 1e6),
        ("copies", 10, "blocked", "time blocked by a copy every 10 steps", "%", "108 MB of state", 1e4),
    ):
        samples = Samples(options)

        def one(
            launcher: Launcher,
            mode: str = mode,
            number: int = number,
            event: str = event,
            factor: float = factor,
            samples: Samples = samples,
        ) -> None:
            with run(launcher, worker("kept.py"), mode, str(number)) as running:
                samples.add(launcher, running.reports.take(event, 1, timeout=PATIENCE)[0].at_ns / factor)

        take_turns(options, options.repeats(5, 1), one)
        rows += samples.rows(f"keep: {name}", unit, f"one rank, {conditions}")
    return rows
