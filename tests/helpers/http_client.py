"""Asking the health check server."""

import http.client
import json
from typing import Any

from helpers.launcher import Launched
from helpers.procs import HANG


def get(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, str]:
    """Status, content type and content; ``host`` is what is asked for, where it is another name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


def get_json(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """Status and content."""
    status, kind, text = get(port, path)
    assert kind == "application/json"
    content: dict[str, Any] = json.loads(text)
    return status, content


def port_of(launched: Launched) -> int:
    """Where its server listens, as it says."""
    return int(launched.wait_for_line(r"health check server on http://127\.0\.0\.1:(\d+)$", "stderr")[1])
