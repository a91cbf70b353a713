"""Parses Xids (error codes of NVIDIA's driver) in kernel log records, and looks up the recommended actions.

``xids.json`` has the actions and a link to NVIDIA's catalog. It is read on first use.
"""

from __future__ import annotations

import json
import os
import re

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_RECORD = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)(?:, (.*))?", re.DOTALL
)
_PROCESS = re.compile(r"\bpid='?(\d+|<unknown>)'?,?\s*(?:name=[^,]*,?\s*)?")
_ANNOUNCEMENT = re.compile(r"to 0x([0-9a-fA-F]+)(?: \(([^)]*)\))?")
_NVLINK = re.compile(r"(\w+)\s+(Fatal|Nonfatal)\b(?:[^(]*\(0x([0-9a-fA-F]+))?")
_MAX_DETAIL = 200

_known: dict[int, dict[str, Any]] = {}
_catalog: dict[str, Any] = {}


class LogRecord(Value):
    """Record of an Xid in the kernel log. ``address`` has the GPU's PCI domain, bus and device number.
    ``pid`` is the process whose work on the GPU failed, if known. ``detail`` is the rest of the first line.
    """

    address: tuple[int, int, int]
    code: int
    pid: int | None
    detail: str


class Xid(Value):
    """All occurrences of an Xid on one GPU (its number in ``nvidia-smi``) during an attempt.
    ``pids`` are the processes whose work on the GPU failed. ``workers`` are the workers that are among these
    processes or their ancestors. ``detail`` is the text in the kernel log; empty if only NVML has reported
    the Xid.
    """

    code: int
    gpu: int
    count: int
    pids: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    detail: str = ""

    def note(self) -> str:
        found = meaning(self.code, self.detail)
        who = [f"GPU {self.gpu}"]
        if self.pids:
            who.append(f"pid{'s' if len(self.pids) > 1 else ''} {', '.join(map(str, self.pids))}")
        if self.count > 1:
            who.append(f"{self.count} times")
        return f"Xid {self.code} ({', '.join(who)}): {found.text}; {found.advice}"


class Meaning(Value):
    """Description of an Xid. ``action`` is a key in ``xids.json``, ``advice`` its text for users."""

    text: str
    action: str
    advice: str


def address_of(text: str) -> tuple[int, int, int]:
    """Parse a PCI address such as ``00000000:3B:00.0``; raise ``ValueError`` for any other text."""
    domain, bus, device = text.partition(".")[0].split(":")
    return int(domain, 16), int(bus, 16), int(device, 16)


def parse(record: str) -> LogRecord | None:
    """Parse a record of the kernel log. Return ``None`` if the record is not about an Xid."""
    found = _RECORD.search(record)
    if found is None:
        return None
    address, code, rest = found.groups()
    rest = (rest or "").partition("\n")[0]
    process = _PROCESS.search(rest)
    pid = int(process[1]) if process is not None and process[1].isdecimal() else None
    detail = _PROCESS.sub("", rest, count=1).strip()
    return LogRecord(address_of(address), int(code), pid, detail[:_MAX_DETAIL])


def meaning(code: int, detail: str = "") -> Meaning:
    """Look up an Xid. The action for Xids 144 to 150 and 154 depends on the driver's text ``detail``."""
    _load()
    entry = _known.get(code)
    if entry is None:
        return _meaning(f"not in NVIDIA's catalog of {_catalog['date']}", "support")
    text, action = entry["text"], entry.get("action", "driver")
    if "by_announcement" in entry and (found := _ANNOUNCEMENT.search(detail)):
        action = entry["by_announcement"].get(str(int(found[1], 16)), action)
        text += f": {found[2]}" if found[2] else ""
    elif "by_severity" in entry and (found := _NVLINK.search(detail)):
        unit, severity, information = found.groups()
        # Bits 20 to 25 of the first number in parentheses are the subcode.
        subcode = None if information is None else int(information, 16) >> 20 & 0x3F
        action = entry["by_severity"][severity]
        action = entry.get("by_unit", {}).get(f"{unit} {severity}", action)
        action = entry.get("by_subcode", {}).get(str(subcode), action)
        text += f": {unit}, {severity.lower()}"
    return _meaning(text, action)


def _meaning(text: str, action: str) -> Meaning:
    return Meaning(text, action, _catalog["actions"][action])


def _load() -> None:
    if _known:
        return
    with open(os.path.join(os.path.dirname(__file__), "xids.json"), encoding="utf-8") as file:
        _catalog.update(json.load(file))
    for entry in _catalog["xids"]:
        for part in entry["codes"].split(","):
            first, _, last = part.partition("-")
            _known.update(dict.fromkeys(range(int(first), int(last or first) + 1), entry))
