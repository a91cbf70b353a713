"""Query GPUd, a daemon that monitors a node's GPUs, for the health of the node's components."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from elasticrs.host.health_program import NoAnswerError, say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

URL = "https://127.0.0.1:15132"
"""Default address of GPUd."""
PORT = 15132
MAX_ANSWER = 16 << 20
"""Maximum size of a response in bytes."""
_HARMLESS = {"IGNORE_NO_ACTION_REQUIRED", "CHECK_USER_APP_AND_GPU"}
"""Suggested repair actions that do not indicate a broken node."""


def main(url: str = URL) -> int:
    """Print the components that GPUd reports as unhealthy. Return 1 if one of them makes the node unfit;
    otherwise return 0.

    Ignore degraded states, because GPUd uses them for problems that do not affect jobs.

    Raises:
        NoAnswerError: GPUd cannot be reached, or its response is not a list of component states.
    """
    reasons = []
    for component, state in _states(_get(url)):
        if state.get("health") != "Unhealthy":
            continue
        actions = _actions(state)
        why = f"{component}: {state.get('reason') or state.get('error') or 'unhealthy'}"
        why += f" (suggested: {', '.join(actions)})" if actions else ""
        if actions and _HARMLESS.issuperset(actions):
            say(why)
        else:
            reasons.append(why)
    say("; ".join(reasons) or "no component makes this node unfit")
    return 1 if reasons else 0


def _get(url: str) -> bytes:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORT
    connection = HTTPConnection(host, port)
    if parts.scheme == "https":
        connection = HTTPSConnection(host, port, context=_context(host))
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/v1/states")
        response = connection.getresponse()
        body = response.read(MAX_ANSWER + 1)
    except (OSError, HTTPException) as error:
        raise NoAnswerError(f"{url} does not answer: {error or type(error).__name__}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise NoAnswerError(f"{url} answers with status {response.status}")
    if len(body) > MAX_ANSWER:
        raise NoAnswerError(f"{url} answers with more than {MAX_ANSWER >> 20} MiB")
    return body


def _context(host: str) -> Any:
    import ssl

    context = ssl.create_default_context()
    if host in ("localhost", "::1") or host.startswith("127."):
        # Do not verify GPUd's certificate, because it is self-signed. Skipping the check is safe here: the
        # host is a loopback address, so the peer runs on this node.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _states(body: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each state, together with the name of its component."""
    try:
        components = json.loads(body)
    except (ValueError, RecursionError):
        raise NoAnswerError("the answer is not JSON") from None
    if not isinstance(components, list) or not components:
        raise NoAnswerError("the answer is not a list of components")
    for each in components:
        states = each.get("states") if isinstance(each, dict) else None
        if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
            raise NoAnswerError("the answer has a component without states")
        yield from ((str(each.get("component", "?")), state) for state in states)


def _actions(state: dict[str, Any]) -> list[str]:
    suggested = state.get("suggested_actions")
    actions = suggested.get("repair_actions") if isinstance(suggested, dict) else None
    return [str(action) for action in actions] if isinstance(actions, list) else []
