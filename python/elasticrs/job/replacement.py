"""Decide whether a job can replace single workers (``--on-failure replace``)."""

from __future__ import annotations

_ALL = "only all workers can be restarted"


def why_not(start_method: str = "spawn", back_end: str | None = None) -> str | None:
    """Return why single workers cannot be replaced; ``None`` if they can.

    A program that does not use ``elasticrs.train`` is not refused, because it may use it in an installed
    package. The agent says at the end of the job that no worker used it.

    Args:
        start_method: start method of function workers.
        back_end: name of the rendezvous back end, if workers cannot use it by themselves. ``None`` otherwise.
    """
    if start_method != "spawn":
        return f"with start method {start_method} {_ALL}; use spawn"
    if back_end is not None:
        return f"with {back_end} {_ALL}; use c10d or etcd"
    return None
