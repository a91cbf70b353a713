"""Evidence that the kernel's OOM killer killed a worker.

In the wait status, a kill by the OOM killer looks like any other SIGKILL. But the kernel counts OOM kills,
for each memory cgroup (v2: ``memory.events``, v1: ``memory.oom_control``) and for the machine
(``/proc/vmstat``). The agent reads these counters with :func:`oom_kills` when an attempt starts and again
after a failure. If a counter has risen and the agent did not send the SIGKILL, the OOM killer almost
certainly did.

All functions are pure, except that they read files. A counter that cannot be read is ignored, because access
depends on the setup of the container.
"""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VMSTAT = "/proc/vmstat"
"""File that counts all OOM kills on the machine. It is used only if no memory cgroup can be read."""


_ADVICE = (
    "raise the memory limit of its control group, or use smaller batches or fewer data loader workers",
    "the machine was out of memory: use smaller batches or fewer data loader workers",
)
"""Advice for the user. The first text is for an exceeded cgroup limit, the second for a machine that has run
out of memory.
"""


# --- memory cgroups ---


def memory_counters(cgroups: str, mountinfo: str) -> list[str]:
    """Return the paths of the files that count OOM kills in a process's memory cgroups. Some of the files may
    not exist.

    cgroups: contents of the process's ``/proc/PID/cgroup``.
    mountinfo: contents of ``/proc/self/mountinfo`` of the process that will read the files.
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
    """Return the path under which the cgroup directory ``path`` is mounted. If several mounts contain it, use
    the innermost mount. Return ``None`` if no mount contains it.
    """
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
    # In mountinfo, the kernel escapes each space, tab, newline and backslash of a path as a backslash and
    # three octal digits.
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def parse_oom_kill(text: str) -> int | None:
    """Return the value of ``oom_kill`` in ``memory.events``, ``memory.oom_control`` or ``/proc/vmstat``.
    Return ``None`` if the text does not contain the counter.
    """
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdecimal():
            return int(value)
    return None


# --- comparison of the counters ---


def oom_kills(pids: Iterable[int] = ()) -> dict[str, int]:
    """Read the OOM kill counters of this process's and the workers' cgroups, keyed by file path. Files that
    cannot be read are left out.
    """
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
    """Read the OOM kill counters from these files, leaving out files without a counter. To read the same
    counters again, pass an earlier result as ``paths``.
    """
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
    """Return the path of the OOM kill counter with the largest increase, and the increase. Return ``None`` if
    no counter has increased.
    """
    rises = {path: after[path] - count for path, count in before.items() if after.get(path, 0) > count}
    if any(path != VMSTAT for path in before):
        rises.pop(VMSTAT, None)
    return max(rises.items(), key=lambda item: item[1], default=None)


def probably_oom(
    exitcode: int | None, sent_signal: int | None, before: Mapping[str, int], after: Mapping[str, int]
) -> bool:
    """Return true if the kernel's OOM killer has probably killed a worker.

    Args:
        exitcode: exit code of the worker. 137 counts as well, because a shell exits with 137 if its command
            was killed.
        sent_signal: last signal that the agent sent to the worker.
        before: result of :func:`oom_kills` at the start of the attempt.
        after: the same counters after the failure.
    """
    killed = exitcode in {-signal.SIGKILL, 128 + signal.SIGKILL}
    return killed and sent_signal != signal.SIGKILL and oom_rise(before, after) is not None


def oom_note(
    exitcode: int | None, sent_signal: int | None, before: Mapping[str, int], after: Mapping[str, int]
) -> str | None:
    """Return a line about the OOM killer for the failure report. Return ``None`` if the kernel's ``oom_kill``
    counters did not rise during the attempt.
    """
    rise = oom_rise(before, after)
    if rise is None:
        return None
    path, count = rise
    counted, advice = f"oom_kill rose by {count} in {path}", _ADVICE[path == VMSTAT]
    if probably_oom(exitcode, sent_signal, before, after):
        return f"probably the kernel's OOM killer ({counted}); {advice}"
    struck = f"the kernel's OOM killer killed a process during this attempt ({counted})"
    return f"{struck}, perhaps a child of the worker; {advice}"
