"""Calls: requests of one agent to the agents of the other nodes, through the rendezvous store of the job.
Exchanges: each agent of a round tells all others one value.

An order of ``elasticctl`` for the whole job arrives at one agent. This agent puts a key with the request
into the store. The agents of a round (an attempt of all nodes) watch the keys of all calls, and each puts its
answer under a key of its own, which the calling agent watches.

- **CALL-1** The function that takes the answers is called exactly once for each call: when all nodes have
  answered, after the time limit of the call, or when the connection to the store is lost.
- **CALL-2** While no agent makes a call, calls cause no messages to the store.
- **CALL-3** The keys of a call are deleted when it is over. They have leases, so the store deletes them
  itself if an agent dies.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from elasticrs._engine.job.value import Record, Value, fresh
from elasticrs._engine.nodes.protocol.records import COUNT, DamagedError, decode, encode, number_of
from elasticrs._engine.nodes.transport.coordination import (
    Delete,
    DeletePrefix,
    Exists,
    Get,
    ModifiedAt,
    Put,
    Txn,
    Unwatch,
    Watch,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any, TypeAlias

    from elasticrs._engine.nodes.protocol.records import Keys
    from elasticrs._engine.nodes.transport.coordination import Entry, Reply, Request

    Answer: TypeAlias = Callable[[dict[str, Any]], None]
    Serve: TypeAlias = Callable[[dict[str, Any], Answer], None]
    """Function that carries out the request of another agent, and answers it once, on any thread."""
    Take: TypeAlias = Callable[[dict[int, dict[str, Any]]], None]
    """Function that gets the answers to a request, by the group ranks of the nodes that have answered."""

MAX_ANSWER = 512 << 10
"""Maximum size in bytes of the answer to a request. The store accepts values of up to 1 MiB."""

MAX_CALL = 8 << 10

_MAX_SERVED = 64
"""Number of other agents' latest requests that an agent remembers, to carry out none of them twice."""


class RoundPlace(Value):
    """Place of this node in a round, an attempt of all nodes to run the job: the number of the round, the
    group rank of the node, and the number of nodes.
    """

    round: int
    group_rank: int
    size: int


class _Call(Record):
    take: Take
    awaited: set[int]
    answers: dict[int, dict[str, Any]] = fresh(factory=dict)


class Exchange:
    """Exchange of a value between all agents of a round (an attempt of all nodes), over the connection to the
    store that the agent has open. So it works while workers use the store's port. Never blocks.

    Each exchange of a name has a number, which is a part of its keys. The agent that ends the exchange first
    sets the key ``last``, whose revision is the number of the next exchange. So no agent takes an old value
    for a new one. An agent that ends an exchange without the values of all agents withdraws its own value,
    because others may still wait for it. The keys have leases, so the store deletes them when the agents
    leave.

    Args:
        send: function that sends an operation to the store.
        prefix: prefix of all keys of the exchanges of this name in the round.
        place: place of this node in the round.
        own: value of this agent; empty if it has none.
        tag: number of the store's replies to the operations of this exchange. No other reply has it.

    Attributes:
        prefix: as in the arguments.
        values: values of all nodes, by group rank; ``None`` until they are known. The value of an agent that
            has withdrawn is empty.
        is_lost: true if the connection to the store was lost before all values were known.
        is_over: true if this agent has ended the exchange, and needs no reply of the store for that.
    """

    def __init__(
        self, send: Callable[[Request], None], prefix: str, place: RoundPlace, own: bytes, tag: int
    ) -> None:
        self._send, self._own, self._tag = send, own, tag
        self._rank, self._size = place.group_rank, place.size
        self._number: int | None = None
        self._has_ended = False
        self._found: dict[str, bytes] = {}
        self.prefix = prefix
        self.values: list[bytes] | None = None
        self.is_lost = self.is_over = False
        send(Txn(tag, [], [Get(f"{prefix}last")]))

    @property
    def _folder(self) -> str:
        return f"{self.prefix}{self._number}/"

    def take_reply(self, reply: Reply) -> None:
        """Handle a reply of the store: to the request for the number, or to the watch of the values."""
        if self._number is not None:
            self.take(reply.entries())
            return
        last = reply.entry(0)
        self._number = 0 if last is None else last.mod_revision
        if last is not None and last.value is not None:
            earlier = last.value.decode(errors="replace")
            self._send(Txn(0, [], [Delete(f"{self.prefix}{earlier}/{self._rank}")]))
        self._put(b"" if self._has_ended else self._own)
        if self._has_ended:
            self._finish()
        else:
            self._send(Watch(self._tag, self._folder, False))

    def take(self, changes: Sequence[Entry]) -> None:
        """Handle changes in the store. Ignore those that do not belong to this exchange."""
        if self._has_ended or self._number is None:
            return
        self._found |= {
            each.key: each.value
            for each in changes
            if each.value is not None and each.key.startswith(self._folder)
        }
        keys = [f"{self._folder}{rank}" for rank in range(self._size)]
        if all(key in self._found for key in keys):
            self.values = [self._found[key] for key in keys]
            self.end()

    def end(self) -> None:
        """End the exchange for this agent. Withdraw its value if those of all agents are not known."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._number is not None:
            self._send(Unwatch(self._folder, False))
            if self.values is None:
                self._put(b"")
            self._finish()

    def lose(self) -> None:
        """End the exchange, because there is no connection to the store."""
        self.is_lost, self._has_ended, self.is_over = self.values is None, True, True

    def _put(self, value: bytes) -> None:
        self._send(Txn(0, [], [Put(f"{self._folder}{self._rank}", value, True)]))

    def _finish(self) -> None:
        """Give the next exchange of this name another number, unless another agent has done so."""
        last, number = f"{self.prefix}last", self._number or 0
        self._send(Txn(0, [ModifiedAt(last, number)], [Put(last, str(number).encode(), True)]))
        self.is_over = True


class Calls:
    """Sends requests to the agents of other nodes (calls), and passes their requests to :attr:`serve`.

    Args:
        send: function that sends an operation to the store. It may be called from any thread, and does
            nothing if there is no connection.
        keys: names of the job's keys in the store.
        agent: name of this agent.
        node: name of this node.
        place: function that returns the place of this node in the last round that it has taken part in.
        arm: function that starts a timer, after which :meth:`expire` is called with the timer's name.
    """

    def __init__(
        self,
        send: Callable[[Request], None],
        keys: Keys,
        agent: str,
        node: str,
        place: Callable[[], RoundPlace | None],
        arm: Callable[[str, float], None],
    ) -> None:
        self._send, self._keys, self._agent, self._node = send, keys, agent, node
        self.place, self._arm = place, arm
        self.serve: Serve | None = None
        self._is_listening = False
        self._served: deque[str] = deque(maxlen=_MAX_SERVED)
        self._count = 0
        self._open: dict[str, _Call] = {}
        self._troubles: list[str] = []

    def listen(self, tag: int) -> None:
        """Begin to watch the requests of other agents, until the connection to the store ends. Idempotent.
        The store's reply, which has this ``tag``, contains the requests that are open at that moment.
        """
        if not self._is_listening:
            self._is_listening = True
            # Other replies of the store are not needed. Give them tag 0, which the rendezvous ignores.
            self._send(Watch(tag, self._keys.calls, False))

    def lost(self) -> None:
        """End all requests that wait for answers, because the connection to the store is lost."""
        self._is_listening = False
        for name in list(self._open):
            self._end(self._open.pop(name))

    def others(self) -> list[int]:
        """Return the group ranks of the other nodes of the running round."""
        place = self.place()
        return [] if place is None else [rank for rank in range(place.size) if rank != place.group_rank]

    def ask(self, order: Mapping[str, Any], ranks: Collection[int], limit: float, take: Take) -> None:
        """Send a request to the agents of some nodes, and return without waiting for their answers.

        Args:
            order: the request, which may have at most :data:`MAX_CALL` bytes as JSON.
            ranks: group ranks of the nodes.
            limit: maximum seconds to wait for the answers.
            take: function that is called with the answers.
        """
        self._count += 1
        name = f"{self._agent}/{self._count}"
        call = self._open[name] = _Call(take, set(ranks))
        place = self.place()
        if place is None or not call.awaited:
            self._finish(name)
            return
        document = {"round": place.round, "to": sorted(call.awaited), "node": self._node, "order": order}
        self._send(Watch(0, self._keys.answers + f"{name}/", False, False))
        self._send(Txn(0, [], [Put(self._keys.calls + name, encode(document), True)]))
        self._arm(self._keys.calls + name, limit)

    def expire(self, timer: str) -> bool:
        """End the request to which an expired timer belongs. Return false if the timer is of another kind."""
        name = timer.removeprefix(self._keys.calls)
        if name == timer:
            return False
        if name in self._open:
            self._finish(name)
        return True

    def _finish(self, name: str) -> None:
        call = self._open.pop(name)
        answers = self._keys.answers + f"{name}/"
        self._send(Unwatch(answers, False))
        self._send(Txn(0, [], [Delete(self._keys.calls + name), DeletePrefix(answers)]))
        self._end(call)

    def _end(self, call: _Call) -> None:
        try:
            call.take(call.answers)
        # An error in the function that takes the answers must end neither the agent nor its other requests.
        except Exception as error:
            self._troubles.append(f"elasticctl: the answers of other agents were not handled: {error!r}")

    def take_troubles(self) -> list[str]:
        """Return, once, a line for the user about each error of a function that takes answers."""
        told, self._troubles = self._troubles, []
        return told

    def take(self, changes: Sequence[Entry]) -> list[Entry]:
        """Handle changes in the store that are requests or answers to this agent. Return all others."""
        rest = []
        for change in changes:
            if change.key.startswith(self._keys.calls):
                self._called(change.key.removeprefix(self._keys.calls), change.value)
            elif change.key.startswith(self._keys.answers):
                self._answered(change.key.removeprefix(self._keys.answers), change.value)
            else:
                rest.append(change)
        return rest

    def _called(self, name: str, value: bytes | None) -> None:
        place = self.place()
        is_own = name.startswith(f"{self._agent}/")
        if value is None or is_own or place is None or len(value) > MAX_CALL or name in self._served:
            return
        self._served.append(name)
        try:
            call = decode(value)
            number, ranks, node, order = (call[each] for each in ("round", "to", "node", "order"))
        except (DamagedError, TypeError, LookupError):
            return  # Some other program has written this key, so ignore it.
        if not (
            COUNT(number) and isinstance(ranks, list) and isinstance(node, str) and isinstance(order, dict)
        ):
            return
        if number != place.round or place.group_rank not in ranks:
            return
        answer = partial(self._answer, name, place.group_rank)
        if self.serve is None:
            answer({"code": None, "message": f"another program runs the agent on node {self._node}"})
        else:
            self.serve({**order, "sender": node}, answer)

    def _answer(self, name: str, group_rank: int, fields: dict[str, Any]) -> None:
        value = encode(fields)
        if len(value) > MAX_ANSWER:
            value = encode({"code": None, "message": f"the answer of node {self._node} is too large"})
        # If the request is over, its key is gone. Then put no answer, because nobody would delete it.
        put = Put(f"{self._keys.answers}{name}/{group_rank}", value, True)
        self._send(Txn(0, [Exists(self._keys.calls + name)], [put]))

    def _answered(self, key: str, value: bytes | None) -> None:
        name, _, last = key.rpartition("/")
        call, rank = self._open.get(name), number_of(last)
        if call is None or value is None or rank not in call.awaited:
            return
        try:
            fields = decode(value)
        except DamagedError:
            return
        if isinstance(fields, dict):
            call.answers[rank] = fields
            call.awaited.discard(rank)
            if not call.awaited:
                self._finish(name)
