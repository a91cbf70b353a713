"""Cost of a failure with kept state, beside torchrun with checkpoints, and the cost of steps without one."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Launcher, Options, Row, Samples, run, take_turns, worker

N = 2
PATIENCE = 180.0

Costs = dict[str, tuple[str, str, str, float]]


def measure(options: Options) -> list[Row]:
    return [
        *_failures(options, "kill", "SIGKILL of a rank", options.repeats(6, 1)),
        *_failures(options, "raise", "exception in a rank", options.repeats(4, 1)),
        *_costs(options),
    ]


def _failures(options: Options, how: str, name: str, rounds: int) -> list[Row]:
    lost, spans, restores = Samples(options), Samples(options), Samples(options)
    rng = random.Random(3)

    def one(launcher: Launcher) -> None:
        step, environ, warm = rng.randrange(26, 51), {}, ["--warm", "auto"]
        if launcher.name == "torchrun":
            # Without this, restarted ranks under torchrun 2.15 often find addresses of the attempt before.
            environ, warm = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, []
        with TemporaryDirectory(prefix="bench-") as folder:
            program = (worker("kept.py"), how, str(step), str(Path(folder, "checkpoint")))
            options = ("--nproc-per-node", str(N), "--max-restarts", "1", *warm)
            with run(launcher, *options, *program, environ=environ) as running:
                (death,) = running.reports.take("dies", 1, timeout=PATIENCE)
                again = running.reports.take("again", N, 1, timeout=PATIENCE)
                (begin, *_) = running.reports.take("from", N, 1)
                restored = running.reports.take("restore", N, 1)
                lost.add(launcher, step - 1 - begin.at_ns)
                spans.add(launcher, (max(each.at_ns for each in again) - death.at_ns) / 1e6)
                restores.add(launcher, max(each.at_ns for each in restored) / 1e6)

    take_turns(options, rounds, one)
    conditions = (
        f"{N} ranks, 9 million parameters (108 MB of state), torchrun with a checkpoint every 25 steps"
    )
    return [
        *lost.rows(f"keep: {name}, steps lost", "", conditions, has_span=True),
        *spans.rows(f"keep: {name}, until all have ended that step", "ms", conditions, has_span=True),
        *restores.rows(f"keep: {name}, loading the state", "ms", conditions, has_span=True),
    ]


COSTS: tuple[tuple[str, int, Costs], ...] = (
    ("ends", 288, {"end": ("processor time of a step, 288 tensors", "ms", "AdamW, no copies", 1e6)}),
    ("ends", 2304, {"end": ("processor time of a step, 2304 tensors", "ms", "AdamW, no copies", 1e6)}),
    (
        "copies",
        10,
        {
            "blocked": ("time blocked by a copy every 10 steps", "%", "108 MB of state", 1e4),
            "copy": ("a periodic copy with its checksum, in the background", "ms", "108 MB of state", 1e6),
            "death": ("a copy at the end of the process", "ms", "108 MB of state", 1e6),
            "memcpy": ("copying the same tensors without Keep", "ms", "108 MB of state", 1e6),
        },
    ),
)
"""Each mode of `workers/kept.py`, its argument, and each figure's name, unit, conditions and divisor."""


def _costs(options: Options) -> list[Row]:
    """Measure elasticrs only, because torchrun has no counterpart."""
    ours = tuple(each for each in options.launchers if each.name == "elasticrs")
    options = options._replace(launchers=ours)
    rows = []
    for mode, number, events in COSTS:
        samples = {event: Samples(options) for event in events}

        def one(
            launcher: Launcher,
            mode: str = mode,
            number: int = number,
            events: Costs = events,
            samples: dict[str, Samples] = samples,
        ) -> None:
            with run(launcher, worker("kept.py"), mode, str(number)) as running:
                for event, (*_, divisor) in events.items():
                    (found,) = running.reports.take(event, 1, timeout=PATIENCE)
                    samples[event].add(launcher, found.at_ns / divisor)

        take_turns(options, options.repeats(7, 1), one)
        for event, (name, unit, conditions, _) in events.items():
            rows += samples[event].rows(f"keep: {name}", unit, f"one rank, {conditions}", has_span=True)
    return rows
