"""Command line of the benchmarks; see ``python -m benchmarks --help``."""

import argparse
import sys
from collections.abc import Callable
from datetime import datetime, timezone

from benchmarks import (
    deadlines,
    etcd,
    idle,
    kept,
    launch,
    leave,
    lost,
    operate,
    peers,
    raised,
    rendezvous,
    report,
    restart,
    scrape,
    siblings,
    tee,
    timers,
    train_steps,
    usage,
    verdict,
    worker_store,
)
from benchmarks.harness import LAUNCHERS, Options, Row

BENCHMARKS: dict[str, Callable[[Options], list[Row]]] = {
    "help": usage.measure,
    "launch": launch.measure,
    "siblings": siblings.measure,
    "raise": raised.measure_plain,
    "restart": restart.measure_plain,
    "restart-torch": restart.measure_torch,
    "exit": leave.measure,
    "tee-latency": tee.measure_latency,
    "tee-throughput": tee.measure_throughput,
    "idle": idle.measure,
    "nodes-rendezvous": rendezvous.measure,
    "nodes-failure": peers.measure,
    "nodes-killed": lost.measure_killed,
    "nodes-silent": lost.measure_silent,
    "nodes-verdict": verdict.measure,
    "nodes-idle": idle.measure_nodes,
    "nodes-etcd": etcd.measure,
    "timers": timers.measure,
    "timers-deadlines": deadlines.measure,
    "scrape": scrape.measure,
    "keep": kept.measure,
    "train-steps": train_steps.measure,
    "operate": operate.measure,
    "worker-store": worker_store.measure,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare with torchrun.")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="may be given several times")
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it works")
    parser.add_argument(
        "--launcher", action="append", choices=[each.name for each in LAUNCHERS], help="default: all"
    )
    parser.add_argument("--markdown", action="store_true", help="print the machine's facts as Markdown, too")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    chosen = arguments.launcher or [each.name for each in LAUNCHERS]
    options = Options(tuple(each for each in LAUNCHERS if each.name in chosen), arguments.quick)
    if absent := [each.name for each in options.launchers if not each.is_there()]:
        print(f"cannot be run: {', '.join(absent)}", file=sys.stderr)
        return 1
    facts = report.machine()
    rows: list[Row] = []
    for name in arguments.only or BENCHMARKS:
        print(f"{name} …", file=sys.stderr)
        rows += BENCHMARKS[name](options)
    if arguments.markdown:
        print("\n".join(f"- {name}: {value}" for name, value in facts.items()), end="\n\n")
    print(report.table(rows, [each.name for each in options.launchers]))
    moment = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H%M%SZ")
    print(
        f"kept in {report.write(rows, facts, moment).relative_to(report.RESULTS.parent.parent)}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
