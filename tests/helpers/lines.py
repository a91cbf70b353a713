"""Parsers of lines that the launcher prints, for tests that can see only stderr."""

import re


def leftovers(stderr: str, outcome: str = "killed") -> list[int]:
    """Return the pids of the leftover processes that have this outcome: ``killed``, ``could not kill`` or
    ``kept``.
    """
    lines = re.findall(rf": {outcome} processes .*?: (.*)", stderr)
    return [int(pid) for line in lines for pid in re.findall(r"\b(\d+) \(", line)]


def long_lines(stderr: str) -> list[str]:
    """Return the lines of the launcher that are too long for 110 columns. The names of the host and the group
    rank in front of a line and a path at its end do not count, because tests cannot know their lengths.
    """
    lines = re.findall(r"(?m)^elasticrs(?:\[.*?\])?: .*", stderr)
    return [line for line in lines if len(re.sub(r"(?<=^elasticrs)\[.*?\]|/\S*$", "", line)) > 110]
