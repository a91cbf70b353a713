"""A client of etcd for torch's back ends, with the few names of python-etcd's that programs use with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from elasticrs.job.value import Value
from elasticrs.rendezvous.elastic.etcd_site import JOB_TTL, EtcdSite
from elasticrs.store.coordination import Delete, DeletePrefix, Get, Put
from elasticrs.store.requests import LostError, Requests
from elasticrs.store.session import NativeSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs.store.coordination import Compare, Operation, Reply
    from elasticrs.store.session import Client

T = TypeVar("T")


class EtcdResult(Value):
    """What a key holds.

    Args:
        key: its name.
        value: as text.
        ttl: seconds that it stays after the last client has gone.
    """

    key: str
    value: str
    ttl: int


class EtcdClient:
    """etcd, by its v3 interface. May be used by several threads; connects when it is first asked.

    Args:
        site: where etcd is.
        name: of what is kept there; keys end ``ttl`` seconds after the last client of the same name.
        ttl: see ``name``.
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
        """Return a client for the same etcd as another one, ours or python-etcd's, of which the address is
        taken.
        """
        if isinstance(client, EtcdClient):
            return cls(client.site, name, ttl)
        is_tls = getattr(client, "protocol", "http") == "https"
        return cls(EtcdSite(((client.host, client.port),), is_tls=is_tls), name, ttl)

    @property
    def version(self) -> str:
        """The release of the server.

        Raises:
            OSError: it does not answer.
        """
        import json
        import ssl
        from urllib.request import urlopen

        context, host = None, f"[{self.host}]" if ":" in self.host else self.host
        if self.site.is_tls:
            context = ssl.create_default_context(cafile=self.site.ca_cert)
            if self.site.cert is not None:
                context.load_cert_chain(self.site.cert, self.site.key)
        url = f"{self.protocol}://{host}:{self.port}/version"
        with urlopen(url, timeout=self.read_timeout, context=context) as answer:
            return str(json.load(answer)["etcdserver"])

    def session(self) -> Client:
        """Begin a session of its own."""
        return self.site.client(self._name, job_ttl=self._ttl)

    def connect(self) -> None:
        """Connect now.

        Raises:
            LostError: that is not possible.
        """
        self._ask(Requests.connect)

    def txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> Reply:
        """Carry out a transaction.

        Raises:
            LostError: the session ended; whether the transaction was carried out is not known. The next
                call begins another one.
        """
        return self._ask(lambda requests: requests.txn(compares, then, otherwise))

    def _ask(self, ask: Callable[[Requests], T]) -> T:
        requests = self._requests
        if requests is None:
            requests = self._requests = Requests(lambda: NativeSession(self.session()))
        try:
            return ask(requests)
        except LostError:
            self._requests = None
            requests.close()
            raise

    def get(self, key: str) -> EtcdResult:
        """Read a key.

        Raises:
            KeyError: it is not there.
            LostError: etcd does not answer.
        """
        found = self.txn(then=[Get(key)]).entry(0)
        if found is None:
            raise KeyError(key)
        return EtcdResult(key, (found.value or b"").decode(), int(self._ttl))

    def write(self, key: str, value: str) -> None:
        """Set a key.

        Raises:
            LostError: etcd does not answer.
        """
        self.txn(then=[Put(key, value.encode(), False)])

    set = write

    def delete(self, key: str, recursive: bool = False, dir: bool = False) -> None:  # noqa: A002, ARG002 -- its name there
        """Delete a key, or with ``recursive`` all below it; one that is not there is no error.

        Raises:
            LostError: etcd does not answer.
        """
        below = [DeletePrefix(f"{key}/")] if recursive else []
        self.txn(then=[Delete(key), *below])

    def close(self) -> None:
        """End the session. Idempotent."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()
