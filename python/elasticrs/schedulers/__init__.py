"""Detection of a scheduler's job from environment variables: the job's nodes, the place of this process among
the nodes, and the address at which the nodes meet.

Each module reads the environment and returns a :class:`~elasticrs.schedulers.place.Place`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs.schedulers.place import Place


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this process in a scheduler's job, or ``None`` if no scheduler's job is detected.

    Args:
        environ: environment variables of this process.
    """
    # Check for Slurm first, because Slurm nodes can themselves run in Kubernetes pods.
    if environ.get("SLURM_JOB_ID"):
        from elasticrs.schedulers import slurm

        return slurm.place_of(environ)
    from elasticrs.schedulers import kubernetes

    return kubernetes.place_of(environ)
