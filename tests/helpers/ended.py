"""A finished job with its JSON report."""

import json
from pathlib import Path

import jsonschema

from .launcher import Launched
from .schema import DOCS


class Ended:
    """A finished job: its exit code and its JSON report, which is validated against the schema.

    Args:
        launched: the launcher, which may still run.
        path: path of the report.
    """

    def __init__(self, launched: Launched, path: Path) -> None:
        self.code, self.stderr = launched.wait(), launched.stderr
        self.report = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.validate(self.report, json.loads((DOCS / "report.schema.json").read_text("utf-8")))

    @property
    def restarts(self) -> int:
        """Number of restarts that count against the limit."""
        count: int = self.report["restarts"]["charged"]
        return count
