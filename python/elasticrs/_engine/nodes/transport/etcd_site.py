"""Endpoints of etcd, and settings that only the ``etcd`` back end has. Their names are those of torch's back
ends ``etcd`` and ``etcd-v2``. Imported only if a job uses etcd.

- **SITE-1** Contradictory settings are an error: two schemes, certificates without https, or a key without
  its certificate.
- **SITE-2** Certificate files are opened before anything is started, so that the error for a wrong path names
  the setting. Their content is checked when connecting.
- **SITE-3** No text that this module creates contains the password.
"""

from __future__ import annotations

import os

from elasticrs._engine.job.config import UsageError, seconds_within, whole
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.transport.addresses import is_loopback_name, parse_endpoint, shown_endpoint
from elasticrs._engine.nodes.transport.settings import (
    Key,
    path,
    read_secret,
    read_value,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import KW_ONLY
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.nodes.transport.coordination import Client

DEFAULT_PORT = 2379
JOB_TTL = 7200.0
"""Seconds for which etcd keeps the record of a job after its last agent has left, as in torch."""

SHORTEST_TTL, LONGEST_TTL = 2, 3600
_SCHEMES = ("http", "https")
EXPECTED = "HOST[:PORT] of etcd's members, separated by commas, all with http://, all with https://, or none"


def _protocol(value: object) -> str:
    found = str(value).strip().lower()
    if found not in _SCHEMES:
        raise ValueError("http or https")
    return found


def _name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("the name of a user of etcd")
    return value


def _prefix(value: object) -> str:
    found = str(value).strip().rstrip("/")
    if len(found.encode(errors="replace")) > 256 or not found.isprintable():
        raise ValueError("how the names of keys begin, 256 bytes at most")
    return found


def _ttl(value: object) -> int:
    found = whole(SHORTEST_TTL)(value)
    if found > LONGEST_TTL:
        raise ValueError(f"a whole number of seconds, {LONGEST_TTL} at most")
    return found


KEYS = (
    Key("protocol", "http", _protocol, "http or https; or write https:// before each endpoint"),
    Key("ca_cert", None, path, "file with the authorities for etcd's certificate; default: the system's"),
    Key("ssl_cert", None, path, "file with this node's certificate, for an etcd that asks for one"),
    Key("ssl_cert_key", None, path, "file with its key; default: the file of the certificate"),
    Key("user", None, _name, "user of etcd"),
    Key("password_file", None, path, "file that contains the user's password"),
    Key("etcd_prefix", "/torchelastic/p2p", _prefix, "put before the names of all keys"),
    Key("lease_ttl", 5, _ttl, "seconds without a keep-alive after which a node is lost, 2 or more"),
    Key("read_timeout", 60.0, seconds_within(0, above=True), "seconds for an answer of etcd"),
)  # fmt: skip

_ALIASES = {"cacert": "ca_cert", "cert": "ssl_cert", "key": "ssl_cert_key", "store_grace": "lease_ttl"}
"""Other names of settings, from torch's back end ``etcd-v2`` and from elasticrs's own store."""

_FIELDS = {"etcd_prefix": "prefix", "lease_ttl": "ttl", "read_timeout": "read_timeout"}
NAMES = (*(key.name for key in KEYS), *_ALIASES)
_OF_OWN_STORE = ("is_host", "bind_addr", "keep_alive_interval", "keep_alive_max_attempt")
"""Settings of elasticrs's own store that have no effect with etcd."""


class EtcdSite(Value):
    """Servers of an etcd cluster, and its settings. IPv6 addresses have no brackets. Times are in seconds."""

    _secret = "password"

    endpoints: tuple[tuple[str, int], ...]
    _: KW_ONLY
    is_tls: bool = False
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None
    prefix: str = ""
    ttl: int = 5
    read_timeout: float = 60.0

    @property
    def keep_alive(self) -> dict[str, object]:
        """Settings with which a lease, which lasts five keep-alive intervals, is ``ttl`` seconds long."""
        return {"keep_alive_interval": self.ttl / 5, "keep_alive_max_attempt": 5}

    @property
    def shown(self) -> str:
        return ",".join(shown_endpoint(*each) for each in self.endpoints)

    def client(
        self,
        job: str,
        *,
        connect_timeout: float,
        stall_timeout: float | None = None,
        supervisor: _core.Supervisor | None = None,
        links: tuple[str, str | None] | None = None,
    ) -> Client:
        """Open a session with the etcd cluster, or raise :class:`OSError` if file descriptors have run out.
        Keys that outlive the session belong to a lease that all sessions of a job share. That lease ends
        :data:`JOB_TTL` seconds after the last of them. The attempts to connect to all endpoints together take
        at most ``connect_timeout`` seconds.
        """
        from elasticrs._engine.nodes.transport.coordination import Client

        return Client.etcd(
            self.endpoints,
            prefix=self.prefix,
            ca_cert=self.ca_cert,
            cert=self.cert,
            key=self.key,
            is_tls=self.is_tls,
            user=self.user,
            password=self.password,
            ttl=float(self.ttl),
            job_lease=(lease_of(f"{self.prefix}\0{job}"), JOB_TTL),
            connect_timeout=connect_timeout,
            read_timeout=self.read_timeout,
            stall_timeout=stall_timeout,
            supervisor=supervisor,
            links=links,
        )


def lease_of(name: str) -> int:
    """Return the id of the lease that all agents of a job share."""
    import hashlib

    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    # Etcd does not accept negative ids, and replaces 0 with an id of its own.
    return int.from_bytes(digest[:8], "big") >> 1 or 1


def read_site(
    endpoint: str, config: Mapping[str, object], source: str, option: str
) -> tuple[EtcdSite, dict[str, object], list[str]]:
    """Parse the endpoints (``[SCHEME://]HOST[:PORT],…``) and the settings of etcd. Return three values: the
    description of the etcd cluster, the remaining settings (some of them follow from those of etcd), and a
    list of messages to the user. Raise :class:`.UsageError` for invalid input. Its message names ``source``
    (the origin of the settings) or ``option`` (which gives the endpoints).
    """
    given, rest = _sorted(config, source)
    read = {key.name: read_value(key, given[key.name], source) for key in KEYS if key.name in given}
    scheme, endpoints = _endpoints(option, endpoint)
    protocol = read.get("protocol", scheme or "http")
    if scheme not in (None, protocol):
        raise UsageError(
            f"{source}: protocol: got {given['protocol']!r}, but {option} has {scheme}://: leave one out"
        )
    notices: list[str] = []
    in_vain = [name for name in _OF_OWN_STORE if rest.pop(name, None) is not None]
    if in_vain:
        notices.append(f"{source}: {', '.join(in_vain)}: no effect with etcd, which has lease_ttl")
    is_tls = protocol == "https"
    defaults = {key.name: key.default for key in KEYS}
    fields: dict[str, Any] = {field: read.get(name, defaults[name]) for name, field in _FIELDS.items()}
    fields |= _files(read, source, is_tls=is_tls) | _user(read, rest, source, notices)
    site = EtcdSite(endpoints, is_tls=is_tls, **fields)
    if site.user is not None and not is_tls and not all(is_loopback_name(host) for host, _ in endpoints):
        notices.append(f"{source}: user: the password goes to etcd unencrypted: use https")
    rest |= site.keep_alive
    if "timeout" in rest:
        # As in torch, ``join_timeout`` defaults to the value of ``timeout``.
        rest.setdefault("join_timeout", rest["timeout"])
    return site, rest, notices


def _sorted(config: Mapping[str, object], source: str) -> tuple[dict[str, object], dict[str, object]]:
    """Split the settings into etcd's, under their main names, and all others."""
    given: dict[str, object] = {}
    rest: dict[str, object] = {}
    for name, value in config.items():
        if name not in NAMES:
            rest[name] = value
        elif value is not None and given.setdefault(_ALIASES.get(name, name), value) != value:
            full = _ALIASES.get(name, name)
            alias = next(each for each in _ALIASES if _ALIASES[each] == full)
            raise UsageError(f"{source}: {full} and {alias} are the same: leave one out")
    return given, rest


def _endpoints(option: str, text: str) -> tuple[str | None, tuple[tuple[str, int], ...]]:
    schemes: set[str | None] = set()
    found: list[tuple[str, int]] = []
    for each in text.split(","):
        if not each.strip():
            raise UsageError(f"{option}: got {text!r}, expected {EXPECTED}")
        scheme, slashes, rest = each.strip().rpartition("://")
        schemes.add(scheme.lower() if slashes else None)
        if not schemes <= {None, *_SCHEMES}:
            break
        host, port = parse_endpoint(option, rest.removesuffix("/") if slashes else rest)
        found.append((host, DEFAULT_PORT if port is None else port))
    if len(schemes) > 1 or not schemes <= {None, *_SCHEMES} or any(port == 0 for _, port in found):
        raise UsageError(f"{option}: got {text!r}, expected {EXPECTED}")
    return schemes.pop(), tuple(dict.fromkeys(found))


def _files(read: Mapping[str, Any], source: str, *, is_tls: bool) -> dict[str, Any]:
    """Check that the certificate files are readable and consistent. Return their paths, keyed by field."""
    files = {name: read[name] for name in ("ca_cert", "ssl_cert", "ssl_cert_key") if name in read}
    if files and not is_tls:
        raise UsageError(f"{source}: {next(iter(files))}: only with protocol=https")
    if "ssl_cert_key" in files and "ssl_cert" not in files:
        raise UsageError(f"{source}: ssl_cert_key needs ssl_cert, the certificate that it belongs to")
    for name, file in files.items():
        try:
            os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:  # noqa: PERF203 -- three at most
            raise UsageError(f"{source}: {name}: {file!r} cannot be read: {error.strerror}") from None
    cert = files.get("ssl_cert")
    return {"ca_cert": files.get("ca_cert"), "cert": cert, "key": files.get("ssl_cert_key", cert)}


def _user(
    read: Mapping[str, Any], rest: Mapping[str, object], source: str, notices: list[str]
) -> dict[str, Any]:
    user, file = read.get("user"), read.get("password_file")
    if "password" in rest:
        raise UsageError(
            f"{source}: password: every user of the machine can read a command line: put it in a file, and "
            "give password_file=FILE"
        )
    if (user is None) != (file is None):
        raise UsageError(f"{source}: user and password_file need each other")
    if file is None:
        return {}
    try:
        return {"user": user, "password": read_secret("password", file, source, notices).decode()}
    except UnicodeDecodeError:
        raise UsageError(f"{source}: password_file: {file!r} does not hold text in UTF-8") from None
