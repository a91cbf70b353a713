"""A coordinator for workers that an agent has started."""

from __future__ import annotations

import os

from elasticrs._worker import TOKEN_VARIABLE
from elasticrs.node_page import page_of
from elasticrs.train.meeting_url import JOB_VARIABLE, MEMBER_VARIABLE
from elasticrs.train.p2p import CoordinatorP2P

__all__ = ["AgentCoordinator"]

URL_VARIABLE = "ELASTICRS_TRAIN"
TOKEN_OF_URL_VARIABLE = "ELASTICRS_TRAIN_TOKEN"


class AgentCoordinator(CoordinatorP2P):
    """Finds the others by what the agent has put into the environment; no address stands in the script.

    Args:
        c10d_backend: of the default process group, such as ``"gloo"``.
        process_group_timeout: milliseconds for a collective.
        coordinator_pg_timeout: milliseconds for the others to reach :meth:`barrier`.

    Raises:
        RuntimeError: no agent has started this process with ``--on-failure replace``.
        ValueError: time-outs that contradict each other.
    """

    def __init__(
        self, c10d_backend: str, process_group_timeout: int = 10000, coordinator_pg_timeout: int = 600000
    ) -> None:
        url, environ = agent_url()
        timeouts = process_group_timeout, coordinator_pg_timeout
        self._begin(c10d_backend, (url, URL_VARIABLE), environ, None, timeouts, may_host=False)
        self._member.page = page_of(os.environ)


def agent_url() -> tuple[str, dict[str, str]]:
    """Return the URL that the agent has given to this worker, and the environment with the token for it.

    Raises:
        RuntimeError: there is none.
    """
    url = os.environ.get(URL_VARIABLE)
    if url is None:
        raise RuntimeError(
            f"{URL_VARIABLE} is not set: start the script with elasticrun --on-failure replace,"
            " or use CoordinatorP2P"
        )
    renamed = {name: name for name in (MEMBER_VARIABLE, JOB_VARIABLE)} | {
        TOKEN_OF_URL_VARIABLE: TOKEN_VARIABLE
    }
    return url, {own: os.environ[name] for name, own in renamed.items() if name in os.environ}
