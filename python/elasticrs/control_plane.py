"""Debug server of a worker, which returns its stacks and its flight recorder on request.

The server is torch's (HTTP on a Unix socket; ``GET /handler/``, ``POST /handler/ping``). Torch is imported
only if ``TORCH_WORKER_SERVER_SOCKET`` requests the server. No agent sets this variable by itself.
"""

from __future__ import annotations

import os
from functools import wraps

from elasticrs.multiprocessing.errors import ChildFailedError, get_error_handler, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, ParamSpec, TypeVar

    _R = TypeVar("_R")
    _P = ParamSpec("_P")

__all__ = ["worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"


def worker_main() -> _WorkerMain:
    """Wrap the main function of a worker: answer requests while it runs, and record how it fails.

    Use ``@worker_main()`` before a function, or ``with worker_main():``. Unlike in torch, an exception of the
    function is recorded. Torch records only an exception of the creation of the context manager.

    Returns:
        A decorator that is also a context manager.
    """
    return _WorkerMain()


class _WorkerMain:
    def __init__(self) -> None:
        self._handler = get_error_handler()
        self._server: Any = None

    def __call__(self, fn: Callable[_P, _R]) -> Callable[_P, _R | None]:
        @wraps(fn)
        def served(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            server = _start()
            try:
                return fn(*args, **kwargs)
            finally:
                _shutdown(server)

        return record(served)

    def __enter__(self) -> None:
        self._handler.initialize()
        self._server = _start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _shutdown(self._server)
        # Record no `ChildFailedError`, because the job that this worker launched has written an error file of
        # its own.
        if isinstance(error, Exception) and not isinstance(error, ChildFailedError):
            self._handler.record_exception(error)


def _start() -> Any:
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET)
    if path is None:
        return None
    try:
        import torch.distributed  # noqa: F401 -- loads the libraries of the next one
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError as error:
        raise ImportError(
            f"{TORCH_WORKER_SERVER_SOCKET} is set, but the server is torch's: {error}"
        ) from error
    return _WorkerServer(path)


def _shutdown(server: Any) -> None:
    if server is not None:
        server.shutdown()
