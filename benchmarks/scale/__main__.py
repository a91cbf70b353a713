"""Command line of the scale benchmark; see ``python -m benchmarks.scale --help``."""

import argparse
import json
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.scale import job, tables

SIZES = (2, 8, 32, 128, 512, 1_000, 4_096, 10_000)
TORCH_MOST = 128


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description="What a rendezvous of many agents costs."
    )
    parser.add_argument("--agents", type=int, action="append", help=f"may be given several times: {SIZES}")
    parser.add_argument("--processes", type=int, default=4, help="that the agents share (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts (default: 3)")
    parser.add_argument("--store", choices=("own", "kept", "etcd"), default="own", help="where they meet")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's handler")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    parser.add_argument("--markdown", type=Path, help="where to write the tables")
    parser.add_argument("--json", type=Path, help="where to keep every figure; one that is there is added to")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    facts = report.machine()
    kept: dict[str, dict[str, dict[str, float]]] = {"elasticrs": {}, "torch": {}}
    if arguments.json and arguments.json.exists():
        kept = json.loads(arguments.json.read_text(encoding="utf-8"))["figures"]
    for agents in arguments.agents or SIZES:
        kept["elasticrs"][str(agents)] = job.typical(
            [job.measure(agents, arguments.processes, arguments.store) for _ in range(arguments.repeats)]
        )
        print(agents, kept["elasticrs"][str(agents)], file=sys.stderr, flush=True)
        if agents <= TORCH_MOST and not arguments.no_torch:
            kept["torch"][str(agents)] = job.typical(
                [job.measure_torch(agents, arguments.processes) for _ in range(arguments.repeats)]
            )
            print("torch", agents, kept["torch"][str(agents)], file=sys.stderr, flush=True)
    if arguments.json:
        text = json.dumps({"machine": facts, "figures": kept}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    ours, others = ({int(n): values for n, values in kept[name].items()} for name in ("elasticrs", "torch"))
    text = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text += "\n\n" + tables.markdown(ours, others)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.svg:
        arguments.svg.write_text(tables.picture(ours, others), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
