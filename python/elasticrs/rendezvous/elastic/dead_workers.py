"""Remove the registrations of dead workers, so that the other workers do not have to wait until a lease
expires.

With ``--on-failure replace``, the workers themselves are the members of a separate rendezvous. A worker
cannot reliably detect the death of another worker, because a broken or refused connection does not prove it.
But an agent knows when all processes of its own worker have exited. Agents also know that the workers of a
lost agent are dead, because the lost agent's nursery (the process that starts workers) kills them before the
session of that agent ends.

All functions are pure.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic.keys import Keys, workers_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous
    from elasticrs.store.coordination import Operation


def workers_keys(rendezvous: Rendezvous, job: str, number: int) -> Keys:
    """Return the keys of the workers' rendezvous, for use by an agent.

    Args:
        rendezvous: rendezvous of the agents.
        job: name of the agents' job in the store.
        number: store revision at which the record of the agents' job was created.
    """
    etcd, root = rendezvous.etcd, ""
    if etcd is not None and etcd.seats and rendezvous.settings.token is not None:
        from elasticrs.rendezvous.elastic.etcd_membership import workers_prefix

        root = workers_prefix(rendezvous.run_id, etcd.prefix).removeprefix(etcd.prefix)
    return Keys(workers_job(rendezvous.run_id, job, number), root)


def workers_of(agent: str) -> str:
    """Return the name prefix that identifies an agent's workers in the workers' rendezvous."""
    return f"{agent}-"


def forget_worker(keys: Keys, name: str) -> list[Operation]:
    """Return the store operations that delete all registrations of a worker. ``name`` is the name that the
    agent gave the worker.
    """
    return keys.forget_members(f"{name}.")


def forget_workers(keys: Keys, agent: str) -> list[Operation]:
    """Return the store operations that delete the registrations of all of an agent's workers."""
    return keys.forget_members(workers_of(agent))
