"""Server of the rendezvous store (``python -m elasticrs.store``), and a client similar to torch's."""

from elasticrs._engine.nodes.transport.store import (
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    Store,
    connect,
)

__all__ = ["DistError", "DistNetworkError", "DistStoreError", "QueueEmptyError", "Store", "connect"]
