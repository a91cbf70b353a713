"""What the agent tells the user, line by line; pure."""

from __future__ import annotations

PREFIX = "elasticrs: "


def signal_name(signum: int) -> str:
    """``"SIGTERM"`` for 15; ``"SIG40"`` where the signal has no name of its own."""
    import signal

    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"


def how_it_ended(exitcode: int | None) -> str:
    """How a process ended, to follow its name.

    Args:
        exitcode: its exit code, the negative number of a signal, or ``None``.
    """
    if exitcode is None:
        return "was lost"
    if exitcode < 0:
        return f"died by {signal_name(-exitcode)}"
    return f"exited with code {exitcode}"


def how_the_nursery_ended(exitcode: int | None, hung: bool) -> str:
    """How the nursery was lost, to follow its name.

    Args:
        exitcode: its exit code, the negative number of a signal, or ``None``.
        hung: it kept silent, and the agent killed it.
    """
    return "hung and was killed by the agent" if hung else how_it_ended(exitcode)


def restart_line(cause: str, stopped: int, restarts_left: int, max_restarts: int) -> str:
    """Why the workers start again, and how often they still may.

    Args:
        cause: what happened.
        stopped: siblings that were stopped for it.
        restarts_left: after this one.
        max_restarts: in all.
    """
    siblings = f"; {stopped} sibling{'s' if stopped != 1 else ''} stopped" if stopped else ""
    return f"{cause}{siblings}; restarting ({restarts_left} of {max_restarts} restarts left)"


def stop_line(asked: int | None, signum: int, grace: float) -> str:
    """That the job is being stopped.

    Args:
        asked: the first signal that the agent got.
        signum: what the workers get now.
        grace: seconds until SIGKILL.
    """
    if asked != signum:
        return f"asked again: {signal_name(signum)} to all workers"
    return f"{signal_name(asked)} received: passing it on to the workers, SIGKILL in {grace:g} s"


def milliseconds(span_ns: int) -> str:
    """A span for people."""
    return f"{span_ns / 1e6:.1f} ms"
