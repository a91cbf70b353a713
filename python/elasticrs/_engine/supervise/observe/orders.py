"""Orders that ``elasticctl`` sends to the agent over the control socket: reads them, and writes the answers.

An order is a JSON object, such as ``{"do": "stop", "now": true}``. The answer is lines of JSON objects. The
last one has the exit code of ``elasticctl`` (``code``), and a text for the user (``message``).
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from elasticrs._engine.job.phrases import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol, TypeAlias

    from elasticrs import _core

    class Agent(Protocol):
        """The agent, which carries out the orders. Its methods do not block."""

        def stop_on_order(self, *, is_now: bool) -> str:
            """Stop the job. Return what follows. Raise :class:`Refused` if that is not possible."""

        def restart_on_order(self) -> str:
            """Restart all workers of the job, and otherwise as :meth:`stop_on_order`."""

        def drain_on_order(self, node: str) -> str:
            """Have this node leave the job, and otherwise as :meth:`stop_on_order`."""

        def stacks_on_order(self, answer: Answer) -> None:
            """Find out where the ranks are. ``answer`` is called later, by another thread."""

    Answer: TypeAlias = Callable[[dict[str, Any]], None]
    """Sends a line of an answer to ``elasticctl``. The line with ``code`` is the last one."""


DONE, FAILED, USAGE, NOT_AGREED, NO_JOB, REFUSED = range(6)
"""Exit codes of ``elasticctl``, which the documentation lists."""


class Refused(Exception):  # noqa: N818 -- it is an answer
    """Raised if the agent cannot carry out an order now. The text tells the user why, and what to do."""


class Orders:
    """Carries out the orders to ``agent``. ``say`` prints a line on its console."""

    def __init__(self, agent: Agent, say: Callable[[str], None]) -> None:
        self._agent, self._say = agent, say

    def take(self, server: _core.HealthServer) -> None:
        """Carry out the orders that have arrived at the server."""
        for number, uid, pid, text in server.take_orders():
            who = f"user {uid}" if pid is None else f"user {uid}, pid {pid}"
            self._carry_out(text, who, partial(_reply, server, number))

    def _carry_out(self, text: str, who: str, answer: Answer) -> None:
        try:
            order = json.loads(text)
            what = order["do"]
        except (ValueError, TypeError, LookupError, RecursionError):
            answer({"code": USAGE, "message": "the order is no JSON object with a field 'do'"})
            return
        try:
            if what == "stacks":
                # Changes nothing, so it is not worth a line on the console.
                self._agent.stacks_on_order(answer)
            else:
                answer(self._acted(order, what, who))
        except Refused as reason:
            self._say(f"elasticctl ({who}): refused, because {reason}")
            answer({"code": REFUSED, "message": str(reason)})

    def _acted(self, order: dict[str, Any], what: object, who: str) -> dict[str, Any]:
        is_now, node = order.get("now") is True, str(order.get("node"))
        carry_out: dict[str, Callable[[], str]] = {
            "stop": partial(self._agent.stop_on_order, is_now=is_now),
            "restart": self._agent.restart_on_order,
            "drain": partial(self._agent.drain_on_order, node),
        }
        if type(what) is not str or what not in carry_out:
            said = f"this agent does not know the order {printable(str(what)[:40])!r}; it may be older"
            return {"code": USAGE, "message": f"{said} than elasticctl"}
        words = what, *(("--now",) if is_now else ()), *((printable(node),) if what == "drain" else ())
        self._say(f"elasticctl ({who}): {' '.join(words)}")
        return {"code": DONE, "message": carry_out[what]()}


def _reply(server: _core.HealthServer, number: int, fields: dict[str, Any]) -> None:
    server.reply(number, json.dumps(fields), is_last="code" in fields)
