"""Agent's side of the agreed step: has all workers of the job get a signal at the start of the same step.

A signal that reaches the ranks in different steps makes them save different states, or hang in a barrier of
their handlers. So the agent holds a signal back, and asks the workers through their files in memory
(:class:`.layout.Agreed`) to wait at the end of their steps. It chooses the step after the newest that one of
them has ended, lets them go on to it, and sends the signal as ever when all of them stand at the start of the
next step. :mod:`elasticrs._engine.inside.boundary` is the workers' side.

- **AGREE-1** A signal is sent exactly once, at the latest when the hold is over, however the workers behave.
- **AGREE-2** A failure, a second stop request and the end of the attempt end the hold at once.
- **AGREE-3** While nothing is asked, there is no wake-up.
"""

from __future__ import annotations

import time
from functools import partial

from elasticrs._engine.inside.keep.layout import Agreed, AgreedState
from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value
from elasticrs._engine.process.background_call import BackgroundCall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from elasticrs._engine.nodes.transport.store import Store
    from elasticrs._engine.workers.keep_files import KeepFiles

    Tell: TypeAlias = Callable[["Delivery"], object]
    Exchange: TypeAlias = Callable[["Progress | None"], "list[Progress | None]"]

LONGEST_HOLD = 10.0
"""Maximum seconds for which a stop is held back. A third of ``--shutdown-timeout`` if that is less."""

KEYBOARD_HOLD = 2.0
"""Maximum seconds for which a signal from the keyboard is held back, because its sender waits."""

SAVE_HOLD = 60.0
"""Maximum seconds for which a signal that does not stop the job is held back."""

_SETTLE = 0.001
"""Seconds between the question and the look at the workers' steps. A step that a worker had ended without
seeing the question is visible by then: a processor keeps a store to itself for less than a microsecond.
"""

_TICK, _LATER_TICK, _SOON = 0.001, 0.01, 0.5
"""Seconds between two looks, in the first half second and later."""

_EXCHANGE_LIMIT = 2.0
"""Seconds for which an agent waits for what the agents of the other nodes say."""

_SLACK = 0.5
"""Seconds that an exchange may take beyond its limit, for example to connect to the store."""

_RESET = 5.0
"""Seconds after a signal was sent after which the workers' files say that nothing is asked."""

_STALL = 5.0
"""Maximum seconds for which a rank that stands at the start of a step waits for the others."""

_SANE_STEPS = 1 << 62


class Delivery(Value):
    """How a signal was sent to the workers.

    Args:
        step: number of optimizer steps that each rank has ended in this attempt; ``None`` without agreement.
        why: why the ranks have not agreed on a step; empty if they have, or need not.
        waited: seconds for which the signal was held back.
    """

    signum: int
    step: int | None = None
    why: str = ""
    waited: float = 0.0


class Standing(Value):
    """What a worker has written about its steps.

    Args:
        is_training: true if the worker has imported torch's optimizers.
        steps: number of steps that it has ended.
        at: time at which a step ended: the last one, unless steps are short. In seconds of the monotonic
            clock.
        duration: seconds that a step takes; 0 if unknown.
        ready: number of the request for whose signal the worker waits at the start of a step.
        missed: number of the request that the worker could not follow.
    """

    is_training: bool = False
    steps: int = 0
    at: float = 0.0
    duration: float = 0.0
    ready: int = 0
    missed: int = 0

    @classmethod
    def of(cls, words: tuple[int, ...]) -> Standing:
        owner, steps, at, duration, ready, missed = words
        return cls(owner != 0, steps if steps < _SANE_STEPS else 0, at / 1e9, duration / 1e9, ready, missed)


class Progress(Value):
    """Numbers of steps that the slowest and the fastest rank have ended."""

    least: int
    most: int


class Send(Value):
    """Send the signal now. ``why``: reason why the ranks are not at the agreed step."""

    why: str = ""


def progress(seen: Mapping[int, Standing], until: float) -> Progress | Send:
    """Return what the ranks of this node, by local rank, have done. Call this when all of them either wait at
    the end of a step, or will see the question when they end one. ``until``: time at which the hold is over.
    """
    if not seen:
        return Send()
    if idle := [rank for rank, each in seen.items() if not each.steps]:
        return Send(f"{phrases.local_ranks_text(idle)} made no optimizer step yet")
    longest = max(seen.values(), key=lambda each: each.duration)
    if longest.at + longest.duration > until:
        return Send(f"a step takes {longest.duration:.3g} s")
    steps = [each.steps for each in seen.values()]
    return Progress(min(steps), max(steps))


def common_step(nodes: Sequence[Progress | None]) -> int | Send:
    """Choose the number of steps after which all ranks get the signal. ``nodes``: what the ranks of each node
    have done; ``None`` for a node whose ranks cannot wait for a step.
    """
    spans = [each for each in nodes if each is not None]
    if len(spans) < len(nodes):
        return Send("the ranks of another node cannot wait for a step")
    least, most = min(each.least for each in spans), max(each.most for each in spans)
    if most - least > 1:
        return Send(f"the ranks are not in step: they have made {least} to {most} steps")
    return most + 1


def exchange(
    open_store: Callable[[], Store], rank: int, size: int, name: str, own: Progress | None
) -> list[Progress | None]:
    """Tell the other nodes of this round what the ranks of this node have done. Return what all nodes say.
    Blocks for at most some seconds.

    Each request has a generation. If a node does not answer in time, the others withdraw what they have said,
    and the next request begins a new generation, so that nobody takes an old answer for a new one.

    Args:
        open_store: opens the round's store; its keys belong to this round alone.
        rank: rank of this node in the round.
        size: number of nodes in the round.
        name: what the nodes are asked for.
        own: what the ranks of this node have done; ``None`` if they cannot wait for a step.

    Raises:
        DistError: another node has not answered in time, or the store is lost.
    """
    from datetime import timedelta

    store = open_store()
    try:
        store.set_timeout(timedelta(seconds=_EXCHANGE_LIMIT))
        counter = f"{name}/generation"
        before = store.get(counter) if store.check([counter]) else b""
        generation = int(before or 0)
        keys = [f"{name}/{generation}/{each}" for each in range(size)]
        store.set(keys[rank], "off" if own is None else f"{own.least} {own.most}")
        try:
            answers = store.multi_get(keys)
        except Exception:
            store.set(keys[rank], "off")
            raise
        finally:
            store.compare_set(counter, before, str(generation + 1))
    finally:
        store.close()
    return [None if answer == b"off" else Progress(*map(int, answer.split())) for answer in answers]


def look(seen: Mapping[int, Standing], number: int, *, is_over: bool) -> Send | None:
    """Return whether to send the signal of request ``number`` now that the step is chosen. ``seen`` has the
    workers that still run, by local rank. ``is_over``: the ranks have waited for long enough.
    """
    if late := [rank for rank, each in seen.items() if each.missed == number]:
        return Send(f"{phrases.local_ranks_text(late)} had passed the agreed step")
    awaited = [rank for rank, each in seen.items() if each.ready != number]
    if not awaited:
        return Send()
    return Send(f"{phrases.local_ranks_text(awaited)} did not begin a step in time") if is_over else None


class AgreedSteps:
    """The requests of one agent to send a signal at an agreed step, one at a time.

    Args:
        find_files: returns the workers' files in memory; ``None`` if there are none. Then no signal is held
            back.
        running: returns the pids of the running workers by local rank.
        keep_grace: maximum seconds that the workers may take to copy their states before they get a signal.
        handles: returns true if a process (pid) handles a signal; ``None`` if it has exited.
    """

    def __init__(
        self,
        find_files: Callable[[], KeepFiles | None],
        running: Callable[[], Mapping[int, int]],
        keep_grace: float,
        say: Callable[[str], None],
        handles: Callable[[int, int], bool | None],
    ) -> None:
        self._find_files, self._running, self._say = find_files, running, say
        self._keep_grace, self._handles = keep_grace, handles
        self._number = 0
        self._open: _Request | None = None
        self._reset_at: float | None = None

    def begin_attempt(self, files: KeepFiles | None) -> None:
        """Forget what the workers of the last attempt have written. None of them may be running."""
        self._reset_at = None
        if files is not None:
            files.ask(Agreed.NUMBER, [0] * (Agreed.END - Agreed.NUMBER))

    def is_held(self, signum: int) -> bool:
        """Return true if this signal is being held back, so that another one like it means the same."""
        return self._open is not None and self._open.signum == signum

    def begin(
        self,
        signum: int,
        hold: float,
        send: Callable[[float], None],
        tell: Tell | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Call ``send`` once all ranks stand at the start of the same step, or at the latest after ``hold``
        seconds. ``send`` gets the seconds for which it was held back. Afterwards, call ``tell``.

        Args:
            signum: number of the signal.
            hold: maximum seconds for which the signal is held back.
            send: function that sends the signal.
            tell: function that is told how the signal was sent.
            exchange: function that tells the other nodes what the ranks of this node have done, and returns
                what all nodes have said. It may block. ``None`` if all ranks are on this node.
        """
        self.end("another signal came")
        now = time.monotonic()
        request = _Request(signum, now, hold, send, tell)
        request.exchange = exchange
        standings = self._standings()
        if not self._may_help(signum, standings):
            self._deliver(request, Send())
            return
        self._number += 1
        until = int((request.until + self._keep_grace + 1) * 1e9)
        self._write(Agreed.STEP, 0, signum, until)
        self._write(Agreed.NUMBER, self._number)
        self._write(Agreed.STATE, AgreedState.WAIT)
        self._open, self._reset_at = request, None

    def _may_help(self, signum: int, standings: Mapping[int, Standing]) -> bool:
        """Return true if there is a rank for which the moment of the signal matters: it trains, and handles
        the signal or keeps its state.
        """
        files = self._find_files()
        if files is None or not any(each.is_training for each in standings.values()):
            return False
        if any(map(files.has_joined, standings)):
            return True
        pids = self._running()
        return any(self._handles(pids[rank], signum) for rank in standings)

    def seconds_left(self) -> float:
        """Do what is due. Return the seconds until the next call; infinity if nothing is asked."""
        request, now = self._open, time.monotonic()
        if request is None:
            return self._reset(now)
        standings = self._standings()
        if request.step is None:
            if now - request.asked < _SETTLE:
                return _SETTLE
            chosen = self._choose(request, standings)
            if chosen is None and now - request.asked < _EXCHANGE_LIMIT + _SLACK:
                return _TICK
            if isinstance(chosen, int):
                request.step = chosen
                self._write(Agreed.STEP, chosen)
                self._write(Agreed.STATE, AgreedState.ACT)
                return _TICK
            decision = chosen or Send("another node does not answer")
        else:
            if any(each.ready == self._number for each in standings.values()):
                request.until = min(request.until, (request.first_ready or now) + _STALL)
                request.first_ready = request.first_ready or now
            found = look(standings, self._number, is_over=now >= request.until)
            if found is None:
                return _TICK if now - request.asked < _SOON else _LATER_TICK
            decision = found
        self._deliver(request, decision)
        return self._reset(now)

    def _choose(self, request: _Request, standings: Mapping[int, Standing]) -> int | Send | None:
        """Choose the step, if necessary with the other nodes. Return ``None`` until all have answered."""
        if request.call is None:
            own = progress(standings, request.until)
            if request.exchange is None:
                return own if isinstance(own, Send) else common_step([own])
            told = None if isinstance(own, Send) else own
            try:
                request.call = BackgroundCall(partial(request.exchange, told))
            except (OSError, RuntimeError) as error:
                return Send(f"the other nodes cannot be asked: {error}")
            if isinstance(own, Send):
                return own
        if not request.call.wait(0):
            return None
        try:
            return common_step(request.call.take())
        # The store may be lost, or contain anything.
        except Exception as error:
            return Send(f"another node did not answer ({type(error).__name__})")

    def end(self, why: str) -> None:
        """Send the signal that is held back now, if there is one. ``why``: reason, as in :class:`Send`."""
        if self._open is not None:
            self._deliver(self._open, Send(why))

    def cancel(self) -> None:
        """Drop the signal that is held back, because the workers have exited."""
        if (request := self._open) is not None:
            self._open = None
            request.close()
            if request.tell is not None:
                why = "the workers have exited"
                request.tell(Delivery(request.signum, None, why, time.monotonic() - request.asked))

    def _deliver(self, request: _Request, decision: Send) -> None:
        was_open, self._open = self._open is request, None
        request.close()
        now = time.monotonic()
        waited = now - request.asked
        request.send(waited)
        step = request.step if was_open and not decision.why else None
        if was_open:
            self._write(Agreed.STATE, AgreedState.NONE if decision.why else AgreedState.SENT)
            self._reset_at = now + _RESET
            self._say(phrases.agreed(request.signum, step, decision.why, waited))
        if request.tell is not None:
            request.tell(Delivery(request.signum, step, decision.why, waited))

    def _reset(self, now: float) -> float:
        """Write into the workers' files that nothing is asked, so that their next steps are fast again."""
        if self._reset_at is None:
            return float("inf")
        if now < self._reset_at:
            return self._reset_at - now
        self._reset_at = None
        self._write(Agreed.STATE, AgreedState.NONE)
        return float("inf")

    def _standings(self) -> dict[int, Standing]:
        files = self._find_files()
        return {} if files is None else {rank: Standing.of(files.steps_of(rank)) for rank in self._running()}

    def _write(self, word: int, *values: int) -> None:
        if (files := self._find_files()) is not None:
            files.ask(word, values)


class _Request:
    """A signal that is held back."""

    __slots__ = ("asked", "call", "exchange", "first_ready", "send", "signum", "step", "tell", "until")

    def __init__(
        self, signum: int, asked: float, hold: float, send: Callable[[float], None], tell: Tell | None
    ) -> None:
        self.signum, self.asked, self.send, self.tell = signum, asked, send, tell
        self.until = asked + hold
        self.first_ready: float | None = None
        self.step: int | None = None
        self.exchange: Exchange | None = None
        self.call: BackgroundCall | None = None

    def close(self) -> None:
        if self.call is not None:
            self.call.close()
            self.call = None


def hold_of_stop(shutdown_timeout: float, *, by_hand: bool) -> float:
    """Return the maximum seconds for which a stop is held back. The workers' own saves need the rest of
    ``--shutdown-timeout``.
    """
    return min(KEYBOARD_HOLD if by_hand else LONGEST_HOLD, shutdown_timeout / 3)
