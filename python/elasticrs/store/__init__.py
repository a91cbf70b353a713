"""The rendezvous store for users: an object like torch's ``Store``, and a server.

``python -m elasticrs.store`` serves; :func:`connect` makes a :class:`Store` on it.
"""

from elasticrs.store.store import Store, connect
from elasticrs.store.timed import DistError, DistNetworkError, DistStoreError, QueueEmptyError

__all__ = ["DistError", "DistNetworkError", "DistStoreError", "QueueEmptyError", "Store", "connect"]
