"""Rendezvous back end that keeps its state in a store, and functions that create it. The store can be torch's
or elasticrs's, but must support ``compare_set``.
"""

from __future__ import annotations

import binascii
import os
import sys
import tempfile
from base64 import b64decode, b64encode
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticrs.events import NodeState, construct_and_record_rdzv_event
from elasticrs.job.config import DEFAULT_PORT
from elasticrs.rendezvous.api import RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticrs.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from elasticrs.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from elasticrs.store import file_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs.rendezvous.api import RendezvousParameters

_FAILED = "The connection to the C10d store has failed. See inner exception for details."
_torch = sys.modules[__name__]
"""Reference to this module. Torch's store classes are looked up as its attributes, so that programs can
replace these classes, as they can in torch.
"""


def __getattr__(name: str) -> Any:
    if name not in ("FileStore", "TCPStore"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch.distributed

    return getattr(torch.distributed, name)


class C10dRendezvousBackend(RendezvousBackend):
    """Back end that stores the rendezvous state under the key ``torch.rendezvous.<run id>``. The token of a
    state is its base64 encoding.

    Args:
        store: any store with ``get`` and ``compare_set``, such as torch's ``TCPStore`` or a store of
            elasticrs.
        run_id: name of the job.

    Raises:
        ValueError: the run id is empty.
        RendezvousConnectionError: the store cannot be reached.
    """

    # Placeholder value to store before the first state, because ``get`` would block until the key exists.
    _NULL_SENTINEL = "Y2FuaW1hZGFt"

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._call_store("compare_set", self._key, "", self._NULL_SENTINEL)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._decoded(self._call_store("get", self._key))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state; see :class:`RendezvousBackend`. If ``token`` does not come from this back end,
        leave the state unchanged.
        """
        if token and not isinstance(token, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        expected = token.decode() if token else self._NULL_SENTINEL
        desired = b64encode(state).decode()
        found = self._decoded(self._call_store("compare_set", self._key, expected, desired))
        # If the current value equals the new one, report success, even if another node wrote it. The result
        # is the same, and the store does not tell who wrote it.
        return None if found is None else (*found, found[0] == state)

    def _call_store(self, operation: str, *args: Any) -> Any:
        try:
            return getattr(self._store, operation)(*args)
        except (ValueError, RuntimeError, OSError) as error:
            raise RendezvousConnectionError(
                f"The connection to the C10d store has failed: {error or repr(error)}"
            ) from error

    def _decoded(self, encoded: bytes) -> tuple[bytes, Token] | None:
        if encoded == self._NULL_SENTINEL.encode():
            return None
        try:
            return b64decode(encoded, validate=True), encoded
        except binascii.Error as error:
            raise RendezvousStateError(f"The state object is corrupt: {error}") from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """Create the back end with one of torch's stores. This imports torch.

    Args:
        params: ``store_type`` is ``tcp`` (the default) or ``file``. For ``tcp``, ``is_host`` says whether
            this process serves the store (by default, it does if the endpoint seems to be this machine), and
            ``read_timeout`` is the time limit in seconds for reads that wait for a key (60 by default). For
            ``file``, the endpoint is a path, or empty for a temporary file. The file may be on a network file
            system that the nodes share, if file locks work there.

    Returns:
        The back end and its store. The store stays open as long as the caller keeps a reference to it.

    Raises:
        ValueError: a setting is invalid.
        RendezvousConnectionError: the store cannot be reached or served.
        RendezvousError: no temporary file can be created.
    """
    return _create(params, _torch_store)


def create_file_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """Create the back end with elasticrs's own file store. This does not import torch. See
    :func:`create_backend`.
    """
    return _create(params, _own_file_store)


def _create(
    params: RendezvousParameters, create_store: Callable[[RendezvousParameters], Any]
) -> tuple[C10dRendezvousBackend, Any]:
    try:
        store = create_store(params)
        return C10dRendezvousBackend(store, params.run_id), store
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(params.run_id, text, NodeState.FAILED, "create_backend")
        raise


def _own_file_store(params: RendezvousParameters) -> Any:
    path = params.endpoint.strip()
    try:
        return file_store.FileStore(path) if path else file_store.TemporaryFileStore()
    except OSError as error:
        raise RendezvousError(f"The file creation for C10d store has failed: {error}") from error


def _torch_store(params: RendezvousParameters) -> Any:
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type == "file":
        return _torch_file_store(params.endpoint.strip())
    if store_type == "tcp":
        return _torch_tcp_store(params)
    raise ValueError("Invalid store type given. Currently only supports file and tcp.")


def _torch_file_store(path: str) -> Any:
    if not path:
        try:
            fd, path = tempfile.mkstemp(prefix="elasticrs-rdzv-")
        except OSError as error:
            raise RendezvousError(
                "The file creation for C10d store has failed. See inner exception for details."
            ) from error
        os.close(fd)
    try:
        return _torch.FileStore(path)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(_FAILED) from error


def _torch_tcp_store(params: RendezvousParameters) -> Any:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    read_timeout = params.get_as_int("read_timeout", 60)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    timeout = timedelta(seconds=read_timeout)
    asked = params.get_as_bool("is_host")
    is_host = _matches_machine_hostname(host) if asked is None else asked
    # If the user has not set ``is_host``, another process on this machine may already serve the store. In
    # that case, connect to it as a client.
    for serves in (True, False) if is_host and asked is None else (is_host,):
        try:
            store = _torch.TCPStore(host, port, is_master=serves, multi_tenant=True, timeout=timeout)
        except (ValueError, RuntimeError, TimeoutError) as error:
            trouble = error
            continue
        if serves:
            text = f"process {os.getpid()} hosts the store of the rendezvous"
            construct_and_record_rdzv_event(params.run_id, text, NodeState.INIT)
        return store
    raise RendezvousConnectionError(_FAILED) from trouble
