"""Torch's debug server in a worker, if the user (not the agent) sets ``TORCH_WORKER_SERVER_SOCKET``."""

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
    """Run torch's debug server during a worker's main code, and record the failure of that code.

    Use ``@worker_main()`` or ``with worker_main():``. Torch's function does not record failures.
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
        # After a `ChildFailedError`, the job that this worker has launched has written the error file.
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
