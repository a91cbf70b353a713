"""Format the failure report. The root cause comes first, because users need it first. Its title and its first
six lines have torch's format, because people and tools know it. The other failures are mostly side effects.
"""

from __future__ import annotations

import errno
import os
import signal

from elasticrs._engine.failures.failure import (
    NOT_AVAILABLE,
    ProcessFailure,
    failed_ns,
    failed_wall_ns,
    how_it_failed,
    in_order,
    root_cause,
    traceback_text,
    victims,
)
from elasticrs._engine.job.phrases import describe_exit, local_time, ranks_text, signal_name, spans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_WIDTH = 60
_MAX_LINES, _MAX_FIRST_LINES = 120, 40
"""Maximum number of lines of a traceback that the report shows, and how many of them are from its start."""
_MAX_LINE = 1000
_MAX_OTHERS = 12
_MAX_SAID = 160
"""Maximum number of characters of an exception's text in the line of another failure."""
_MAX_NOTES = 4


def format_report(
    name: str,
    failures: Mapping[int, ProcessFailure],
    border: str,
    section: str,
    conclusion: str | None = None,
) -> str:
    """Return the report. ``border`` and ``section`` are the characters of its separator lines."""
    root = root_cause(failures)
    stopped = [rank for rank in victims(failures) if rank != root]
    failed = [rank for rank in in_order(failures) if rank not in stopped]
    outside = failures[root].cause_outside
    if outside is None:
        root_lines = _root_entry(failed.index(root), root, failures[root])
        others = _others([rank for rank in failed if rank != root], failed, failures, root)
    else:
        root_lines = _bounded(f"  {outside}")
        others = _others(failed, failed, failures, None)

    title = f"{name} FAILED"
    stopped_lines = _stopped(stopped, failures)
    body = "\n".join([title, *root_lines, *others, *stopped_lines])
    width = min(_WIDTH, max(len(line) for line in body.split("\n")))
    line, thin = border * width, section * width
    how = "first observed failure" if outside is None else "outside of the workers"
    if failed[0] != root and outside is None:
        has_peers = any(failure.host is not None for failure in failures.values())
        how = "agreed on by all nodes" if has_peers else "judged from all evidence"
    parts = ["", line, title, thin, f"Root Cause ({how}):", *root_lines]
    parts += [thin, "Failures:", *(others or ["  <NO_OTHER_FAILURES>"]), *stopped_lines]
    return "\n".join([*parts, *([] if conclusion is None else [thin, conclusion]), line])


def painted(report: str) -> str:
    """Add escape sequences: bold for the root cause and the verdict, faint for the other failures."""
    lines: list[str] = []
    is_other = False
    for line in report.split("\n"):
        is_other = line == "Failures:" or (is_other and not line.startswith(("-", "=")))
        style = "2" if is_other else ""
        if line.endswith(" FAILED") or line.startswith("Root Cause ("):
            style = "1;31"
        elif line.startswith("verdict: "):
            style = "1"
        lines.append(f"\x1b[{style}m{line}\x1b[0m" if style else line)
    return "\n".join(lines)


# --- the root cause ---


def _root_entry(index: int, rank: int, failure: ProcessFailure) -> list[str]:
    killed_by = failure.signal_name()
    name = f" ({killed_by})" if killed_by != NOT_AVAILABLE else ""
    exitcode = "unknown" if failure.exitcode is None else failure.exitcode
    pid = "unknown" if failure.pid < 0 else failure.pid
    traceback = "\n  ".join(_bounded(traceback_text(failure)))
    lines = [
        f"[{index}]:",
        f"  time      : {_when(failure)}",
        f"  host      : {failure.host or os.uname().nodename}",
        f"  rank      : {failure.named or f'{_rank_of(rank)} (local_rank: {failure.local_rank})'}",
        f"  exitcode  : {exitcode} (pid: {pid}) {name}".rstrip(),
        f"  error_file: {failure.error_file}",
        f"  traceback : {traceback}",
        *(f"  note      : {note}" for note in _notes(failure)),
        *(f"  {stream:<10}: {path}" for stream, path in failure.log_paths.items()),
    ]
    tail = _without(traceback, failure.stderr_tail)
    if tail:
        lines.append(f"  last lines of stderr ({len(tail)}):")
        lines += [f"    {line}".rstrip() for line in tail]
    return lines


def _bounded(text: str) -> list[str]:
    lines = text.split("\n")
    if len(lines) > _MAX_LINES:
        left_out = len(lines) - _MAX_LINES
        last = lines[_MAX_FIRST_LINES - _MAX_LINES :]
        lines = [*lines[:_MAX_FIRST_LINES], f"… {left_out} lines are left out …", *last]
    return [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}…" for line in lines]


def _when(failure: ProcessFailure) -> str:
    if failure.seen_ns is None:
        return failure.timestamp_isoformat()
    return local_time(failed_wall_ns(failure), "_", has_milliseconds=True)


# --- the other failures ---


def _others(
    ranks: Sequence[int], order: Sequence[int], failures: Mapping[int, ProcessFailure], root: int | None
) -> list[str]:
    """Describe the failures of ``ranks``. Failures whose texts differ only in numbers, such as ports, share a
    line. ``ranks`` and ``order`` are sorted by time of failure. ``order`` contains all failed ranks,
    including that of the root cause. A rank's index in ``order`` is the number of its failure in the report.
    ``root`` is ``None`` if the root cause is outside of the workers.
    """
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        failure = failures[rank]
        alike = failure.exitcode, failure.host, _without_numbers(_said(failure))
        groups.setdefault(alike, []).append(rank)
    lines: list[str] = []
    for group in list(groups.values())[:_MAX_OTHERS]:
        first = failures[group[0]]
        where = f" on {first.host}" if first.host is not None else ""
        since = _since([failures[rank] for rank in group], None if root is None else failures[root])
        who = _who(group, failures)
        lines.append(f"  [{order.index(group[0])}]: {who}{where}, {since}: {_said(first)}")
        own = dict.fromkeys(note for rank in group for note in _own_notes(failures[rank]))
        lines += [f"       note: {note}" for note in list(own)[:_MAX_NOTES]]
    left_out = sum(map(len, list(groups.values())[_MAX_OTHERS:]))
    if left_out:
        lines.append(f"  and {left_out} more")
    files = _folded([failures[rank].error_file for rank in ranks])
    return [*lines, *(f"  traceback in {path}" for path in files)]


def _said(failure: ProcessFailure) -> str:
    said = how_it_failed(failure).lstrip(": ")
    return said if len(said) <= _MAX_SAID else f"{said[:_MAX_SAID]}…"


def _without_numbers(text: str) -> str:
    """Remove numbers, because ranks, ports and addresses differ between equal failures."""
    import re

    return re.sub(r"0x[0-9a-f]+|\d+", "0", text)


def _since(group: Sequence[ProcessFailure], root: ProcessFailure | None) -> str:
    first = None if root is None else failed_ns(root)
    failed = sorted(ns for ns in map(failed_ns, group) if ns is not None)
    if first is None or not failed:
        return f"at {_when(group[0])}"
    after = [(ns - first) / 1e6 for ns in (failed[0], failed[-1])]
    how = "later"
    if after[1] < 0:
        after, how = [-after[1], -after[0]], "earlier"
    ends = dict.fromkeys(f"{span:.3f}" for span in after)
    return f"{' to '.join(ends)} ms {how}"


def _folded(paths: Sequence[str]) -> list[str]:
    """Combine paths that differ only in the number of their folder, such as ``logs/{0,2}/error.json``."""
    folders: dict[tuple[str, str], list[int]] = {}
    others: list[str] = []
    for path in paths:
        folder, name = os.path.split(path)
        above, number = os.path.split(folder)
        if path != NOT_AVAILABLE and number.isdecimal():
            folders.setdefault((above, name), []).append(int(number))
        elif path != NOT_AVAILABLE:
            others.append(path)
    for (above, name), numbers in folders.items():
        spans_ = [f"{{{low}..{high}}}" if low < high else str(low) for low, high in spans(sorted(numbers))]
        shown = spans_[0] if len(spans_) == 1 else f"{{{','.join(spans_)}}}"
        others.append(os.path.join(above, shown, name))
    return others[:_MAX_OTHERS]


def _own_notes(failure: ProcessFailure) -> Iterable[str]:
    if failure.note:
        yield failure.note
    yield from failure.more_notes


def _notes(failure: ProcessFailure) -> Iterable[str]:
    yield from _own_notes(failure)
    if failure.recorded_pid not in {None, failure.pid}:
        yield f"the traceback is from process {failure.recorded_pid}, which the worker had started"
    yield from _advice(failure)
    was_killed = failure.signal_number() and failure.cause is None
    if failure.recorded_ns is not None and was_killed and failure.seen_ns is not None:
        seconds = (failure.seen_ns - failure.recorded_ns) / 1_000_000_000
        yield f"the traceback was recorded {seconds:.3f} s before {failure.signal_name()} killed the worker"


_ADVICE = {
    errno.ENOSPC: "a file system is full; `df` shows which one",
    errno.EDQUOT: "the disk quota of this user is used up",
    errno.EADDRINUSE: "another process listens on that port; `ss -ltnp` shows which one",
}
"""Advice to the user for each error number of the operating system (``errno``)."""


def _advice(failure: ProcessFailure) -> Iterable[str]:
    if failure.exitcode == -signal.SIGKILL and failure.sent_signal is None and failure.seen_ns is not None:
        if failure.cause is None and failure.note is None and failure.host is None:
            yield (
                "a user, a batch system or a container runtime sent this SIGKILL: elasticrs did not, and the"
                " counters of the OOM killer did not change"
            )
        return
    if failure.exception == "builtins.ModuleNotFoundError" and failure.python is not None:
        yield f"the worker's interpreter is {failure.python}; PYTHON_EXEC names another one"
    yield from [advice for number, advice in _ADVICE.items() if _is_about(number, failure)][:1]


def _is_about(number: int, failure: ProcessFailure) -> bool:
    """Return true if the failure has this error number (``errno``). If the failure has no number, look in its
    message for the number's name or text, because many failures have only a text, such as exceptions of
    torch's store, errors of child processes, and failures of programs that are not Python.
    """
    if failure.errno is not None:
        return failure.errno == number
    said = how_it_failed(failure).lower()
    return errno.errorcode[number].lower() in said or os.strerror(number).lower() in said


def _without(traceback: str, tail: Sequence[str]) -> list[str]:
    known = {line.strip() for line in traceback.split("\n")}
    if traceback.startswith("Traceback"):
        return [line for line in tail if line.strip() not in known]
    return list(tail)


# --- workers that were stopped ---


def _rank_of(rank: int) -> str:
    """Describe a rank. A negative number stands for a worker whose rank another worker has taken over."""
    return str(rank) if rank >= 0 else "none, another worker has taken it over"


def _who(ranks: Iterable[int], failures: Mapping[int, ProcessFailure]) -> str:
    known = sorted(rank for rank in ranks if rank >= 0)
    without = sorted(failures[rank].local_rank for rank in ranks if rank < 0)
    named = [f"local rank {local_rank}, whose rank was taken over" for local_rank in without]
    return ", ".join([*([ranks_text(known)] if known else []), *named])


def _stopped(ranks: Sequence[int], failures: Mapping[int, ProcessFailure]) -> list[str]:
    by_end: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_end.setdefault(_stopped_how(failures[rank]), []).append(rank)
    ends = [f"{_who(group, failures)} ({end})" for end, group in by_end.items()]
    if not ends:
        return []
    title = "Stopped by elasticrs after the first failure:"
    return [f"{title} {ends[0]}"] if len(ends) == 1 else [title, *(f"  {end}" for end in ends)]


def _stopped_how(failure: ProcessFailure) -> str:
    sent = failure.sent_signal or 0
    if failure.signal_number() != sent:
        return f"{describe_exit(failure.exitcode)} after {signal_name(sent)}"
    # If the failure has a known cause, such as a hang, the worker was killed for that, and not because it had
    # not stopped in time.
    is_overdue = sent == signal.SIGKILL and failure.cause is None
    return "SIGKILL at the stop deadline" if is_overdue else signal_name(sent)
