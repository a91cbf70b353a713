"""What happened in a job and when, for programs: JSON lines in the file that ``ELASTICRS_TIMELINE`` names.

``ns`` is on the clock of :func:`time.monotonic_ns`, ``attempt`` the number of the attempt, ``restart_count``
what its workers see as ``TORCHELASTIC_RESTART_COUNT``. The events:

- ``planned``: the rendezvous is over, and the workers are started next.
- ``imported``: their start has waited for a warm nursery, which is ready, or has failed.
- ``started``: all workers of the attempt run; ``pids`` by local rank; ``warm``: they were forked from a
  process that had imported (``null`` without ``--warm``); ``why_cold``: why not; ``phases_ms``: of the
  restart that led to it, see :func:`elasticrs.agent.attempt.phases`.
- ``failure_seen``: the first worker failed; ``local_rank``, ``pid``, ``exitcode`` (``None`` when nobody can
  tell).
- ``siblings_signalled``: the last of the others has been signalled; ``siblings`` is how many.
- ``group_ended``: nothing of the attempt is left.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from elasticrs.agent.attempt import Attempt


def records(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Return the events of these attempts, in the order of their times; what has not happened is left out."""
    found: list[dict[str, Any]] = []
    for attempt in attempts:
        first = attempt.exits.get(attempt.first_failure) if attempt.first_failure is not None else None
        details: dict[str, dict[str, Any]] = {
            "planned": {},
            "imported": {},
            "started": {
                "pids": list(attempt.pids),
                "warm": attempt.warm,
                "why_cold": attempt.why_cold,
                "phases_ms": attempt.phases,
            },
            "failure_seen": {
                "local_rank": attempt.first_failure,
                "pid": first.pid if first else None,
                "exitcode": first.exitcode if first else None,
            },
            "siblings_signalled": {"siblings": attempt.signalled},
            "ended": {},
        }
        which = {"attempt": attempt.round, "restart_count": attempt.restarts}
        for name, more in details.items():
            if name in attempt.stamps:
                event = "group_ended" if name == "ended" else name
                found.append({"event": event, "ns": attempt.stamps[name], **which, **more})
    return sorted(found, key=lambda record: record["ns"])


def write(path: str, attempts: Iterable[Attempt]) -> None:
    """Write the events to a file; what it held is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    import json

    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records(attempts))
