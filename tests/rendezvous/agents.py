"""Rendezvous members for tests, configured by a flat list of settings."""

from helpers.rendezvous import rendezvous

from elasticrs._engine.job.restart_policy import RestartSettings
from elasticrs._engine.nodes.protocol.machine import Member
from elasticrs._engine.nodes.protocol.rendezvous import Command, ThisAgent


def command(*words, place="/train.py", user=0):
    """Return a node's command that consists of these words."""
    return Command(words or ("train.py",), place, "n", user)


def member(agent, node, *, port=29400, host="head", backend="c10d", **given):
    """Return a member that has not started. Settings that are not given have their default or the smallest
    possible value.
    """
    nodes = (given.pop("min_nodes", 1), given.pop("max_nodes", 1))
    restarts, delay = given.pop("max_restarts", 0), given.pop("restart_delay", 0.0)
    most = given.pop("max_excluded_nodes", None)
    policy = given.pop("policy", None) or RestartSettings(
        restarts, first_delay=delay, longest_delay=delay, max_excluded_nodes=most
    )
    known = {"role": "default", "nproc": 1, "policy": policy, "hosts_store": False, "fallback_addr": None}
    known["why_hosts"] = None
    known.update((name, given.pop(name)) for name in list(given) if name in known)
    known["launch"] = given.pop("launch", "")
    place = rendezvous(host, port, backend, nodes=nodes, **given)
    return Member(place, ThisAgent("job", agent, node, node, **known))
