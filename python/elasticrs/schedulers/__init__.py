"""What the variables of a scheduler say about a job: its nodes, the place of this process among them, and
where the nodes meet.

The modules are pure: they take the environment and return a :class:`~elasticrs.schedulers.place.Place`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs.schedulers.place import Place


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this process in the job of a scheduler, or ``None`` if it is in no such job.

    Args:
        environ: environment variables of a process that a scheduler has started.
    """
    # Check Slurm first, because its nodes can be pods of Kubernetes.
    if environ.get("SLURM_JOB_ID"):
        from elasticrs.schedulers import slurm

        return slurm.place_of(environ)
    from elasticrs.schedulers import kubernetes

    return kubernetes.place_of(environ)
