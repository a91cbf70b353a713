"""Messages from the agent to the user. All functions are pure and return one line each."""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticrs._core import TimerExpired, WorkersKilled

NAME = "elasticrs"


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


AGAIN = " (send it again to kill them at once)"

NOT_STARTED = "the workers could not be started"


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


def restart_line(cause: str, stopped: int, restart: str, when: str, delay: float = 0.0) -> str:
    """Return the line about a restart in ``delay`` seconds. ``stopped`` other workers have been stopped."""
    others = f"; {counted(stopped, 'other')} stopped" if stopped else ""
    soon = f" in {duration(delay)}" if delay else ""
    return f"{cause}{others}; restarting{soon} (restart {restart}, {when})"


def replace_line(cause: str, others: int, pid: int, span_ns: int, restart: str, when: str) -> str:
    """Return the line about a worker replaced ``span_ns`` after its failure. ``others`` workers continue."""
    left_alone = f"; {others} other{'s continue' if others != 1 else ' continues'}" if others else ""
    return f"{cause}{left_alone}; replaced by pid {pid} after {milliseconds(span_ns)} ({restart}, {when})"


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


NOBODY_TRAINED = (
    "no worker of this node used elasticrs.train, so --on-failure replace could not continue a training;"
    " use --on-failure restart for other programs"
)


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
    """Report that the ranks get a signal at the start of the same training step, after ``step`` steps of the
    optimizer in this attempt. If ``step`` is ``None``, report that they get it at different steps, and why.
    The signal was held back for ``waited`` seconds, while ranks stood still for up to ``paused`` seconds.
    The local ranks ``deaf`` do not get the signal, because they have no handler for it.
    """
    if step is None:
        return f"{signal_name(signum)} reaches the ranks at different steps{why and f', because {why}'}"
    held, stood = (milliseconds(int(seconds * 1e9)) for seconds in (waited, paused))
    whom = f"all ranks except {local_ranks_text(deaf)}" if deaf else "all ranks"
    after = f"after optimizer step {step} of this attempt"
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
    advice = "" if has_folder else " (with --keep-save FOLDER, the next job can go on from it)"
    return f"has ended with the job{advice}"


def stop_line(
    asked: int | None, signum: int, grace: float, *, have_exited: bool = False, order: str = ""
) -> str:
    """Report that signal ``asked`` stops the job, and that ``signum`` goes to the workers, if any are left.
    The workers are killed after ``grace`` seconds. After a second request to stop, the two signals differ.
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
    return f"{signal_name(asked)} received: passing it on to the workers, SIGKILL in {grace:g} s{AGAIN}"


def killed(who: str, event: WorkersKilled) -> str:
    """Report workers that were killed for not exiting in time. What they saved may be incomplete."""
    was, it = ("was", "it") if len(event.local_ranks) == 1 else ("were", "they")
    if event.reason == "stalled exit":
        return f"{who} had raised, made no progress exiting for {event.limit:g} s, and {was} killed"
    if event.signal is None:
        overdue = f"had raised, {was} still exiting {event.limit:g} s after --exit-timeout,"
    else:
        limit = round(event.limit, 1) or event.limit
        overdue = f"had not exited {limit:g} s after {signal_name(event.signal)}"
    return f"{who} {overdue} and {was} killed; what {it} {was} saving may be incomplete (--shutdown-timeout)"


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


def phases(phases_ms: Mapping[str, float]) -> str:
    """Return the durations of a restart's phases in parentheses, except those below 0.05 ms."""
    shown = [f"{name} {span:.1f}" for name, span in phases_ms.items() if span >= 0.05]
    return f" ({', '.join(shown)})" if shown else ""


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
