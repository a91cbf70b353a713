"""Writes a timeline of a job for other programs: timestamped events as JSON lines, in the file named by
``ELASTICRS_TIMELINE``.

``ns`` is a time of :func:`time.monotonic_ns`, ``attempt`` is the number of the attempt, and ``restart_count``
is the value that its workers see as ``TORCHELASTIC_RESTART_COUNT``. The events are:

- ``planned``: the rendezvous is over, and the workers will be started next.
- ``imported``: the start has waited for a warm nursery, which is now ready or has failed.
- ``started``: all workers of the attempt are running. ``pids`` lists the pids by local rank. ``warm`` is true
  if the workers were forked from a warm nursery, false if not, and ``null`` without ``--warm``. ``why_cold``
  is the reason for a cold start. ``phases_ms`` contains the phases of the restart that led to this attempt,
  see :func:`elasticrs.agent.attempt.phases`.
- ``failure_seen``: the first failure of a worker, with its ``local_rank``, ``pid`` and ``exitcode`` (``None``
  if unknown).
- ``siblings_signalled``: all other workers have been signalled. ``siblings`` is their number.
- ``group_ended``: all processes of the attempt have exited.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from elasticrs.agent.attempt import Attempt


def records(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Return the events of these attempts in chronological order. Events that did not happen are left out."""
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
    """Write the events to a file, overwriting its previous contents.

    Raises:
        OSError: the file cannot be written.
    """
    import json

    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records(attempts))
