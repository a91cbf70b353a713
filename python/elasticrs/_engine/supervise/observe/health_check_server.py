"""Health check server with the same names as in torch. Unlike torch's server, it opens a port.

``/healthz`` reports on the agent's loop, ``/readyz`` on the workers; ``/metrics`` is for Prometheus,
``/status`` for programs, and the page at ``/`` for people. A thread of the Rust extension handles the
connections, so requests do not delay the agent's loop.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from elasticrs import _core
from elasticrs._engine.job import config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from threading import Thread
    from typing import Any

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
HOST_VARIABLE = "ELASTICRS_HEALTH_CHECK_HOST"


class HealthCheckServer:
    """HTTP server that reports whether this process makes progress.

    The agent of this package calls ``alive_callback`` in its loop for each request, so a hanging loop does
    not answer. In a program without such an agent, :meth:`start` creates a thread that calls the callback.

    Args:
        alive_callback: returns the time of the last progress, in seconds since 1970. The process counts as
            dead if that is more than ``timeout`` seconds ago, or if the callback takes longer than that.
        port: port to listen on; 0 for any free port; ``None`` for none, so that only ``elasticctl`` can ask.
        timeout: seconds without progress after which the process counts as dead.
        host: address; ``ELASTICRS_HEALTH_CHECK_HOST`` or the loopback address if ``None``. Not in torch.

    Attributes:
        find_overdue: additional callback until :meth:`stop`; returns the number of seconds by which a
            progress report is overdue, and the name of the current activity. Not in torch.
        supervisor: until :meth:`stop`, its thread must be alive as well. Not in torch.
    """

    def __init__(
        self, alive_callback: Callable[[], float], port: int | None, timeout: float, host: str | None = None
    ) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._host = host or os.environ.get(HOST_VARIABLE) or config.LOOPBACK
        self._server: _core.HealthServer | None = None
        self._thread: Thread | None = None
        self._stop_fd = -1
        self.find_overdue: Callable[[], tuple[float, str | None]] | None = None
        self.supervisor: _core.Supervisor | None = None

    @property
    def alive_callback(self) -> Callable[[], float]:
        """The callback that was passed to the constructor."""
        return self._alive_callback

    @property
    def port(self) -> int:
        """Port on which the server listens, or the configured port if the server is not open."""
        return self._port or 0 if self._server is None else self._server.port

    @property
    def address(self) -> str:
        """Address of the server, as ``HOST:PORT``."""
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def open(self, native: _core.HealthServer | None = None) -> _core.HealthServer:
        """Open the port, for a caller that answers the requests. Idempotent. Torch has no such method.

        Args:
            native: server to use, if it exists already.

        Raises:
            OSError: the address cannot be used.
        """
        if self._server is None:
            self._server = native or _core.HealthServer(self._host, self._port, float(self._timeout))
        return self._server

    def start(self) -> None:
        """Open the port and answer requests until :meth:`stop` is called. Idempotent.

        Raises:
            OSError: the address cannot be used.
        """
        server = self.open()
        if self._thread is None:
            import threading

            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
            how: Any = {"target": self._answer_all, "args": (server, self._stop_fd), "name": "health"}
            self._thread = threading.Thread(**how, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the server and close its port. Idempotent."""
        self.find_overdue = self.supervisor = None
        thread, self._thread = self._thread, None
        if thread is not None:
            os.eventfd_write(self._stop_fd, 1)
            # The thread may hang in the callback. It then runs until the process exits.
            thread.join(1.0)
            if not thread.is_alive():
                os.close(self._stop_fd)
        server, self._server = self._server, None
        if server is not None:
            if self._port is not None:
                self._port = server.port
            if server.viewers:
                _tell_page(server)
            server.close()

    def answer(self) -> None:
        """Answer a pending request with the result of the callback. Torch has no such method."""
        server, find_overdue = self._server, self.find_overdue
        if server is None:
            return
        # Consume the request first, so that a failing callback is not called again for it.
        with suppress(BlockingIOError):
            # Another thread may have handled the request already.
            os.eventfd_read(server.fd)
        age, doing = max(0.0, time.time() - self._alive_callback()), None
        if find_overdue is not None:
            overdue, place = find_overdue()
            if overdue > 0:
                age, doing = max(age, overdue), place
        if server.wants_page():
            _tell_page(server)
        server.answer(age, self.supervisor, doing)

    def _answer_all(self, server: _core.HealthServer, stop_fd: int) -> None:
        import select

        poll = select.poll()
        poll.register(server.fd, select.POLLIN)
        poll.register(stop_fd, select.POLLIN)
        while stop_fd not in {fd for fd, _ in poll.poll()}:
            try:
                self.answer()
            except Exception:  # noqa: PERF203 -- a failed answer must not stop the thread
                import logging

                logging.getLogger("elasticrs.agent").exception("the alive_callback failed")


def _tell_page(server: _core.HealthServer) -> None:
    """Give the server the texts that its page for browsers shows about the job now."""
    import json

    from elasticrs._engine.supervise.observe.status_text import page

    server.tell_page(json.dumps(page(json.loads(server.status()))))


class _AliveCallbackProxy:
    """Callback for a server that is created before the agent, with torch's name. Until
    :func:`elasticrs.launcher.launch_agent` sets the agent's callback, it reports recent progress.
    """

    def __init__(self) -> None:
        self._delegate: Callable[[], float] | None = None

    def __call__(self) -> float:
        return time.time() if self._delegate is None else self._delegate()

    def set_delegate(self, delegate: Callable[[], float]) -> None:
        self._delegate = delegate


def create_healthcheck_server(
    alive_callback: Callable[[], float], port: int, timeout: float
) -> HealthCheckServer:
    """Create a health check server without starting it; see :class:`HealthCheckServer`."""
    return HealthCheckServer(alive_callback, port, timeout)


def server_of_environment(
    environ: Mapping[str, str], alive_callback: Callable[[], float] = time.time
) -> HealthCheckServer | None:
    """Create the server that ``TORCHELASTIC_HEALTH_CHECK_PORT`` configures; ``None`` if it is not set. Raise
    ``ValueError`` if it is not a port number. Torch logs a message and continues without a server.
    """
    text = environ.get(PORT_VARIABLE)
    if text is None:
        return None
    try:
        port = config.health_port(text)
    except ValueError as error:
        raise ValueError(f"{PORT_VARIABLE}: got {text!r}, expected {error}") from None
    return HealthCheckServer(alive_callback, port, config.DEFAULT_HEALTH_TIMEOUT, environ.get(HOST_VARIABLE))
