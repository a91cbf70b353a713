"""Decide whether a job supports replacing individual workers (``--on-failure replace``)."""

from __future__ import annotations

_NOT = "single workers cannot be replaced"


def why_not(start_method: str = "spawn", back_end: str | None = None) -> str | None:
    """Return the reason why individual workers cannot be replaced; ``None`` if they can.

    A program that does not seem to use ``elasticrs.train`` is not rejected, because an installed package may
    use it. If no worker has used it, the agent prints a message at the end of the job.

    Args:
        start_method: start method of function workers.
        back_end: name of the rendezvous back end, if workers themselves cannot be members of its rendezvous;
            otherwise ``None``.
    """
    if start_method != "spawn":
        return f"with start method {start_method}, {_NOT}; use spawn"
    if back_end is not None:
        return f"with {back_end}, {_NOT}; use c10d or etcd"
    return None
