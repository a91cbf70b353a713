"""Rendezvous API for workers, with the names that torchelastic uses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from elasticrs._engine.job.value import Value
from elasticrs.rendezvous import api
from elasticrs.rendezvous.api import RendezvousHandler

if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler

__all__ = [
    "RendezvousClosedException",
    "RendezvousHandler",
    "RendezvousNonRetryableError",
    "RendezvousParameters",
    "RendezvousTimeoutException",
    "get_rendezvous",
]

RendezvousClosedException = api.RendezvousClosedError
RendezvousNonRetryableError = api.RendezvousConnectionError
RendezvousTimeoutException = api.RendezvousTimeoutError


class RendezvousParameters(Value):
    """Parameters of a rendezvous. Raise ``ValueError`` if the numbers of workers or the settings are invalid.

    Args:
        rdzv_backend: scheme of the rendezvous URL: ``elasticrs`` or ``etcd``.
        rdzv_endpoint: address of the store, as ``HOST:PORT``.
        run_id: name of the job.
        min_workers: minimum number of workers.
        max_workers: maximum number of workers.
        config: additional settings as ``KEY=VALUE,KEY=VALUE``, or ``None``.
    """

    rdzv_backend: str
    rdzv_endpoint: str
    run_id: str
    min_workers: int
    max_workers: int
    config: str | None = None

    def __init__(self, *args: object, **given: object) -> None:
        super().__init__(*args, **given)
        if not 0 < self.min_workers <= self.max_workers:
            raise ValueError(
                f"min_workers, max_workers: got {self.min_workers}, {self.max_workers}, "
                "expected 0 < min_workers <= max_workers"
            )

    @property
    def url(self) -> str:
        """Rendezvous URL, to be passed to a coordinator as ``init_method``."""
        pairs = [pair.partition("=") for pair in (self.config or "").split(",") if pair]
        if wrong := ["".join(pair) for pair in pairs if not pair[1]]:
            raise ValueError(f"config: got {wrong[0]!r}, expected KEY=VALUE")
        query: dict[str, object] = {"min_workers": self.min_workers, "max_workers": self.max_workers}
        query |= {key: value for key, _, value in pairs}
        job = quote(self.run_id, safe="")
        return f"{self.rdzv_backend}://{self.rdzv_endpoint}/{job}?{urlencode(query)}"


def get_rendezvous(rdzv_params: RendezvousParameters) -> ElasticRendezvousHandler:
    """Return a handler for a worker without a coordinator. Raise ``ValueError`` for invalid parameters."""
    from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler
    from elasticrs.train.meeting_url import parse

    place = parse(rdzv_params.url, os.environ, source="rendezvous")
    return ElasticRendezvousHandler(place.rendezvous, place.backend)
