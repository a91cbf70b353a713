"""Back end that keeps the state of torch's dynamic rendezvous in etcd. It uses torch's names and etcd's v3
API.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

from elasticrs.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from elasticrs.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from elasticrs.rendezvous.elastic import etcd_site
from elasticrs.rendezvous.etcd_client import EtcdClient
from elasticrs.store.coordination import Get, ModifiedAt, Put
from elasticrs.store.timed import DistNetworkError

if TYPE_CHECKING:
    from elasticrs.rendezvous.api import RendezvousParameters
    from elasticrs.rendezvous.etcd_store import EtcdStore
    from elasticrs.store.coordination import Entry, Reply

__all__ = ["EtcdRendezvousBackend", "create_backend"]

_NO_CONNECTION = "The connection to etcd has failed. See inner exception for details."


class EtcdRendezvousBackend(RendezvousBackend):
    """Keeps the rendezvous state under the key ``<key_prefix>/<run_id>``, encoded in base64. The token of a
    state is the etcd revision of the key's last write.

    Args:
        client: an :class:`EtcdClient`, or a client of python-etcd, of which only the address and protocol are
            used.
        run_id: name of the job.
        key_prefix: prefix of the key, separated from the run id by a slash.
        ttl: seconds for which etcd keeps the state after the last back end of the job has disconnected; two
            hours if ``None``.

    Raises:
        ValueError: the run id is empty.
    """

    _DEFAULT_TTL = int(etcd_site.JOB_TTL)

    def __init__(
        self, client: Any, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._key = f"{key_prefix}/{run_id}" if key_prefix else run_id
        lasting = ttl if ttl and ttl > 0 else self._DEFAULT_TTL
        self._client = EtcdClient.of(client, self._key, lasting)

    @property
    def name(self) -> str:
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._txn(then=[Get(self._key)]).entry(0)
        return None if found is None else (_decoded(found), found.mod_revision)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state; see :class:`RendezvousBackend`. If ``token`` does not come from this back end,
        leave the state unchanged.
        """
        try:
            revision = int(token) if token else 0
        except (TypeError, ValueError):
            found = self.get_state()
            return None if found is None else (*found, False)
        put = Put(self._key, b64encode(state), False)
        reply = self._txn([ModifiedAt(self._key, revision)], [put], [Get(self._key)])
        if reply.ok:
            return state, reply.revision, True
        entry = reply.entry(0)
        return None if entry is None else (_decoded(entry), entry.mod_revision, False)

    def close(self) -> None:
        """Close the connection. Idempotent. Torch's class does not have this method."""
        self._client.close()

    def _txn(self, *args: Any, **kwargs: Any) -> Reply:
        try:
            return self._client.txn(*args, **kwargs)
        except (DistNetworkError, OSError) as error:
            raise RendezvousConnectionError(_NO_CONNECTION) from error


def _decoded(entry: Entry) -> bytes:
    try:
        return b64decode(entry.value or b"", validate=True)
    except binascii.Error as error:
        raise RendezvousStateError(f"The state object is corrupt: {error}") from error


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Create the back end and a store in the same etcd cluster.

    Args:
        params: ``endpoint`` may contain several etcd members. Only settings that are specific to etcd are
            used; see :data:`elasticrs.rendezvous.elastic.etcd_site.KEYS`.

    Raises:
        ValueError: a setting is invalid.
        RendezvousConnectionError: etcd cannot be reached.
    """
    from elasticrs.rendezvous.etcd_store import EtcdStore

    read_timeout = params.get_as_int("read_timeout", 60)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    if str(params.get("protocol", "http")).strip().lower() not in ("http", "https"):
        raise ValueError("The protocol must be HTTP or HTTPS.")
    own = {name: value for name, value in params.config.items() if name in etcd_site.NAMES}
    config = {"etcd_prefix": "", **own}
    endpoint = params.endpoint.strip() or "localhost"
    site, _, _ = etcd_site.read_site(endpoint, config, "rdzv_configs", "rdzv_endpoint")
    client = EtcdClient(site)
    backend = EtcdRendezvousBackend(client, params.run_id, key_prefix="/torch/elastic/rendezvous")
    # Read the state now, so that an unreachable etcd is reported here and not later during the rendezvous.
    backend.get_state()
    return backend, EtcdStore(client, "/torch/elastic/store")
