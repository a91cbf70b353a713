"""Death of a worker in a training job: ``python -m benchmarks.train``.

From SIGKILL of one of 4 to the end of the next step in all: under torchrun and after a restart, cold and
warm, with a checkpoint every 50 steps; and where only that worker is replaced, cold and warm, with
``elasticrs.train``.
"""

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import report
from benchmarks.harness import LAUNCHERS, Launcher, Options, Samples, run, take_turns, worker

N = 4
KILL_STEP = 75
PATIENCE = 300.0
LOST = 40.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it works")
    quick = parser.parse_args().quick
    torchrun, ours = LAUNCHERS
    replace = (*ours.command, "--on-failure", "replace")
    launchers = (
        torchrun,
        Launcher("restart cold", ours.command),
        Launcher("restart warm", (*ours.command, "--warm", "auto")),
        Launcher("replace cold", replace),
        Launcher("replace warm", (*replace, "--warm", "auto")),
    )
    options = Options(launchers, quick)
    spans, steps = Samples(options), Samples(options)

    def one(launcher: Launcher) -> None:
        mode = "replace" if "replace" in launcher.name else "restart"
        with TemporaryDirectory(prefix="bench-") as folder:
            arguments = ("--nproc-per-node", str(N), "--max-restarts", "1", worker("train.py"), mode)
            with run(launcher, *arguments, str(Path(folder, "checkpoint"))) as running:
                reports = running.reports
                reports.take("again", N, timeout=PATIENCE)
                reports.take("from", N)
                (death,) = reports.take("dies", 1, timeout=PATIENCE)
                try:
                    again = reports.take("again", N, timeout=LOST)
                except TimeoutError:
                    # With torchrun 2.15, gloo sometimes finds the addresses of the previous attempt.
                    print(f"{launcher.name}: the restarted workers failed", file=sys.stderr)
                    return
                spans.add(launcher, (max(each.at_ns for each in again) - death.at_ns) / 1e6)
                # Count the completed steps that are repeated, and the step that was interrupted.
                steps.add(launcher, KILL_STEP + 1 - min(each.at_ns for each in reports.take("from", N)))

    take_turns(options, options.repeats(5, 1), one)
    rows = spans.rows(f"SIGKILL of one of {N}: next step done in all", "ms", "gloo, a small model")
    rows += steps.rows("steps that were begun again", "", "a checkpoint every 50")
    print(report.table(rows, [each.name for each in launchers]))
    moment = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H%M%SZ-train")
    print(f"kept in {report.write(rows, report.machine(), moment)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
