"""Requests to the health check server."""

import http.client
import json
from typing import Any

from helpers.launcher import Launched
from helpers.procs import HANG, wait_until


def get(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, str]:
    """Send a request, and return the status, the content type and the content. ``host`` replaces the Host
    header.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


def get_json(port: int, path: str) -> tuple[int, dict[str, Any]]:
    status, kind, text = get(port, path)
    assert kind == "application/json"
    content: dict[str, Any] = json.loads(text)
    return status, content


def wait_until_answers(port: int, path: str) -> None:
    """Wait until the status is 200: the agent is notified of a change only after it has happened."""
    wait_until(lambda: get(port, path)[0], (200).__eq__)


def port_of(launched: Launched) -> int:
    """Return the port of the health check server, as the launcher prints it."""
    return int(launched.wait_for_line(r"health check server on http://127\.0\.0\.1:(\d+)$", "stderr")[1])
