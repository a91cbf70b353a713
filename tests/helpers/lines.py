"""Parsers of lines that the launcher prints, for tests that can see only stderr."""

import re


def leftovers(stderr: str, outcome: str = "killed") -> list[int]:
    """Return the pids of the leftover processes that have this outcome: ``killed``, ``could not kill`` or
    ``kept``.
    """
    lines = re.findall(rf": {outcome} processes .*?: (.*)", stderr)
    return [int(pid) for line in lines for pid in re.findall(r"\b(\d+) \(", line)]
