"""Format the failure report.

The report keeps torch's layout line by line, because people and tools know it: title, ``Failures:``, ``Root
Cause``, and six lines for each failure. Facts that torch does not report follow after these six lines. The
root cause and its details come last, because users look at the end of the output first. Ranks that failed in
the same way share an entry. Workers that the agent stopped have not failed, and share one line.
"""

from __future__ import annotations

import os
import time

from elasticrs.multiprocessing.errors.failure import NOT_AVAILABLE
from elasticrs.multiprocessing.errors.root_cause import failed_ns, in_order, root_cause, victims
from elasticrs.report.phrases import describe_exit, how_it_ended, ranks_text, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticrs.multiprocessing.errors.failure import ProcessFailure

_WIDTH = 60
_SIGKILL = 9
_LONG_TRACEBACK = 3
"""If a repeated traceback has at least this number of line breaks, the report refers to the first copy
instead of printing the traceback again.
"""
_MANY_ALIKE = 3
"""Minimum number of similar failures, not counting the root cause, that share an entry."""


def format_report(name: str, failures: Mapping[int, ProcessFailure], border: str, section: str) -> str:
    """Return the complete failure report.

    Args:
        name: name of the script, program or function.
        failures: failures by global rank, at least one.
        border: character of the outer separator lines.
        section: character of the inner separator lines.
    """
    root = root_cause(failures)
    stopped = [rank for rank in victims(failures) if rank != root]
    shown: dict[str, str] = {}
    failed = [rank for rank in in_order(failures) if rank not in stopped]
    indices = {rank: index for index, rank in enumerate(failed)}
    # Format the root cause first, because the other entries may refer to it.
    root_entry = _entry(indices[root], [root], failures, root, shown)
    others = [
        _entry(indices[ranks[0]], ranks, failures, root, shown)
        for ranks in _alike([rank for rank in failed if rank != root], failures)
    ]

    title = f"{name} FAILED"
    stopped_lines = _stopped(stopped, failures)
    body = "\n".join([title, *others, *stopped_lines, root_entry])
    width = min(_WIDTH, max(len(line) for line in body.split("\n")))
    line, thin = border * width, section * width
    parts = ["", line, title, thin, "Failures:", *(others or ["  <NO_OTHER_FAILURES>"]), *stopped_lines]
    how = "first observed failure" if failed[0] == root else "agreed on by all nodes"
    return "\n".join([*parts, thin, f"Root Cause ({how}):", root_entry, line])


# --- one failure ---


def _alike(ranks: Sequence[int], failures: Mapping[int, ProcessFailure]) -> list[list[int]]:
    """Group ranks whose failures are the same except for numbers, such as ranks, ports and addresses."""
    import re

    groups: dict[object, list[int]] = {}
    for rank in ranks:
        failure = failures[rank]
        text = re.sub(r"0x[0-9a-f]+|\d+", "0", "\n".join([traceback_text(failure), *_notes(failure)]))
        groups.setdefault((failure.exitcode, failure.host, text), []).append(rank)
    shown = (
        [group] if len(group) >= _MANY_ALIKE else [[rank] for rank in group] for group in groups.values()
    )
    order = {rank: index for index, rank in enumerate(ranks)}
    return sorted((entry for entries in shown for entry in entries), key=lambda entry: order[entry[0]])


def _entry(
    index: int,
    ranks: Sequence[int],
    failures: Mapping[int, ProcessFailure],
    root: int,
    shown: dict[str, str],
) -> str:
    """Format a single entry for a group of similar failures, with the details of the first one."""
    rank, more = ranks[0], len(ranks) - 1
    failure = failures[rank]
    signal = failure.signal_name()
    name = f" ({signal})" if signal != NOT_AVAILABLE else ""
    exitcode = "unknown" if failure.exitcode is None else failure.exitcode
    until = _when(failures[ranks[-1]], failures[root])
    # Indent every line of the traceback except the first.
    traceback = traceback_text(failure).replace("\n", "\n  ")
    lines = [
        f"[{index}]:" if not more else f"[{index}] and {more} more like it:",
        f"  time      : {_when(failure, failures[root])}",
        f"  host      : {failure.host or os.uname().nodename}",
        f"  rank      : {rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {exitcode} (pid: {failure.pid}) {name}".rstrip(),
        f"  error_file: {failure.error_file}",
        f"  traceback : {_once(traceback, f'[{index}]', shown)}",
        *([f"  like it   : {ranks_text(sorted(ranks[1:]))}, until {until}"] if more else []),
        *(f"  note      : {note}" for note in _notes(failure)),
        *(f"  {stream:<10}: {path}" for stream, path in failure.log_paths.items()),
    ]
    tail = _without(traceback, failure.stderr_tail)
    if tail:
        lines.append(f"  last lines of stderr ({len(tail)}):")
        lines += [f"    {line}".rstrip() for line in tail]
    return "\n".join(lines)


def _when(failure: ProcessFailure, root: ProcessFailure) -> str:
    if failure.seen_ns is None:
        return failure.timestamp_isoformat()
    # Show the time that determines the order of the failures.
    failed, first = failed_ns(failure) or failure.seen_ns, failed_ns(root)
    seconds, rest = divmod(failure.wall_ns - failure.seen_ns + failed, 1_000_000_000)
    text = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(seconds)) + f".{rest // 1_000_000:03}"
    if failure is root or first is None:
        return text
    later = (failed - first) / 1_000_000
    return f"{text} ({abs(later):.3f} ms {'after' if later >= 0 else 'before'} the root cause)"


def traceback_text(failure: ProcessFailure) -> str:
    """Return the traceback of a failure. If there is no traceback, return a message that describes the
    failure.
    """
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = str(callstack or message.get("message", NOT_AVAILABLE)).rstrip()
    elif failure.error_file == NOT_AVAILABLE and failure.seen_ns is not None and not failure.signal_number():
        message = failure.cause or _silent(failure)
    if failure.signal_number():
        message = _enriched(message, failure)
    if failure.stack:
        message = f"{message}\n{failure.stack}"
    return message


def how_it_failed(failure: ProcessFailure) -> str:
    """Return a phrase that says how a worker failed, to append to its name. Examples are ``: KeyError: 1
    (train.py:4)`` and `` died by SIGKILL``.
    """
    # If the agent killed a worker that was already exiting after an exception, report the exception.
    ended_by_itself = failure.sent_signal is None and bool(failure.signal_number())
    if (failure.error_file != NOT_AVAILABLE or failure.cause) and not ended_by_itself:
        from elasticrs.report.traceback_summary import headline

        said = headline(traceback_text(failure))
        if said is not None:
            return f": {said}"
    return f" {how_it_ended(failure.exitcode)}"


def _silent(failure: ProcessFailure) -> str:
    keep = "" if "stderr" in failure.log_paths else "; use --capture-stderr to see its last lines here"
    return (
        f"{describe_exit(failure.exitcode)}, and no exception was recorded; possible reasons: sys.exit,"
        " os._exit, a program that is not Python, or a framework that catches exceptions (Hydra: set"
        f" HYDRA_FULL_ERROR=1){keep}"
    )


def _enriched(message: str, failure: ProcessFailure) -> str:
    from elasticrs.multiprocessing import errors

    try:
        return errors.get_error_handler().maybe_enrich_signal_failure_message(message, failure.error_file)
    # Continue if the user's error handler fails, because the failure report must still be printed.
    except Exception as problem:
        return f"{message}\n(the error handler could not add to this: {problem!r})"


def _once(traceback: str, place: str, shown: dict[str, str]) -> str:
    if traceback.count("\n") < _LONG_TRACEBACK:
        return traceback
    earlier = shown.setdefault(traceback, place)
    return traceback if earlier == place else f"the same as {earlier}"


def _notes(failure: ProcessFailure) -> Iterable[str]:
    if failure.note:
        yield failure.note
    yield from failure.more_notes
    if failure.recorded_pid not in {None, failure.pid}:
        yield f"the traceback is from process {failure.recorded_pid}, which the worker had started"
    yield from _advice(failure)
    was_killed = failure.signal_number() and failure.cause is None
    if failure.recorded_ns is not None and was_killed and failure.seen_ns is not None:
        seconds = (failure.seen_ns - failure.recorded_ns) / 1_000_000_000
        yield f"the traceback was recorded {seconds:.3f} s before {failure.signal_name()} killed the worker"


_ADVICE = (
    ("No space left on device", "a file system is full; `df` shows which one"),
    ("Disk quota exceeded", "the disk quota of this user is used up"),
    ("EADDRINUSE", "another process listens on that port; `ss -ltnp` shows which one"),
    ("Address already in use", "another process listens on that port; `ss -ltnp` shows which one"),
)
"""Pairs of an error text from the kernel or torch, and advice: what the error means, and how to investigate
it.
"""


def _advice(failure: ProcessFailure) -> Iterable[str]:
    """Yield advice about a failure if its traceback and exit code do not explain it."""
    if failure.exitcode == -_SIGKILL and failure.sent_signal is None and failure.seen_ns is not None:
        if failure.cause is None and failure.note is None and failure.host is None:
            yield (
                "a user, a batch system or a container runtime sent this SIGKILL: elasticrs did not, and the"
                " counters of the OOM killer did not change"
            )
        return
    said = how_it_failed(failure)
    yield from [advice for words, advice in _ADVICE if words.lower() in said.lower()][:1]


def _without(traceback: str, tail: Sequence[str]) -> list[str]:
    """Return the lines of stderr that are not already part of the traceback."""
    known = {line.strip() for line in traceback.split("\n")}
    if traceback.startswith("Traceback"):
        return [line for line in tail if line.strip() not in known]
    return list(tail)


# --- workers that were stopped ---


def _stopped(ranks: Sequence[int], failures: Mapping[int, ProcessFailure]) -> list[str]:
    by_end: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_end.setdefault(_stopped_how(failures[rank]), []).append(rank)
    ends = [f"{ranks_text(group)} ({end})" for end, group in by_end.items()]
    if not ends:
        return []
    title = "Stopped by elasticrs after the first failure:"
    return [f"{title} {ends[0]}"] if len(ends) == 1 else [title, *(f"  {end}" for end in ends)]


def _stopped_how(failure: ProcessFailure) -> str:
    sent = failure.sent_signal or 0
    if failure.signal_number() != sent:
        return f"{describe_exit(failure.exitcode)} after {signal_name(sent)}"
    return "SIGKILL at the stop deadline" if sent == _SIGKILL else signal_name(sent)
