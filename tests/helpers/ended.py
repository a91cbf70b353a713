"""A finished job with its JSON report."""

import json
from pathlib import Path
from typing import Any

import jsonschema

from .launcher import Launched
from .schema import DOCS


def report_of(path: Path) -> dict[str, Any]:
    """Return a JSON report, which must match its schema."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(report, json.loads((DOCS / "report.schema.json").read_text("utf-8")))
    return report


class Ended:
    """A finished job: its exit code and its JSON report, which is validated against the schema.

    Args:
        launched: the launcher, which may still run.
        path: path of the report.
    """

    def __init__(self, launched: Launched, path: Path) -> None:
        self.code, self.stderr = launched.wait(), launched.stderr
        self.report = report_of(path)

    @property
    def restarts(self) -> int:
        """Number of restarts that count against the limit."""
        count: int = self.report["restarts"]["charged"]
        return count
