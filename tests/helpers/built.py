"""Programs and libraries of the crates for tests, which ``make test`` builds."""

import os
from pathlib import Path

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[2] / "target"))


def built(name: str) -> Path:
    return TARGET / "debug" / name


def old_kernel(*features: str) -> tuple[str | Path, ...]:
    """Return a command prefix that runs a program as on a kernel without these features."""
    return (built("testkit-worker"), "old-kernel", ",".join(features))
