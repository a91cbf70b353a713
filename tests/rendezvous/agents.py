"""Rendezvous members for tests, configured by a flat list of settings."""

from elasticrs.job.restart_policy import RestartSettings
from elasticrs.rendezvous.elastic.machine import Member
from elasticrs.rendezvous.elastic.rendezvous import Rendezvous, ThisAgent
from elasticrs.rendezvous.elastic.settings import Settings


def member(agent, node, *, port=29400, host="head", backend="c10d", node_rank=None, local_addr=None, **given):
    """Return a member that has not started. Settings that are not given have their default or the smallest
    possible value.
    """
    sizes = {name: given.pop(name, 1) for name in ("min_nodes", "max_nodes")}
    restarts, delay = given.pop("max_restarts", 0), given.pop("restart_delay", 0.0)
    most = given.pop("max_excluded_nodes", None)
    policy = given.pop("policy", None) or RestartSettings(
        restarts, first_delay=delay, longest_delay=delay, max_excluded_nodes=most
    )
    known = {"role": "default", "nproc": 1, "policy": policy, "hosts_store": False, "fallback_addr": None}
    known.update((name, given.pop(name)) for name in list(given) if name in known)
    rendezvous = Rendezvous(
        backend,
        host,
        port,
        run_id="job",
        settings=Settings(given),
        node_rank=node_rank,
        local_addr=local_addr,
        **sizes,
    )
    return Member(rendezvous, ThisAgent("job", agent, node, node, **known))
