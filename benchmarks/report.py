"""Facts about the machine, and results as a table and as JSON."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.harness import Row

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, str]:
    """Return the properties of the machine on which the results depend."""
    load = "/".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": _processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "elasticrs": metadata.version("elasticrs"),
        "rustc": _output("rustc", "--version"),
        "load before (1/5/15 min)": load,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return "not found"


def table(rows: Sequence[Row], launchers: Sequence[str]) -> str:
    """Return a Markdown table with a line for each result, a column for each launcher, and their ratio."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.launcher] = row
    header = ["figure", *launchers, *([" / ".join(launchers)] if len(launchers) > 1 else []), "conditions"]
    lines = [header, ["---", *(["---:"] * (len(header) - 2)), "---"]]
    for name, found in by_name.items():
        values = [_value(found[each]) if each in found else "-" for each in launchers]
        ratio = [_ratio(found, launchers)] if len(launchers) > 1 else []
        rows_found = [found[each] for each in launchers if each in found]
        lines.append([name, *values, *ratio, f"{rows_found[0].conditions}; {_samples(rows_found)}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _value(row: Row) -> str:
    span = f" ({' to '.join(map(_short, row.span))})" if row.span else ""
    return f"{'> ' * row.is_bound}{_short(row.value)} {row.unit}".strip() + span


def _samples(rows: Sequence[Row]) -> str:
    """Return a single number if all launchers have the same number of samples; otherwise, one number per
    launcher, in order.
    """
    counts = [str(row.samples) for row in rows]
    if len(set(counts)) == 1:
        return f"{counts[0]} sample{'s' * (counts[0] != '1')}"
    return f"{' and '.join(counts)} samples"


def _ratio(found: dict[str, Row], launchers: Sequence[str]) -> str:
    first, last = found.get(launchers[0]), found.get(launchers[-1])
    if first is None or last is None or last.value <= 0 or last.is_bound:
        return "-"
    return f"{'> ' * first.is_bound}{_short(first.value / last.value)}"


def _short(value: float) -> str:
    """Format a number with three significant digits."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def write(rows: Sequence[Row], facts: dict[str, str], name: str) -> Path:
    """Write everything to a JSON file and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"command": sys.argv[1:], "machine": facts, "figures": [row._asdict() for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
