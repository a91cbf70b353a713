"""Coordinator for workers that were started by an agent."""

from __future__ import annotations

import os
from functools import cache
from typing import Any
from urllib.parse import quote, urlencode

from elasticrs._engine.nodes.transport.addresses import shown_endpoint
from elasticrs._engine.workers.plan import TOKEN_VARIABLE, bind
from elasticrs.train.meeting_url import JOB_VARIABLE, MEMBER_VARIABLE, MeetingPlace, parse
from elasticrs.train.p2p import CoordinatorP2P

__all__ = ["AgentCoordinator"]

URL_VARIABLE = "ELASTICRS_TRAIN"
TOKEN_OF_URL_VARIABLE = "ELASTICRS_TRAIN_TOKEN"

_OF_EVERY_WORKER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE_KEY = "elasticrs/train"
_stores: list[Any] = []


class AgentCoordinator(CoordinatorP2P):
    """Coordinator that finds the other workers through the agent's environment variables.

    With ``--on-failure replace``, the agent replaces a worker that exits; otherwise, it restarts all workers.
    Raise ``RuntimeError`` without an agent. For the arguments, see
    :class:`~elasticrs.train.p2p.CoordinatorP2P`.
    """

    def __init__(
        self, c10d_backend: str, process_group_timeout: int = 10000, coordinator_pg_timeout: int = 600000
    ) -> None:
        self._begin(c10d_backend, agent_place(), (process_group_timeout, coordinator_pg_timeout))
        # An agent that restarts all workers does not set the variable.
        self.others_come_back = URL_VARIABLE in os.environ


def agent_place() -> MeetingPlace:
    """Return the rendezvous settings that this worker's agent has set. Raise ``RuntimeError`` without one."""
    url = os.environ.get(URL_VARIABLE)
    if url is None:
        return _place_of_restarted_workers()
    renamed = {name: name for name in (MEMBER_VARIABLE, JOB_VARIABLE)} | {
        TOKEN_OF_URL_VARIABLE: TOKEN_VARIABLE
    }
    environ = {own: os.environ[name] for name, own in renamed.items() if name in os.environ}
    return parse(url, environ, source=URL_VARIABLE, may_host=False)


@cache
def _place_of_restarted_workers() -> MeetingPlace:
    """Return the rendezvous settings for a job in which rank 0, not the agent, hosts the store.

    The settings are read from the environment variables of torch's ``env://`` store. They are cached, because
    the next rendezvous changes these variables.
    """
    if not all(name in os.environ for name in _OF_EVERY_WORKER):
        raise RuntimeError(
            f"{URL_VARIABLE} is not set: start the script with elasticrun --on-failure replace,"
            " or use CoordinatorP2P"
        )
    from torch import distributed

    store, rank, world = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    if rank == 0:
        # Keep the socket bound, because another process could otherwise take the port.
        held = bind(0)
        _stores.append(held)
        port = held.getsockname()[1]
        store.set(_PLACE_KEY, f"{port} {os.urandom(16).hex()}")
    port, token = store.get(_PLACE_KEY).decode().split()
    # Keep the store object, because on rank 0 it may contain the server, which other ranks may still need.
    _stores.append(store)
    host = os.environ["MASTER_ADDR"]
    job = quote(os.environ.get("TORCHELASTIC_RUN_ID") or "job", safe="")
    settings = {"min_workers": world, "max_workers": world, "order_hint": rank, "is_host": int(rank == 0)}
    url = f"elasticrs://{shown_endpoint(host, int(port))}/{job}?{urlencode(settings)}"
    return parse(url, {TOKEN_VARIABLE: token}, source=URL_VARIABLE)
