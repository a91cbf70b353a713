"""The state of a rendezvous in a store with ``compare_set``, torch's or ours; and the stores of ``c10d``."""

from __future__ import annotations

import binascii
import datetime
import os
import time
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

from elasticrs.compat.dynamic.turns import LONGEST_PAUSE, SHORTEST_PAUSE
from elasticrs.compat.dynamic_rendezvous import RendezvousBackend, Token
from elasticrs.compat.file_store import FileStore, TemporaryFileStore
from elasticrs.config import DEFAULT_PORT
from elasticrs.events import NodeState, construct_and_record_rdzv_event
from elasticrs.native_session import Client, Server
from elasticrs.rendezvous.api import RendezvousConnectionError, RendezvousError, RendezvousStateError
from elasticrs.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from elasticrs.store import DistNetworkError, Store

if TYPE_CHECKING:
    from elasticrs.rendezvous.api import RendezvousParameters


class C10dRendezvousBackend(RendezvousBackend):
    """Keeps the state under ``torch.rendezvous.<run id>``, in base64, which is the token as well.

    Args:
        store: with ``get`` and ``compare_set``: torch's ``TCPStore``, ours, or another one.
        run_id: the name of the job.

    Raises:
        ValueError: no run id.
        RendezvousConnectionError: the store cannot be reached.
    """

    # What there is before there is a state: reading a key that is not there would wait for it.
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
        """See :class:`RendezvousBackend`; a token that cannot be one of ours replaces nothing."""
        if token and not isinstance(token, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        expected = token.decode() if token else self._NULL_SENTINEL
        desired = b64encode(state).decode()
        found = self._decoded(self._call_store("compare_set", self._key, expected, desired))
        # The store does not tell who has written what is there now; if it is the same, it does not matter.
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
    """Make the back end and its store.

    Args:
        params: ``store_type`` is ``tcp`` (the default) or ``file``. Of ``tcp``: ``is_host``, whether this
            process serves the store, guessed from the endpoint when it is not given; ``read_timeout``, for
            waiting reads (60 s). Of ``file``, the endpoint is a path, a temporary file when empty; it may be
            on a file system that the nodes share and that has working locks.

    Returns:
        The back end, and the store, which this process keeps open.

    Raises:
        ValueError: a setting that is none.
        RendezvousConnectionError: the store cannot be reached, or not be served.
    """
    try:
        store = _create_store(params)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(params.run_id, text, NodeState.FAILED)
        raise
    return C10dRendezvousBackend(store, params.run_id), store


def _create_store(params: RendezvousParameters) -> Any:
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type == "file":
        path = params.endpoint.strip()
        try:
            return FileStore(path) if path else TemporaryFileStore()
        except OSError as error:
            raise RendezvousError(f"The file creation for C10d store has failed: {error}") from error
    if store_type == "tcp":
        return _create_tcp_store(params)
    raise ValueError("Invalid store type given. Currently only supports file and tcp.")


def _create_tcp_store(params: RendezvousParameters) -> Any:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    read_timeout = params.get_as_int("read_timeout", 60)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    asked = params.get_as_bool("is_host")
    is_host = _matches_machine_hostname(host) if asked is None else asked
    server, trouble = _serve(port, params.run_id) if is_host else (None, None)
    if trouble is not None and asked:
        raise RendezvousConnectionError(f"The C10d store cannot be served: {trouble}") from trouble
    if server is not None:
        text = f"process {os.getpid()} hosts the store of the rendezvous"
        construct_and_record_rdzv_event(params.run_id, text, NodeState.INIT)
    try:
        return _connected(host, port if server is None else server.port, params.run_id, read_timeout, server)
    except DistNetworkError as error:
        if server is not None:
            server.close()
        # If it was only a guess that this is the host, why it could not be is the better part of the story.
        hint = "" if trouble is None else f" (and it cannot be served here: {trouble})"
        text = f"The connection to the C10d store has failed: {error}{hint}"
        raise RendezvousConnectionError(text) from error


class _ServedStore(Store):
    """A store, with its server if that is in this process."""

    def __init__(self, client: Client, read_timeout: float, server: Server | None) -> None:
        self._server = server
        super().__init__(client, timeout=datetime.timedelta(seconds=read_timeout))

    def close(self) -> None:
        """End the connection, and the server."""
        super().close()
        if self._server is not None:
            self._server.close()


def _serve(port: int, run_id: str) -> tuple[Server | None, OSError | None]:
    try:
        # On every address, as torch: the endpoint may be one of several names of this host.
        return Server([("", port)], run_id=run_id), None
    except OSError as error:
        # Another process on this machine may have been the first one.
        return None, error


def _connected(host: str, port: int, run_id: str, read_timeout: float, server: Server | None) -> Store:
    """Connect, for ``read_timeout`` seconds: the host may be the last one to start."""
    deadline = time.monotonic() + read_timeout
    pause = SHORTEST_PAUSE
    while True:
        client = Client(host, port, run_id=run_id, stall_timeout=None)
        try:
            return _ServedStore(client, read_timeout, server)
        except BaseException as error:
            client.close()
            if not isinstance(error, DistNetworkError) or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
