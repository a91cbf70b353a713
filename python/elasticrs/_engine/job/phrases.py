"""One-line messages from the agent to the user, and summaries of tracebacks. All functions are pure.

:func:`summarize` reduces a traceback to the type of the exception and where it was raised. If the exception
only reports another one, that one counts: a member of an exception group, or an exception of a data loader
worker or another process, whose traceback is in the text. This module imports no :mod:`re` or :mod:`typing`,
which take milliseconds that would delay the restart after a failure.
"""

from __future__ import annotations

import builtins
import os
import sys
import time

from elasticrs._engine.job.value import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticrs._core import TimerExpired, WorkersKilled

NAME = "elasticrs"

COLUMNS = 110
"""Maximum length of a line on a terminal that has room for it. Longer texts are folded there."""


def prefix(time_ns: int | None = None, node: str = "", group_rank: int | None = None) -> str:
    """Return ``elasticrs: ``, or ``elasticrs[time node:pid group rank]: `` with the parts that are known."""
    parts = []
    if time_ns is not None:
        parts.append(local_time(time_ns, "T", has_milliseconds=True))
    if node:
        parts.append(node)
    if group_rank is not None:
        parts.append(f"group {group_rank}")
    return f"{NAME}[{' '.join(parts)}]: " if parts else f"{NAME}: "


NOT_STARTED = "the workers could not be started"


def folded(text: str, start: str, width: int) -> list[str]:
    """Return ``start`` and ``text``, broken into lines of at most ``width`` columns (0: unknown), and never
    more than :data:`COLUMNS`. Break a line after a semicolon if there is one in its second half, otherwise at
    a space. A word that is too long for a line, such as a path, gets a line of its own.
    """
    most = min(width or COLUMNS, COLUMNS)
    lines: list[str] = []
    rest = start + text
    while len(rest) > most:
        least = len(start) if not lines else 4
        end = rest.rfind("; ", most // 2, most) + 1 or rest.rfind(" ", least, most + 1)
        if end < 0:
            end = rest.find(" ", least)
        if end < 0:
            break
        lines.append(rest[:end])
        rest = f"    {rest[end + 1 :]}"
    return [*lines, rest]


def signal_name(signum: int) -> str:
    import signal

    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"


SILENT = "exited with code 0 before the function returned"


MAX_HOW = 600
"""Maximum number of characters of a phrase that says how a worker failed."""


def how_it_ended(exitcode: int | None) -> str:
    """Return a phrase to put after a process's name. A negative exit code is a signal number."""
    if exitcode is None:
        return "was lost"
    if exitcode < 0:
        return f"died by {signal_name(-exitcode)}"
    return f"exited with code {exitcode}"


def describe_exit(exitcode: int | None) -> str:
    """Describe an exit code. A negative code is a signal number, and ``None`` is unknown."""
    if exitcode is None:
        return "unknown exit status"
    if exitcode < 0:
        return signal_name(-exitcode)
    if 128 < exitcode < 128 + 65:
        return f"exit code {exitcode} (a shell's word for {signal_name(exitcode - 128)})"
    return f"exit code {exitcode}"


def how_the_nursery_ended(exitcode: int | None, hung: bool) -> str:
    """Return a phrase about the end of the nursery (the process that starts the workers), for a message."""
    return "hung and was killed by the agent" if hung else how_it_ended(exitcode)


def restarts_used(used: int, most: int, window: float | None) -> str:
    """Return a text about charged restarts: ``1 of 3``, or with a time window ``7, at most 3 in 1 h``."""
    return f"{used} of {most}" if window is None else f"{used}, at most {most} in {duration(window)}"


def attempt_text(name: str) -> str:
    """Format the name of an attempt: ``0_r2`` as ``0 of round 2``, ``1_cold`` as ``1 (cold)``."""
    return name.replace("_r", " of round ").replace("_cold", " (cold)")


def counted(number: int, noun: str) -> str:
    """Format a number of things: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def restart_line(cause: str, restart: str, delay: float = 0.0) -> str:
    """Return the line that announces a restart after ``delay`` seconds."""
    soon = f" in {duration(delay)}" if delay else ""
    return f"{cause}; restarting{soon} (restart {restart})"


def replace_line(cause: str, pid: int, span_ns: int, restart: str) -> str:
    """Return the line that says that a worker was replaced ``span_ns`` nanoseconds after it failed."""
    return f"{cause}; replaced by pid {pid} in {milliseconds(span_ns)} (restart {restart})"


def slow_worker(rank: int | None, pid: int, rate: float, median: float, seconds: float) -> str:
    who = f"rank {rank} (pid {pid})"
    return f"{who} has been slow for {seconds:g} s: its rate is {rate:.4g}, the median here {median:.4g}"


def checkpoint_line(result: str, ns: int) -> str:
    """Report the result (see :mod:`.node_page`) of a checkpoint requested ``ns`` nanoseconds before."""
    if result == "saved":
        return f"checkpoint saved {ns / 1e6:.1f} ms after the request"
    if result == "failed":
        return "the requested checkpoint was not written; the output of rank 0 shows why"
    return "a checkpoint was requested, but the workers have not called set_checkpoint_manager"


def checkpoint_requested(signum: int) -> str:
    return f"{signal_name(signum)} received: requesting a checkpoint at the end of a step"


CHECKPOINT_NOT_MADE = "no checkpoint was saved after the last request, because the workers exited first"


NOBODY_TRAINED = "no worker here used elasticrs.train, so use --on-failure restart instead of replace"


def checkpoint_is_late(seconds: float, workers: int) -> str:
    """Report that a checkpoint is late. ``workers`` of this node's workers use ``elasticrs.train``."""
    who = f"{workers} of its workers take part" if workers else "none of its workers takes part"
    return f"the checkpoint requested {seconds:g} s ago is not saved yet ({who} in elasticrs.train)"


def passed_on(signum: int, sent: Sequence[int], held: Sequence[int], patience: float) -> str:
    """Report that the agent passes a signal on to the local ranks ``sent``, but not to the local ranks
    ``held``. The signal would kill the latter, because they have no handler for it. They get the signal only
    if they install a handler within ``patience`` seconds.
    """
    name = signal_name(signum)
    if not held:
        return f"{name} received: passing it on to the workers"
    who = f"{local_ranks_text(held)} {'has' if len(held) == 1 else 'have'} no handler, and would die"
    when = f"the signal is dropped unless there is one within {patience:g} s"
    whom = f"passing it on to {local_ranks_text(sent)} only" if sent else "not passing it on"
    return f"{name} received: {whom}, because {who}; {when}"


def agreed(signum: int, step: int | None, why: str, waited: float, paused: float, deaf: Sequence[int]) -> str:
    """Report that the ranks get a signal at the start of the same training step, after ``step`` steps of this
    attempt. If ``step`` is ``None``, report that they get it at different steps, and why. The signal was
    held back for ``waited`` seconds, while ranks stood still for up to ``paused`` seconds. The local ranks
    ``deaf`` do not get the signal, because they have no handler for it.
    """
    if step is None:
        return f"{signal_name(signum)} reaches the ranks at different steps{why and f', because {why}'}"
    held, stood = (milliseconds(int(seconds * 1e9)) for seconds in (waited, paused))
    whom = f"all ranks except {local_ranks_text(deaf)}" if deaf else "all ranks"
    after = f"after step {step} of this attempt"
    return f"{signal_name(signum)} reaches {whom} {after} (held {held}; ranks waited up to {stood})"


def signal_not_passed_on(signum: int) -> str:
    """Report a signal that is not forwarded, because it would kill workers that have no handler."""
    return (
        f"{signal_name(signum)} received, but not passed on: /proc does not show this pid namespace, so it "
        "is unknown whether the workers handle it, and it kills those that do not; mount /proc there"
    )


def signal_dropped(signum: int, local_ranks: Sequence[int], when: str) -> str:
    who = local_ranks_text(local_ranks)
    return f"{signal_name(signum)} was dropped for {who}: no handler was installed {when}"


def gone_with_the_job(*, has_folder: bool) -> str:
    """Tell that kept training state is lost. ``has_folder``: true if the job has the option --keep-save."""
    advice = "" if has_folder else " (--keep-save FOLDER keeps it for the next job)"
    return f"has ended with the job{advice}"


def stop_line(
    asked: int | None,
    signum: int,
    grace: float,
    *,
    have_exited: bool = False,
    order: str = "",
    again: str = "",
) -> str:
    """Report that signal ``asked`` stops the job, and that ``signum`` goes to the workers, if any are left.
    The workers are killed after ``grace`` seconds, or earlier as the note ``again`` says. After a second
    request to stop, the two signals differ.
    """
    if order:
        limit = f", SIGKILL in {grace:g} s" if asked == signum else ""
        what = "no workers are running" if have_exited else f"{signal_name(signum)} to all workers{limit}"
        return f"elasticctl {order}: {what}"
    if asked != signum:
        consequence = "no workers are running" if have_exited else f"{signal_name(signum)} to all workers"
        return f"second stop request: {consequence}"
    if have_exited:
        return f"{signal_name(asked)} received: stopping the job; no workers are running"
    return f"{signal_name(asked)} received: passing it on to the workers, SIGKILL in {grace:g} s{again}"


def repeated(signum: int, after: float, limit: float) -> str:
    """Report that a signal is taken for the same request as the first one, ``after`` seconds before."""
    name = signal_name(signum)
    return (
        f"{name} counts as the stop request {duration(after)} ago; if sent again after {limit:g} s, it kills"
    )


def killed(who: str, event: WorkersKilled) -> str:
    """Report workers that were killed. What they saved may be incomplete."""
    was, it = ("was", "it") if len(event.local_ranks) == 1 else ("were", "they")
    if event.reason == "request":
        return f"{who} {was} killed; what {it} saved may be incomplete"
    if event.reason == "stalled exit":
        return f"{who} had raised, made no progress exiting for {event.limit:g} s, and {was} killed"
    if event.signal is None:
        how = f"had raised, {was} still exiting {event.limit:g} s after --exit-timeout, and {was} killed"
    else:
        limit = round(event.limit, 1) or event.limit
        how = f"{was} killed {limit:g} s after {signal_name(event.signal)} (--shutdown-timeout)"
    return f"{who} {how}; what {it} saved may be incomplete"


def stuck(local_ranks: Iterable[int]) -> str:
    return f"SIGKILL did not stop local rank(s) {', '.join(map(str, local_ranks))}"


def asleep(seconds: Mapping[int, float], limit: float) -> str:
    """Name the workers (seconds by local rank) in uninterruptible sleep for longer than ``limit`` seconds."""
    who = ", ".join(f"{rank} ({span:.1f} s)" for rank, span in seconds.items())
    return f"local rank(s) {who} in uninterruptible sleep (state D), longer than the {limit:g} s allowed"


def not_restarted(why: str) -> str:
    return f"{why}; this node cannot be used for a restart"


def milliseconds(span_ns: int) -> str:
    return f"{span_ns / 1e6:.1f} ms"


def longest_phase(phases_ms: Mapping[str, float]) -> str:
    """Return the longest phase of a restart in parentheses, with its duration, unless it is below 0.05 ms."""
    name, span = max(phases_ms.items(), key=lambda phase: phase[1], default=("", 0.0))
    return f" ({name} {span:.1f})" if span >= 0.05 else ""


def distinct_names(names: Mapping[int, str]) -> dict[int, str]:
    """Return nodes' names by group rank. If several agents run on one host, append their group ranks."""
    last = {name: rank for rank, name in names.items()}
    shared = {name for rank, name in names.items() if last[name] != rank}
    return {rank: f"{name}:{rank}" if name in shared else name for rank, name in names.items()}


def duration(seconds: float) -> str:
    """Format seconds, such as ``12.3 s``, ``5 min 20 s`` or ``27 h 12 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def goodput(productive_ns: int, total_ns: int) -> str:
    """Return the share of productive time; empty for a job below one minute, which is mostly start-up."""
    if total_ns < 60_000_000_000:
        return ""
    return f", goodput {productive_ns / total_ns * 100:.1f} %"


def timer_expired(timer: TimerExpired) -> str:
    """Report an expired timer, and escape the worker's text."""
    at = f" at {printable(timer.at)}" if timer.at else ""
    others = f", {counted(timer.others, 'other timer')} live" if timer.others else ""
    return f"timer expired: scope '{printable(timer.scope)}'{at}, deadline {_clock(timer.deadline)}{others}"


def local_time(time_ns: int, separator: str = " ", *, has_milliseconds: bool = False) -> str:
    """Format nanoseconds since 1970 as local time, such as ``2026-11-29 01:30:00+01:00`` (or ``Z``)."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    try:
        local = time.localtime(seconds)
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s after 1970"
    text = time.strftime(f"%Y-%m-%d{separator}%H:%M:%S", local)
    if has_milliseconds:
        text += f".{rest // 1_000_000:03d}"
    hours, minutes = divmod(abs(local.tm_gmtoff) // 60, 60)
    sign = "-" if local.tm_gmtoff < 0 else "+"
    return text + (f"{sign}{hours:02d}:{minutes:02d}" if hours or minutes else "Z")


def _clock(seconds: float) -> str:
    try:
        return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds * 1000) % 1000:03d}"
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"


def printable(text: str, limit: int = 200) -> str:
    """Truncate a worker's text, and replace unprintable characters with ``?``."""
    shown = "".join(character if character.isprintable() else "?" for character in text[:limit])
    return f"{shown}…" if len(text) > limit else shown


def ranks_text(ranks: Sequence[int], most: int = sys.maxsize) -> str:
    """Format ascending ranks as ``rank 3``, ``ranks 0, 1``, or ``ranks 0-6, 8``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges_text(ranks, most)}"


def local_ranks_text(ranks: Iterable[int]) -> str:
    return f"local {ranks_text(sorted(ranks))}"


def ranges_text(numbers: Sequence[int], most: int = sys.maxsize) -> str:
    """Format ascending numbers as at most ``most`` ranges, and count the rest: ``0-6, 8 and 12 more``."""
    texts: list[str] = []
    found = spans(numbers)
    for first, last in found[:most]:
        texts += [f"{first}-{last}"] if last > first + 1 else map(str, range(first, last + 1))
    more = sum(last - first + 1 for first, last in found[most:])
    rest = f" and {more:,} more" if more else ""
    return f"{', '.join(texts)}{rest}"


def spans(numbers: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as inclusive ranges, such as ``[[0, 3], [8, 8]]``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


# --- summaries of tracebacks ---


LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
"""Path fragments that identify files outside the user's own code."""

OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/"
"""Start of the paths of the files of this package, which may be installed from a clone."""

_LIMIT = 300
"""Maximum number of characters of the exception's text."""
_HEAD, _TAIL = 1 << 14, 1 << 16
"""Number of characters that are used from the start and from the end of a long text."""
_MAX_KINDS = 4
_MAX_DEPTH = 10
"""Maximum nesting depth of tracebacks inside the texts of other tracebacks."""

_CAUSED = "The above exception was the direct cause of the following exception:"
_CHAINED = (_CAUSED, "During handling of the above exception, another exception occurred:")
_BEGINS = ("Traceback (most recent call last)", "Original Traceback (most recent call last)")
_REMOTE = 'RemoteTraceback: \n"""'
"""Text that precedes the traceback of a process in a process pool."""


class Summary(Record):
    """Summary of an exception. ``said`` is the type and the text's first line. ``place``, such as
    ``train.py:41``, is in the user's code. ``more`` counts other members of an exception group.
    """

    said: str
    place: str | None
    exception: str | None
    more: int = 0


def headline(text: str, more: int = 0) -> str | None:
    """Return an exception and its place, such as ``OSError: a.bin (train.py:41)``; ``None`` for no text.
    The place is the innermost frame outside of libraries, or else the innermost. ``more`` is the number of
    other members of the exception group.
    """
    found = summarize(text)
    if found is None:
        return None
    place = f" ({found.place})" if found.place else ""
    more = more or found.more
    return f"{found.said}{place}{f', and {more} more' if more else ''}"


def shortened(text: str, limit: int) -> str:
    """Return the end of a text, or only the exception and its place if the end of a traceback lacks them."""
    if len(text) <= limit:
        return text
    end = "…" + text[-limit + 1 :]
    told, kept = summarize(text), summarize(end)
    if told is None or told.exception is None or told.place is None:
        return end
    if kept is not None and (kept.said, kept.place) == (told.said, told.place):
        return end
    path, _, number = told.place.rpartition(":")
    return f'…\n  File "{path}", line {number}\n{told.said}'


def summarize(text: str) -> Summary | None:
    """Summarize (the end of) a traceback or any other message; ``None`` for an empty text.
    The result does not depend on the order of a group's members, which may differ between attempts.
    """
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]}\n{text[-_TAIL:]}"
    return _summarize(text, _MAX_DEPTH)


def _summarize(text: str, depth: int, *, is_exception: bool = False) -> Summary | None:
    """Summarize a text that, with ``is_exception``, describes an exception even without a traceback."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if depth and _is_end_of_group(lines[-1]):
        header, members, more = _members(lines)
        told = (_summarize("\n".join(each), depth - 1, is_exception=True) for each in members)
        found = [each for each in told if each is not None]
        if found:
            return _of_group(found, _own_place(_frames(header)), more + sum(each.more for each in found))
    outer = _of_traceback(lines, is_exception)
    remote = _remote(text)
    if depth and _own_place(_frames(remote.splitlines())) is not None:
        inner = _summarize(remote, depth - 1)
        outer.place = outer.place if inner is None or inner.place is None else inner.place
    return outer


def _remote(text: str) -> str:
    """Return the traceback of another process whose exception directly caused the text's last exception."""
    before, found, own = text.rpartition(f'\n"""\n\n{_CAUSED}\n')
    if not found or any(line in _CHAINED for line in own.splitlines()):
        return ""
    return before.rpartition(_REMOTE)[2] if _REMOTE in before else ""


def _of_traceback(lines: Sequence[str], is_exception: bool) -> Summary:
    begins = [number for number, line in enumerate(lines) if line.startswith(_BEGINS)]
    block = lines[begins[-1] + 1 if begins else 0 :]
    frames = _frames(block)
    is_traceback = bool(is_exception or begins or frames)
    # Use the first line of an exception's text, and the last line of any other message.
    at = next((n for n, line in enumerate(block) if not line.startswith((" ", "…"))), None)
    if not is_traceback or at is None:
        said, name = lines[-1].strip(), None
    else:
        said, name = block[at].strip(), _type(block[at])
        if name is not None and said == f"{name}:" and at + 1 < len(block):
            # The exception's text begins with a newline, so add its next line.
            said = f"{said} {block[at + 1].strip()}"
    place = _own_place(frames)
    if place is None and frames:
        # The last traceback has only library code. The exception's message may quote it, so search the
        # traceback of the exception itself, too.
        since = max((n for n, line in enumerate(lines) if line in _CHAINED), default=-1) + 1
        place = _own_place(_frames(lines[since:])) or _place(frames[-1])
    return Summary(printable(said, _LIMIT), place, None if name is None else _qualified(name))


def _of_group(members: Sequence[Summary], place: str | None, more: int) -> Summary:
    """Describe an exception group (raised at ``place``) by one member, chosen regardless of their order."""
    told = min(members, key=lambda each: (each.exception or "", each.place or ""))
    kinds = sorted({each.exception or "" for each in members} - {""})
    exception = kinds[0] if len(kinds) == 1 else None
    if len(kinds) > 1:
        names = ", ".join(kind.rpartition(".")[2] for kind in kinds[:_MAX_KINDS])
        exception = f"builtins.ExceptionGroup[{names}]"
    return Summary(told.said, told.place or place, exception, len(members) - 1 + more)


def _members(lines: Sequence[str]) -> tuple[list[str], list[list[str]], int]:
    """Return the lines above a group's members, the lines of each member that is not itself a group, and the
    number of members that Python has omitted. Remove the border that Python draws beside them.
    """
    sections: list[list[str]] = [[]]
    more = 0
    for line in lines:
        bare = line.lstrip(" ")
        if bare.startswith("|"):
            sections[-1].append(bare[2:])
        elif bare.startswith("+-+--") and len(sections) > 1:
            # Discard the header of an inner group.
            sections[-1] = []
        elif bare.startswith("+-") and not _is_end_of_group(line):
            sections.append([])
    leaves = []
    for section in sections[1:] or sections:
        left_out = _left_out(section)
        more += left_out
        if section and not left_out:
            leaves.append(section)
    return sections[0], leaves, more


def _left_out(section: Sequence[str]) -> int:
    """Return the number in a line such as ``and 3 more exceptions``."""
    words = section[0].split() if len(section) == 1 else []
    is_number = len(words) == 4 and words[0] == "and" and words[2] == "more" and words[1].isdecimal()
    return int(words[1]) if is_number else 0


def _is_end_of_group(line: str) -> bool:
    """Return true for a plus sign and a row of minus signs, with which Python ends an exception group."""
    bare = line.lstrip(" ")
    return len(bare) > 8 and bare.rstrip("-") == "+"


def _frames(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [frame for frame in map(_frame, lines) if frame is not None]


def _frame(line: str) -> tuple[str, str] | None:
    if not line.startswith('  File "'):
        return None
    path, found, rest = line[len('  File "') :].rpartition('", line ')
    return (path, rest.partition(",")[0]) if found else None


def _own_place(frames: Sequence[tuple[str, str]]) -> str | None:
    for frame in reversed(frames):
        path = frame[0]
        if not path.startswith(OWN_PACKAGE) and not any(part in path for part in LIBRARIES):
            return _place(frame)
    return None


def _place(frame: tuple[str, str]) -> str:
    return f"{printable(os.path.basename(frame[0]), _LIMIT)}:{frame[1]}"


def _type(line: str) -> str | None:
    name = line.partition(":")[0].strip()
    parts = name.split(".")
    return name if all(part.isidentifier() or part == "<locals>" for part in parts) else None


def _qualified(name: str) -> str:
    """Add the module, which tracebacks omit for built-in types and types of the script itself."""
    if "." in name:
        return name
    return f"builtins.{name}" if isinstance(getattr(builtins, name, None), type) else f"__main__.{name}"
