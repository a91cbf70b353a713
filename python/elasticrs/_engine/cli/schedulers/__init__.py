"""Detect a scheduler's job from environment variables: its nodes, this process's position among them, and the
address of the rendezvous.

Each module reads the environment and returns a :class:`.Place`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs._engine.cli.schedulers.place import Place


def place_of(environ: Mapping[str, str], pid: int) -> Place | None:
    """Return the position of this process in a scheduler's job; ``None`` if no such job is detected.

    Args:
        environ: environment variables of this process.
        pid: pid of this process.
    """
    # Check for Slurm first, because Slurm nodes can themselves run in Kubernetes pods.
    if environ.get("SLURM_JOB_ID"):
        from elasticrs._engine.cli.schedulers import slurm

        return slurm.place_of(environ, pid)
    from elasticrs._engine.cli.schedulers import kubernetes

    return kubernetes.place_of(environ)
