"""Debug server in a worker, which returns the worker's stacks and its flight recorder on request.

The server itself is part of torch (HTTP on a Unix socket; ``GET /handler/``, ``POST /handler/ping``). Torch
is imported only if ``TORCH_WORKER_SERVER_SOCKET`` requests the server. The agent does not set this variable.
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
    """Wrap the main function of a worker: run the debug server while the function runs, and record its
    failure.

    Decorate a function with ``@worker_main()``, or put its code in a ``with worker_main():`` block.
    Exceptions in this code are recorded. Torch only records an exception that is raised when the context
    manager is created.

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
        # Do not record a `ChildFailedError`. It means that this worker has launched a job itself, and that
        # the job has written its own error file.
        if isinstance(error, Exception) and not isinstance(error, ChildFailedError):
            self._handler.record_exception(error)


def _start() -> Any:
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET)
    if path is None:
        return None
    try:
        import torch.distributed  # noqa: F401 -- loads the libraries that the next import needs
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError as error:
        raise ImportError(
            f"{TORCH_WORKER_SERVER_SOCKET} is set, but its server needs torch: {error}"
        ) from error
    return _WorkerServer(path)


def _shutdown(server: Any) -> None:
    if server is not None:
        server.shutdown()
