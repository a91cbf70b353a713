"""The command line of the kit: see ``python -m tests.gpu_kit --help``."""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .checks import CHECKS
from .job import CheckFailedError, Context, Figures, Skipped

WHOLE = 540.0
"""Seconds that all checks may take together."""
EACH = 90.0
"""Seconds that one check may take."""
FOREIGN = ("PET_", "TORCHELASTIC_", "ELASTICRS_", "KIT_")
"""Prefixes of environment variables to remove, because they would change what the launcher does."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_kit", description="Check elasticrs on a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument(
        "--wheel", type=Path, help="install this wheel into a temporary folder, and test that"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu-checks.json"), help="where the results go")
    parser.add_argument("--only", action="append", choices=CHECKS, help="may be given several times")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def install(wheel: Path, folder: Path) -> None:
    """Install the wheel into a folder, without downloading anything."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True)


def machine(device: str) -> dict[str, Any]:
    """Return the versions of Python and torch and, for a GPU, its properties and the version of NCCL.

    Exits with a one-line message if elasticrs, torch or a GPU is missing.
    """
    if importlib.util.find_spec("elasticrs") is None:
        sys.exit("elasticrs is not installed here: name its wheel with --wheel")
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch: run the kit with a Python that has one")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here; with --device cpu the same programs run with gloo")

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "device": device,
        "gpus": [],
        "nccl": None,
    }
    if device == "cuda":
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return facts


def row_of(
    check: str, outcome: str, detail: str = "", figures: Figures | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    return {
        "check": check,
        "outcome": outcome,
        "seconds": round(seconds, 3),
        "figures": figures or {},
        "detail": detail,
    }


def run(name: str, context: Context) -> dict[str, Any]:
    started = time.monotonic()
    figures: Figures = {}
    try:
        figures = CHECKS[name](context)
        outcome, detail = "passed", ""
    except Skipped as reason:
        outcome, detail = "skipped", str(reason)
    except (CheckFailedError, OSError, subprocess.SubprocessError) as error:
        outcome, detail = "failed", f"{type(error).__name__}: {error}"
    return row_of(name, outcome, detail, figures, time.monotonic() - started)


def as_line(row: dict[str, Any]) -> str:
    """Return the row as a line of the table."""
    figures = ", ".join(
        f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row["figures"].items()
    )
    return f"{row['check']:16} {row['outcome']:8} {row['seconds']:6.1f} s  {figures or row['detail']}"


def main() -> int:
    arguments = parse()
    if arguments.facts:
        print(json.dumps(machine(arguments.device)))
        return 0
    end = time.monotonic() + WHOLE
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    with tempfile.TemporaryDirectory(prefix="elasticrs_gpu_") as name:
        scratch = Path(name)
        if arguments.wheel:
            install(arguments.wheel, scratch / "site")
            environment["PYTHONPATH"] = str(scratch / "site")
        # Get the facts in a child process, because this process may not hold device memory while the checks
        # measure it.
        command = [sys.executable, "-m", "tests.gpu_kit", "--facts", "--device", arguments.device]
        looked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if looked.returncode != 0:
            print(looked.stderr, end="", file=sys.stderr)
            return looked.returncode
        facts = json.loads(looked.stdout)
        nccl = tuple(facts["nccl"]) if facts["nccl"] else None
        rows: list[dict[str, Any]] = []
        for check in arguments.only or CHECKS:
            if any(row["figures"].get("pidfds") is False for row in rows):
                rows.append(
                    row_of(check, "skipped", "elasticrun needs pidfds, which this kernel does not have")
                )
                print(as_line(rows[-1]), flush=True)
                continue
            (scratch / check).mkdir()
            deadline = min(end, time.monotonic() + EACH)
            context = Context(
                arguments.device, len(facts["gpus"]), nccl, scratch / check, deadline, environment
            )
            rows.append(run(check, context))
            print(as_line(rows[-1]), flush=True)
    arguments.json.write_text(json.dumps({"machine": facts, "checks": rows}, indent=1) + "\n")
    outcomes = Counter(row["outcome"] for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()), f"({arguments.json})")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
