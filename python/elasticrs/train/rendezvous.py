"""Rendezvous in which workers find each other. This module has the names of torchelastic 0.1's rendezvous,
parses the URL that describes a rendezvous, and reads the settings that an agent gives its workers.

The URL is ``elasticrs://HOST:PORT/JOB?min_workers=2`` or ``etcd://…``. Its query may have every key of the
option ``--rdzv-conf``. ``max_workers`` defaults to ``min_workers``. The key ``timeout`` means
``join_timeout``, as in torchelastic 0.1.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from elasticrs._engine.job.config import UsageError, seconds_within
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.describe import Words, describe
from elasticrs._engine.nodes.protocol.records import workers_scope
from elasticrs._engine.nodes.transport.addresses import shown_endpoint
from elasticrs._engine.workers.plan import TOKEN_VARIABLE, bind
from elasticrs.rendezvous import api
from elasticrs.rendezvous.api import RendezvousHandler
from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous

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

_SCHEMES = {"elasticrs": "c10d", "etcd": "etcd"}
_EXPECTED = "elasticrs://HOST:PORT/JOB?min_workers=N&max_workers=M or etcd://HOST[:PORT]/JOB?…"
_MANY = 2**31 - 1

STUCK_TIMEOUT = 10.0
"""Limit in seconds for leaving a broken round, plus twice the longest time between step boundaries so far."""

KEEP_ALIVE = "0.4"
"""Seconds between two keep-alives of a worker, of which five may be missed before its lease expires. Shorter
than an agent's. A reset connection does not prove that the worker has died, so the others wait until the
lease has expired. If a living worker is taken for dead, that costs only one step.
"""


class WorkerRendezvous(Value):
    """Settings for the rendezvous of workers, parsed from a URL. ``notices`` are messages for the user."""

    url: str
    rendezvous: Rendezvous
    backend: str
    stuck_timeout: float
    notices: list[str]


def parse(
    url: str,
    environ: Mapping[str, str],
    most: int | str | None = None,
    source: str = "init_method",
    *,
    may_host: bool = True,
) -> WorkerRendezvous:
    """Parse a rendezvous URL. Raise ``UsageError`` with one line for the user if it is invalid. The settings
    differ from those of nodes. Any number of consecutive rounds may fail, workers wait until a hung worker
    has exited, and leases are shorter. ``most`` limits ``max_workers``. ``source`` is the name of the option
    that contains the URL, for error messages.
    """
    words = Words(
        source, f"{source}: the address", "min_workers:max_workers", "rank", f"{source}: the job", source
    )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{source}: got {url!r}: {error}") from None
    if "#" in url:
        # A URL parser would silently ignore all settings after a '#'.
        raise UsageError(f"{source}: got {url!r} with a '#', expected '%23' in its place")
    backend = _SCHEMES.get(parts.scheme)
    if backend is None or not parts.netloc:
        raise UsageError(f"{source}: got {url!r}, expected {_EXPECTED}")
    config = _config(parts.query, source)
    low = _count("min_workers", config.pop("min_workers", None), source)
    high = _count("max_workers", config.pop("max_workers", low), source)
    if most is not None:
        high = min(high, _count("max_num_trainers", most, source))
    if high < low:
        raise UsageError(f"{source}: got min_workers={low}, but at most {high} workers")
    try:
        value = config.pop("stuck_timeout", STUCK_TIMEOUT)
        stuck = seconds_within(0, above=True)(value)
    except ValueError as error:
        raise UsageError(f"{source}: stuck_timeout: got {value!r}, expected {error}") from None
    if "timeout" in config:
        config.setdefault("join_timeout", config.pop("timeout"))
    config.setdefault("max_short_losses", str(_MANY))
    if backend == "c10d":
        config.setdefault("keep_alive_interval", KEEP_ALIVE)
        if not may_host:
            config["is_host"] = "0"
    job_of_url = unquote(parts.path.strip("/"))
    rendezvous, notices = describe(
        backend, parts.netloc, job_of_url, (low, high), config, environ, grace=stuck, words=words
    )
    if rendezvous is None or rendezvous.port == 0:
        raise UsageError(
            f"{source}: got {url!r}, expected a port other than 0, under which the others find it"
        )
    name, _, before = environ.get(MEMBER_VARIABLE, "").partition(" ")
    job = environ.get(JOB_VARIABLE)
    rendezvous = rendezvous.replaced(member=name or None, replaces=before or None, job=job)
    if job is not None and TOKEN_VARIABLE in environ and rendezvous.etcd is None:
        # The token is the credential that the agent gave its workers.
        rendezvous = rendezvous.replaced(scope=workers_scope(rendezvous.run_id))
    return WorkerRendezvous(url, rendezvous, backend, stuck, notices)


def _config(query: str, source: str) -> dict[str, object]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise UsageError(f"{source}: got {query!r} after '?', expected KEY=VALUE&KEY=VALUE") from None
    config: dict[str, object] = dict(pairs)
    if len(config) < len(pairs):
        raise UsageError(f"{source}: got {query!r}, expected each key once")
    return config


def _count(name: str, value: object, source: str) -> int:
    if value is None:
        raise UsageError(f"{source}: {name} is missing: {_EXPECTED}")
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise UsageError(f"{source}: {name}: got {value!r}, expected a whole number from 1")
    return count


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
    found = parse(rdzv_params.url, os.environ, source="rendezvous")
    return ElasticRendezvousHandler(found.rendezvous, found.backend)


# --- rendezvous of workers that were started by agents ---

URL_VARIABLE = "ELASTICRS_TRAIN"
TOKEN_OF_URL_VARIABLE = "ELASTICRS_TRAIN_TOKEN"

MEMBER_VARIABLE = "ELASTICRS_TRAIN_MEMBER"
"""Environment variable with the agent's name for this worker and, for a replacement, its predecessor's."""

JOB_VARIABLE = "ELASTICRS_TRAIN_JOB"
"""Variable with the job name under which the workers meet in the store. The URL has the agents' one."""

_OF_EVERY_WORKER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ADDRESS_KEY = "elasticrs/train"
_held: list[Any] = []
"""What must stay open as long as this process lives."""


def rendezvous_of_agent() -> WorkerRendezvous:
    """Return the rendezvous settings that the agent has set. Raise ``RuntimeError`` if there is no agent."""
    url = os.environ.get(URL_VARIABLE)
    if url is None:
        return _rendezvous_at_rank_0()
    environ = {name: os.environ[name] for name in (MEMBER_VARIABLE, JOB_VARIABLE) if name in os.environ}
    if TOKEN_OF_URL_VARIABLE in os.environ:
        environ[TOKEN_VARIABLE] = os.environ[TOKEN_OF_URL_VARIABLE]
    return parse(url, environ, source=URL_VARIABLE, may_host=False)


@cache
def _rendezvous_at_rank_0() -> WorkerRendezvous:
    """Return the rendezvous settings for a job whose agents restart all workers after a failure. The worker
    with rank 0 hosts the store. The settings are read from torch's ``env://`` variables, and cached, because
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
        bound = bind(0)
        _held.append(bound)
        store.set(_ADDRESS_KEY, f"{bound.getsockname()[1]} {os.urandom(16).hex()}")
    port, token = store.get(_ADDRESS_KEY).decode().split()
    # Keep the store object, because on rank 0 it may contain the server, which other ranks may still need.
    _held.append(store)
    host = os.environ["MASTER_ADDR"]
    job = quote(os.environ.get("TORCHELASTIC_RUN_ID") or "job", safe="")
    settings = {"min_workers": world, "max_workers": world, "order_hint": rank, "is_host": int(rank == 0)}
    url = f"elasticrs://{shown_endpoint(host, int(port))}/{job}?{urlencode(settings)}"
    return parse(url, {TOKEN_VARIABLE: token}, source=URL_VARIABLE)
