"""Convert the URL at which the workers of a job meet to settings of :mod:`.protocol`.

The URL is ``elasticrs://HOST:PORT/JOB?min_workers=2`` or ``etcd://…``. Its query may have every key of
``--rdzv-conf``.
``max_workers`` defaults to ``min_workers``. ``timeout`` means ``join_timeout``, as in torchelastic 0.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from elasticrs._engine.job.config import UsageError, seconds_within
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.describe import Words, describe
from elasticrs._engine.nodes.protocol.records import workers_scope
from elasticrs._engine.workers.plan import TOKEN_VARIABLE
from elasticrs.train.membership import STUCK_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous

_SCHEMES = {"elasticrs": "c10d", "etcd": "etcd"}
_EXPECTED = "elasticrs://HOST:PORT/JOB?min_workers=N&max_workers=M or etcd://HOST[:PORT]/JOB?…"
_MANY = 2**31 - 1

KEEP_ALIVE = "0.4"
"""Seconds between two keep-alives of a worker, of which five may be missed before its lease expires.

Shorter than an agent's. A reset connection does not prove that the worker has died, so the others wait until
the lease has expired. If a living worker is taken for dead, that costs only one step.
"""

MEMBER_VARIABLE = "ELASTICRS_TRAIN_MEMBER"
"""Environment variable with the agent's name for this worker.

For a replacement, it also contains the name of its predecessor.
"""

JOB_VARIABLE = "ELASTICRS_TRAIN_JOB"
"""Environment variable with the job name under which the workers meet in the store.

It differs from the name in the URL, under which the agents meet.
"""


class MeetingPlace(Value):
    """Settings from a rendezvous URL. ``notices`` are messages to show to the user."""

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
) -> MeetingPlace:
    """Parse a rendezvous URL. Raise ``UsageError`` with one line for the user if it is invalid.

    The settings differ from those of nodes. Any number of consecutive rounds may fail, workers wait until a
    hung worker has exited, and leases are shorter. ``most`` limits ``max_workers``. ``source`` is the name of
    the option that contains the URL, for error messages.
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
    low = _count(config, "min_workers", None, source)
    high = _count(config, "max_workers", low, source)
    if most is not None:
        high = min(high, _count({"max_num_trainers": most}, "max_num_trainers", None, source))
    if high < low:
        raise UsageError(f"{source}: got min_workers={low}, but at most {high} workers")
    stuck = _stuck_timeout(config.pop("stuck_timeout", STUCK_TIMEOUT), source)
    if "timeout" in config:
        config.setdefault("join_timeout", config.pop("timeout"))
    config.setdefault("max_short_losses", str(_MANY))
    if backend == "c10d":
        config.setdefault("keep_alive_interval", KEEP_ALIVE)
    if not may_host and backend == "c10d":
        config["is_host"] = "0"
    token = environ.get(TOKEN_VARIABLE)
    rendezvous, notices = describe(
        backend,
        parts.netloc,
        unquote(parts.path.strip("/")),
        (low, high),
        config,
        environ,
        grace=stuck,
        words=words,
    )
    if rendezvous is None or rendezvous.port == 0:
        raise UsageError(
            f"{source}: got {url!r}, expected a port other than 0, under which the others find it"
        )
    name, _, before = environ.get(MEMBER_VARIABLE, "").partition(" ")
    job = environ.get(JOB_VARIABLE)
    rendezvous = rendezvous.replaced(member=name or None, replaces=before or None, job=job)
    if job is not None and token is not None and rendezvous.etcd is None:
        # The token is the credential that the agent gave its workers.
        rendezvous = rendezvous.replaced(scope=workers_scope(rendezvous.run_id))
    return MeetingPlace(url, rendezvous, backend, stuck, notices)


def _config(query: str, source: str) -> dict[str, object]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise UsageError(f"{source}: got {query!r} after '?', expected KEY=VALUE&KEY=VALUE") from None
    config: dict[str, object] = dict(pairs)
    if len(config) < len(pairs):
        raise UsageError(f"{source}: got {query!r}, expected each key once")
    return config


def _count(config: dict[str, object], name: str, default: int | None, source: str) -> int:
    text = config.pop(name, default)
    if text is None:
        raise UsageError(f"{source}: {name} is missing: {_EXPECTED}")
    try:
        count = int(str(text))
    except ValueError:
        count = 0
    if count < 1:
        raise UsageError(f"{source}: {name}: got {text!r}, expected a whole number from 1")
    return count


def _stuck_timeout(value: object, source: str) -> float:
    try:
        return seconds_within(0, above=True)(value)
    except ValueError as error:
        raise UsageError(f"{source}: stuck_timeout: got {value!r}, expected {error}") from None
