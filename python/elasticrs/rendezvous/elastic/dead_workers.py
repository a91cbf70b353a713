"""Remove the registrations of dead workers, so that the other workers need not wait for a lease to expire.

With ``--on-failure replace`` workers are members of a rendezvous of their own. A worker has no nursery that
could report its death to the other workers, and a connection that breaks or is refused proves nothing. But an
agent knows when all processes of its worker are gone. Agents also know that the workers of a lost agent are
gone, because the nursery kills them before the agent's session ends.

Pure functions.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic.keys import Keys, workers_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous
    from elasticrs.store.coordination import Operation


def workers_keys(rendezvous: Rendezvous, job: str, number: int) -> Keys:
    """Return the names of the keys of a job's workers, as an agent of the job uses them.

    Args:
        rendezvous: the agents' rendezvous.
        job: name of the agents' job in the store.
        number: create revision of that job's record.
    """
    etcd, root = rendezvous.etcd, ""
    if etcd is not None and etcd.seats and rendezvous.settings.token is not None:
        from elasticrs.rendezvous.elastic.etcd_membership import workers_prefix

        root = workers_prefix(rendezvous.run_id, etcd.prefix).removeprefix(etcd.prefix)
    return Keys(workers_job(rendezvous.run_id, job, number), root)


def workers_of(agent: str) -> str:
    """Return the prefix of the member names of an agent's workers."""
    return f"{agent}-"


def forget_worker(keys: Keys, name: str) -> list[Operation]:
    """Return deletions of one worker's registrations. ``name`` is the name that its agent gave it."""
    return keys.forget_members(f"{name}.")


def forget_workers(keys: Keys, agent: str) -> list[Operation]:
    """Return deletions of the registrations of all workers of an agent."""
    return keys.forget_members(workers_of(agent))
