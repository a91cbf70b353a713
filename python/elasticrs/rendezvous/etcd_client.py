"""Client for etcd, used by torch's back ends. It implements only those methods of python-etcd's client that
programs use with these back ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs.job.value import Value
from elasticrs.rendezvous.elastic.etcd_site import JOB_TTL, EtcdSite
from elasticrs.rendezvous.endpoint import shown_endpoint
from elasticrs.store.coordination import Delete, DeletePrefix, Get, Put
from elasticrs.store.requests import Requests
from elasticrs.store.session import NativeSession
from elasticrs.store.timed import DistNetworkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.store.coordination import Compare, Operation, Reply


class EtcdResult(Value):
    """A key in etcd and its content.

    Args:
        key: name of the key.
        value: value of the key, as text.
        ttl: seconds for which etcd keeps the key after its last client has disconnected.
    """

    key: str
    value: str
    ttl: int


class EtcdClient:
    """Thread-safe client for etcd's v3 API. It connects on first use.

    Args:
        site: addresses of etcd, and settings of the connection.
        name: name of the group of clients to which this client belongs. The keys of all clients in a group
            have the same lifetime.
        ttl: seconds for which etcd keeps the keys of the group after its last client has disconnected.
    """

    def __init__(self, site: EtcdSite, name: str = "torch/elastic", ttl: float = JOB_TTL) -> None:
        self.site = site
        self.host, self.port = site.endpoints[0]
        self.protocol = "https" if site.is_tls else "http"
        self.read_timeout = site.read_timeout
        self._name, self._ttl = name, ttl
        self._requests: Requests | None = None

    @classmethod
    def of(cls, client: Any, name: str = "torch/elastic", ttl: float = JOB_TTL) -> EtcdClient:
        """Return a client for the same etcd as ``client``, which may be an :class:`EtcdClient` or a
        python-etcd client. Only the address and protocol of a python-etcd client are used.
        """
        if isinstance(client, EtcdClient):
            return cls(client.site, name, ttl)
        is_tls = getattr(client, "protocol", "http") == "https"
        return cls(EtcdSite(((client.host, client.port),), is_tls=is_tls), name, ttl)

    @property
    def version(self) -> str:
        """Version of the etcd server. Each access queries the server.

        Raises:
            OSError: etcd does not answer.
        """
        import json
        import ssl
        from urllib.request import urlopen

        context = None
        if self.site.is_tls:
            context = ssl.create_default_context(cafile=self.site.ca_cert)
            if self.site.cert is not None:
                context.load_cert_chain(self.site.cert, self.site.key)
        url = f"{self.protocol}://{shown_endpoint(self.host, self.port)}/version"
        with urlopen(url, timeout=self.read_timeout, context=context) as answer:
            return str(json.load(answer)["etcdserver"])

    def session(self) -> NativeSession:
        """Open a new etcd session. The caller must close it."""
        return NativeSession(self.site.client(self._name, job_ttl=self._ttl))

    def txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> Reply:
        """Execute a transaction.

        Raises:
            DistNetworkError: the session ended, and it is unknown whether the transaction was executed. The
                next call opens a new session.
        """
        requests = self._requests
        if requests is None:
            requests = self._requests = Requests(self.session)
        try:
            return requests.txn(compares, then, otherwise)
        except DistNetworkError:
            self._requests = None
            requests.close()
            raise

    def get(self, key: str) -> EtcdResult:
        """Read a key.

        Raises:
            KeyError: the key does not exist.
            DistNetworkError: etcd does not answer.
        """
        found = self.txn(then=[Get(key)]).entry(0)
        if found is None:
            raise KeyError(key)
        return EtcdResult(key, (found.value or b"").decode(), int(self._ttl))

    def write(self, key: str, value: str) -> None:
        """Set a key.

        Raises:
            DistNetworkError: etcd does not answer.
        """
        self.txn(then=[Put(key, value.encode(), False)])

    set = write

    def delete(self, key: str, recursive: bool = False, dir: bool = False) -> None:  # noqa: A002, ARG002 -- its name there
        """Delete a key, and all keys below it if ``recursive`` is true. A missing key is not an error.

        Raises:
            DistNetworkError: etcd does not answer.
        """
        below = [DeletePrefix(f"{key}/")] if recursive else []
        self.txn(then=[Delete(key), *below])

    def close(self) -> None:
        """Close the session. Idempotent."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()
