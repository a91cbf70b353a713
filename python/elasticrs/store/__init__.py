"""The store in which agents meet, for users: an object as torch's ``Store``, and a server of its own.

``python -m elasticrs.store`` serves; :func:`connect` makes a :class:`Store` on it.
"""

from elasticrs.store.store import (
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    Store,
    connect,
)

__all__ = ["DistError", "DistNetworkError", "DistStoreError", "QueueEmptyError", "Store", "connect"]
