"""Overhead of `elasticrs.train` per step compared with a bare loop, without failures."""

from benchmarks.harness import Launcher, Options, Row, Samples, run, take_turns, worker

STEPS = 100_000


def measure(options: Options) -> list[Row]:
    """Measure elasticrs only, because torchrun has no counterpart."""
    options = options._replace(
        launchers=tuple(each for each in options.launchers if each.name == "elasticrs")
    )
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        arguments = ("--on-failure", "replace", "--max-restarts", "1", worker("train_steps.py"), str(STEPS))
        with run(launcher, *arguments) as running:
            bare, loop = (running.reports.take(event, 1)[0].at_ns for event in ("bare", "train"))
            samples.add(launcher, (loop - bare) / STEPS / 1e3)

    take_turns(options, options.repeats(10, 1), one)
    conditions = (
        f"one worker under the agent, {STEPS} steps that do nothing, without snapshots and checkpoints; "
        "what the same calls take in a bare loop is subtracted; a job for each sample"
    )
    return samples.rows("train: overhead of a step, p50", "µs", conditions)
