"""Observer that reports the training step to Kubeflow Trainer, which shows it in the TrainJob's status.

A separate thread sends the reports, so a slow or broken server never delays the agent. Each report replaces
all progress that the TrainJob showed before, including progress that the script itself reported. Therefore,
the reports are disabled by default.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING

from elasticrs.agent.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from elasticrs import _core
    from elasticrs.agent.attempt import Attempt, JobResult

INTERVAL = 30.0
"""Seconds between two reports. All jobs in a cluster share the server's rate limit."""

TIMEOUT = 10.0
"""Timeout in seconds for each blocking operation of a request."""

END_TIMEOUT = 2.0
"""Maximum number of seconds to wait for the last report at the end of the job."""

_MAX_ANSWER = 65536
"""Number of bytes of the server's answer that are read."""

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Names of the environment variables that contain the server's address, the path of the server's CA
certificate, and the path of the pod's token.
"""


class ProgressReporter(Observer):
    """Reports progress to Kubeflow: the lowest step of all workers on rank 0's node, and the restart count.

    Args:
        environ: environment variables, including :data:`URL`, :data:`CA_CERT` and :data:`TOKEN`.
        say: prints a line for the user.
    """

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._environ, self._say = environ, say
        self._supervisor: _core.Supervisor | None = None
        self._attempt: Attempt | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: Mapping[str, int] | None = None
        self._problem = ""
        self._fd = -1

    def opened(self, supervisor: _core.Supervisor) -> None:
        """Start the thread that reports the progress."""
        self._supervisor = supervisor
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        supervisor.watch_fd(self._fd)
        self._thread = thread = threading.Thread(target=self._work, name="elasticrs-progress", daemon=True)
        # Block all signals in the new thread, so that the main thread receives them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def fd_ready(self, fd: int) -> bool:
        """Print the error that the background thread has reported through ``fd``. Return false if ``fd`` is a
        descriptor of another observer.
        """
        if fd != self._fd:
            return False
        os.eventfd_read(fd)
        self._say(f"the progress could not be reported to Kubeflow: {self._problem}; the job continues")
        return True

    def prepared(self, attempt: Attempt) -> None:
        """From now on, report the progress of this attempt."""
        self._attempt = attempt

    def ended(self, result: JobResult, error: BaseException | None) -> None:  # noqa: ARG002 -- the base class's signature
        """Stop the thread. Wait for up to :data:`END_TIMEOUT` seconds until it has sent the last step."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT)

    def over(self, attempt: Attempt, outcome: str) -> None:  # noqa: ARG002 -- the base class's signature
        """Save the last step of the attempt, because the supervisor discards it when the attempt is over."""
        self._last = self._progress()

    def _work(self) -> None:
        told: Mapping[str, int] | None = None
        has_failed = False
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(INTERVAL)
            found = self._last if is_over else self._progress()
            if found is None or found == told:
                continue
            try:
                send(found, self._environ)
            except (OSError, ValueError) as error:
                # Print only the first of several failures in a row, because every report fails while the
                # server is down.
                if not has_failed:
                    self._problem = str(error)
                    os.eventfd_write(self._fd, 1)
                has_failed = True
            else:
                told, has_failed = found, False
        os.close(self._fd)

    def _progress(self) -> Mapping[str, int] | None:
        attempt, supervisor = self._attempt, self._supervisor
        if attempt is None or supervisor is None:
            return None
        return metrics_of(attempt, supervisor.heartbeats())


def metrics_of(attempt: Attempt, beats: Iterable[_core.Heartbeat]) -> Mapping[str, int] | None:
    """Return the metrics to report; ``None`` if another node reports them, or if no step is known yet.

    Args:
        attempt: current attempt.
        beats: last heartbeat of each worker on this node.
    """
    if 0 not in attempt.shown_ranks().values():
        return None
    steps = [beat.step for beat in beats if beat.step is not None]
    return {"step": min(steps), "restarts": attempt.restarts} if steps else None


def send(metrics: Mapping[str, int], environ: Mapping[str, str]) -> None:
    """Send metrics to the server.

    Args:
        metrics: values by name.
        environ: environment variables, including :data:`URL`, :data:`CA_CERT` and :data:`TOKEN`.

    Raises:
        OSError: the server cannot be reached, refuses the report or does not speak HTTP, or a file cannot be
            read.
        ValueError: the address is not a URL, or the variable with the file of the token is missing.
    """
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    body = json.dumps({"trainerStatus": {"metrics": listed, "lastUpdatedTime": now}}).encode()
    # Read the token for every report, because Kubernetes replaces it before it expires.
    if not environ.get(TOKEN):
        raise ValueError(f"{TOKEN} is not set")
    with open(environ[TOKEN], encoding="ascii") as file:
        token = file.read().strip()
    request = urllib.request.Request(
        environ[URL],
        data=body,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method="POST",
    )
    context = ssl.create_default_context(cafile=environ.get(CA_CERT))
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as answer:
            answer.read(_MAX_ANSWER)
    except HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
