"""Public interface of the rendezvous store: a server, and a client similar to torch's ``Store``.

``python -m elasticrs.store`` starts a server. :func:`connect` returns a :class:`Store` that uses it.
"""

from elasticrs._engine.nodes.transport.store import (
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    Store,
    connect,
)

__all__ = ["DistError", "DistNetworkError", "DistStoreError", "QueueEmptyError", "Store", "connect"]
