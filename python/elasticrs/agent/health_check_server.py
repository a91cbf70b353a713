"""The health check server, with torch's names; torch's own never opens a port.

``GET /healthz`` says whether the agent's loop is alive, ``/readyz`` whether the workers run, ``/metrics`` is
for Prometheus and ``/status`` for people; see ``docs/metrics.md``. The sockets are served by a thread of the
core, which asks the agent's loop by a descriptor and so holds up nobody.
"""

from __future__ import annotations

import os
import time

from elasticrs import _core, config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from threading import Thread
    from typing import Any

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
HOST_VARIABLE = "ELASTICRS_HEALTH_CHECK_HOST"


class HealthCheckServer:
    """Tells others whether this process makes progress.

    An agent of ours that gets one calls ``alive_callback`` in its own loop, when somebody asks: a loop that
    hangs does not answer. With :meth:`start`, in a program without such an agent, a thread calls it.

    Args:
        alive_callback: when there was progress last, in seconds since 1970. Progress that is ``timeout`` ago
            is death, and so is a callback that does not return for so long.
        port: to listen on; 0 for any that is free.
        timeout: seconds.
        host: to listen on. Not in torch: ``ELASTICRS_HEALTH_CHECK_HOST`` or the loopback address when
            ``None``.

    Attributes:
        find_overdue: asked as well as the callback, until :meth:`stop`: for how many seconds an agent should
            have been heard of, and of what. Not in torch.
        supervisor: of the workers; its thread has to be alive as well, until :meth:`stop`. Not in torch.
    """

    def __init__(
        self, alive_callback: Callable[[], float], port: int, timeout: float, host: str | None = None
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
        """As it was given."""
        return self._alive_callback

    @property
    def port(self) -> int:
        """Where it listens, once it does."""
        return self._port if self._server is None else self._server.port

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def open(self) -> _core.HealthServer:
        """Listen, and leave it to the caller to answer. Not in torch. Idempotent.

        Raises:
            OSError: the address cannot be had.
        """
        if self._server is None:
            self._server = _core.HealthServer(self._host, self._port, float(self._timeout))
        return self._server

    def start(self) -> None:
        """Listen and answer, until :meth:`stop`. Idempotent.

        Raises:
            OSError: the address cannot be had.
        """
        server = self.open()
        if self._thread is None:
            import threading

            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
            how: Any = {"target": self._answer_all, "args": (server, self._stop_fd), "name": "health"}
            self._thread = threading.Thread(**how, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it; returns when the port is closed. Idempotent."""
        self.find_overdue = self.supervisor = None
        thread, self._thread = self._thread, None
        if thread is not None:
            os.eventfd_write(self._stop_fd, 1)
            # One that hangs in the callback goes with the process.
            thread.join(1.0)
            if not thread.is_alive():
                os.close(self._stop_fd)
        server, self._server = self._server, None
        if server is not None:
            self._port = server.port
            server.close()

    def answer(self, supervisor: _core.Supervisor | None = None) -> None:
        """Somebody has asked: call the callback, and pass on what it says. Not in torch.

        The thread of ``supervisor`` has to be alive as well.
        """
        server, find_overdue = self._server, self.find_overdue
        if server is None:
            return
        # First, so that a callback which fails is not called again for the same question.
        _take(server.fd)
        age, doing = max(0.0, time.time() - self._alive_callback()), None
        if find_overdue is not None:
            overdue, place = find_overdue()
            if overdue > 0:
                age, doing = max(age, overdue), place
        server.answer(age, supervisor or self.supervisor, doing)

    def _answer_all(self, server: _core.HealthServer, stop_fd: int) -> None:
        import select

        poll = select.poll()
        poll.register(server.fd, select.POLLIN)
        poll.register(stop_fd, select.POLLIN)
        while stop_fd not in {fd for fd, _ in poll.poll()}:
            try:
                self.answer()
            except Exception:  # noqa: PERF203 -- each is asked for
                import logging

                logging.getLogger("elasticrs.agent").exception("the alive_callback failed")


class _AliveCallbackProxy:
    """A callback for a server that is made before the agent: until there is one, there is progress.

    Torch's name. :func:`elasticrs.launcher.launch_agent` has it ask the agent.
    """

    def __init__(self) -> None:
        self._delegate: Callable[[], float] | None = None

    def __call__(self) -> float:
        return time.time() if self._delegate is None else self._delegate()

    def set_delegate(self, delegate: Callable[[], float]) -> None:
        """Ask this one from now on."""
        self._delegate = delegate


def _take(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        # Somebody else has answered meanwhile.
        return


def create_healthcheck_server(
    alive_callback: Callable[[], float], port: int, timeout: float
) -> HealthCheckServer:
    """A server that is not started yet; see :class:`HealthCheckServer`."""
    return HealthCheckServer(alive_callback, port, timeout)


def server_of_environment(
    environ: Mapping[str, str], alive_callback: Callable[[], float] = time.time
) -> HealthCheckServer | None:
    """Make the server that ``TORCHELASTIC_HEALTH_CHECK_PORT`` asks for.

    Raises:
        ValueError: it holds no port; torch says so in its log, and goes on without a server.
    """
    text = environ.get(PORT_VARIABLE)
    if text is None:
        return None
    try:
        port = config.health_port(text)
    except ValueError as error:
        raise ValueError(f"{PORT_VARIABLE}: got {text!r}, expected {error}") from None
    return HealthCheckServer(alive_callback, port, config.DEFAULT_HEALTH_TIMEOUT, environ.get(HOST_VARIABLE))
