"""Evidence that the kernel's OOM killer killed a worker.

Such a kill looks like any other SIGKILL, but the kernel counts OOM kills for each memory cgroup (v2:
``memory.events``, v1: ``memory.oom_control``) and for the machine (``/proc/vmstat``). If a counter has risen
during the attempt and the agent did not send the SIGKILL, the OOM killer almost certainly did.
"""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VMSTAT = "/proc/vmstat"
"""File with the number of the machine's OOM kills, used only if no memory cgroup's counters can be read."""


_ADVICE = (
    "raise the memory limit of its control group, or use smaller batches or fewer data loader workers",
    "the machine was out of memory: use smaller batches or fewer data loader workers",
)
"""Advice to the user: if a cgroup's limit was exceeded, and if the machine ran out of memory."""


def memory_counters(cgroups: str, mountinfo: str) -> list[str]:
    """Return the paths of the OOM counters in a process's memory cgroups. Some may not exist. ``cgroups`` is
    its ``/proc/PID/cgroup``, and ``mountinfo`` the reader's ``/proc/self/mountinfo``.
    """
    counters = []
    for line in cgroups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if not controllers:
            kind, option, name = "cgroup2", "", "memory.events"
        elif "memory" in controllers.split(","):
            kind, option, name = "cgroup", "memory", "memory.oom_control"
        else:
            continue
        directory = _mounted_at(path, mountinfo, kind, option)
        if directory is not None:
            counters.append(f"{directory.rstrip('/')}/{name}")
    return counters


def _mounted_at(path: str, mountinfo: str, kind: str, option: str) -> str | None:
    """Return the path of a cgroup directory below the closest mount that shows it; ``None`` if none does."""
    best = None
    best_root = ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, source = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(source) < 3:
            continue
        if source[0] != kind or (option and option not in source[2].split(",")):
            continue
        root, point = _unescape(fields[3]), _unescape(fields[4])
        inside = root.rstrip("/")
        if (path == root or path.startswith(f"{inside}/")) and len(root) >= len(best_root):
            best, best_root = point.rstrip("/") + path[len(inside) :], root
    return best


def _unescape(field: str) -> str:
    # The kernel writes a space, tab, newline or backslash in mountinfo as a backslash and octal digits.
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def parse_oom_kill(text: str) -> int | None:
    """Return the number of OOM kills in ``memory.events``, ``memory.oom_control`` or ``/proc/vmstat``."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdecimal():
            return int(value)
    return None


def oom_kills(pids: Iterable[int] = ()) -> dict[str, int]:
    """Read the OOM kill counters of this process's and the workers' cgroups, by file path."""
    mountinfo = _read("/proc/self/mountinfo")
    paths = {VMSTAT: None}
    known = set()
    for process in ("self", *pids):
        cgroups = _read(f"/proc/{process}/cgroup")
        if cgroups not in known:
            known.add(cgroups)
            paths.update(dict.fromkeys(memory_counters(cgroups, mountinfo)))
    return read_counters(paths)


def read_counters(paths: Iterable[str]) -> dict[str, int]:
    """Read the counters of these files again. Files without a counter are left out."""
    counts = {}
    for path in paths:
        count = parse_oom_kill(_read(path))
        if count is not None:
            counts[path] = count
    return counts


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def oom_rise(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the path of the counter with the largest increase, and the increase; ``None`` without one."""
    rises = {path: after[path] - count for path, count in before.items() if after.get(path, 0) > count}
    if any(path != VMSTAT for path in before):
        rises.pop(VMSTAT, None)
    return max(rises.items(), key=lambda item: item[1], default=None)


def probably_oom(
    exitcode: int | None, sent_signal: int | None, before: Mapping[str, int], after: Mapping[str, int]
) -> bool:
    """Return true if the OOM killer probably killed a worker, or its command if it is a shell (code 137)."""
    killed = exitcode in {-signal.SIGKILL, 128 + signal.SIGKILL}
    return killed and sent_signal != signal.SIGKILL and oom_rise(before, after) is not None


def oom_note(
    exitcode: int | None, sent_signal: int | None, before: Mapping[str, int], after: Mapping[str, int]
) -> str | None:
    """Return a line about the OOM killer for the failure report; ``None`` if the counters did not rise."""
    rise = oom_rise(before, after)
    if rise is None:
        return None
    path, count = rise
    counted, advice = f"oom_kill rose by {count} in {path}", _ADVICE[path == VMSTAT]
    if probably_oom(exitcode, sent_signal, before, after):
        return f"probably the kernel's OOM killer ({counted}); {advice}"
    struck = f"the kernel's OOM killer killed a process during this attempt ({counted})"
    return f"{struck}, perhaps a child of the worker; {advice}"
