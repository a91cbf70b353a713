"""Rendezvous store of a job on a single node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticrs.store.session import Client, NativeSession, Server

if TYPE_CHECKING:
    from elasticrs.store import Store

_HOST = "127.0.0.1"


class OwnStore:
    """Store of a single-node job. Its server starts on first use, because most single-node jobs never use the
    store.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._server: Server | None = None
        self._store: Store | None = None

    def of_round(self, round: int) -> Store:  # noqa: A002 -- the field's own word
        """Return the store of a round. Keys set in other rounds are not visible in it."""
        if self._store is None:
            from elasticrs.store import Store
            from elasticrs.store.requests import Requests

            self._store = Store(Requests(self._connect))
        return self._store.with_prefix(f"torch.rendezvous.{self._run_id}.{round}/")

    def close(self) -> None:
        """Close the store, including all store objects that :meth:`of_round` has returned. Idempotent."""
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _connect(self) -> NativeSession:
        from elasticrs.store import DistNetworkError

        # Require a token, because other users of this machine can also connect to the port.
        token = os.urandom(16)
        try:
            if self._server is not None:
                # Close the server that an earlier call has started but could not connect to.
                self._server.close()
            self._server = Server([(_HOST, 0)], run_id=self._run_id, token=token)
            client = Client(_HOST, self._server.port, run_id=self._run_id, token=token, stall_timeout=None)
            return NativeSession(client)
        except OSError as error:
            raise DistNetworkError(f"the store of this node cannot be served: {error}") from error
