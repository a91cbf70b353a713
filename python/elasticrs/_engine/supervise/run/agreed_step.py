"""The agent's side of the agreed step, the training step after which all workers of the job get a signal.

A signal that reaches the ranks in different steps makes them save different states, or hang in a barrier of
their handlers. So the agent holds the signal back. Through files in memory that it shares with the workers
(:class:`.layout.Agreed`), it asks them to wait at the end of their steps. It chooses the step after the
newest one that a worker has ended, and lets the workers go on to it. When all of them stand at the start of
the step after that, it sends the signal. :mod:`elasticrs._engine.inside.boundary` is the workers' side.

- **AGREE-1** However the running workers behave, the agent sends a signal exactly once, at the latest after
  the maximum time for which it may hold the signal back.
- **AGREE-2** The agent stops holding a signal back at once if a rank fails, if a second request to stop
  comes, or if the attempt (one start of all workers) ends.
- **AGREE-3** Signals that are held back at the same time reach each rank in the same order: first those that
  do not stop the job, by number, and then the one that stops it. So the ranks of all nodes act alike even if
  the agents of the nodes get the signals in different orders.
- **AGREE-4** While the agent asks the workers for nothing, this module does not wake it up.
"""

from __future__ import annotations

import time
from functools import partial

from elasticrs._engine.inside.keep.layout import Agreed, AgreedState
from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value
from elasticrs._engine.process.other_processes import has_own_proc
from elasticrs._engine.process.signals import KEYBOARD
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.run.worker_states import can_take

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.nodes.calls import Exchange
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.run.tracker import AttemptTracker
    from elasticrs._engine.workers.keep_files import KeepFiles

    Tell: TypeAlias = Callable[["Delivery"], object]
    BeginExchange: TypeAlias = Callable[[bytes], Exchange]

LONGEST_HOLD = 10.0
"""Maximum seconds for which a stop signal is held back. A third of ``--shutdown-timeout`` if that is less."""

KEYBOARD_HOLD = 2.0
"""Maximum seconds for which a signal from the keyboard is held back. It is short because a user waits."""

SAVE_HOLD = 60.0
"""Maximum seconds for which a signal that does not stop the job is held back, such as a request to save."""

_SETTLE = 0.001
"""Seconds from when the agent writes into the workers' files that it asks for a common step, until it reads
there how many steps they have ended. By then, it also sees a step that a worker ended without noticing the
request, because a processor delays a write to memory for less than a microsecond.
"""

_TICK, _LATER_TICK, _SOON = 0.001, 0.01, 0.5
"""Seconds between two looks at the workers' files, at first and later, and for how long "at first" lasts."""

_EXCHANGE_LIMIT = 2.0
"""Maximum seconds for which an agent waits until those of the other nodes tell the steps of their ranks."""

_RESET = 5.0
"""Seconds from when a signal is sent until the agent notes in the workers' files that it asks for nothing."""

_STALL = 5.0
"""Maximum seconds for which a signal is held back after the first rank has stopped to wait for it."""

_SECOND_SIGNAL_LIMIT = 0.5
"""Maximum seconds for which the nodes may still exchange steps for a signal when another signal has come. An
exchange that takes longer lacks a node, whose agent may have got only the other signal.
"""

_SANE_STEPS = 1 << 62

_ALONE = "its ranks get the signal only if its agent gets it, too"

_APART = "the agents of this job's nodes cannot exchange the steps of their ranks"


class Delivery(Value):
    """How the agent has sent a signal to the workers.

    Args:
        step: number of training steps, since the start of the workers, after which all ranks got the signal.
            ``None`` if the ranks have not agreed on a step.
        why: why the ranks have not agreed on a step. Empty if they have, or if no rank needs that.
        waited: seconds for which the signal was held back.
        paused: longest time in seconds for which a rank has stood still while the signal was held back; 0 if
            the ranks have not agreed.
        at_once: why the agent did not hold the signal back, if ``step`` is ``None`` and ``why`` is empty.
    """

    signum: int
    step: int | None = None
    why: str = ""
    waited: float = 0.0
    paused: float = 0.0
    at_once: str = "none that trains with torch.optim handles it"


class RankSteps(Value):
    """What a worker has written about its training steps, into the file that it shares with the agent.

    Args:
        is_training: true if the worker has imported torch's optimizers.
        steps: number of steps that the worker has ended.
        at: time at which the worker ended a step, in seconds of the monotonic clock. It is the last step if
            steps are not short.
        duration: seconds that a step takes; 0 if unknown.
        ready: number of the agent's request for which the worker has stopped at the start of a step.
        missed: number of the request that the worker missed, because it was past the chosen step, or had
            waited too long.
        ready_at: time at which the worker has stopped for the request, in seconds of the monotonic clock.
        paused: seconds for which the worker, before it stopped, has waited for the agent to choose the step.
    """

    is_training: bool = False
    steps: int = 0
    at: float = 0.0
    duration: float = 0.0
    ready: int = 0
    missed: int = 0
    ready_at: float = 0.0
    paused: float = 0.0

    @classmethod
    def of(cls, words: tuple[int, ...]) -> RankSteps:
        owner, steps, at, duration, ready, missed, ready_at, paused = words
        sane = steps if steps < _SANE_STEPS else 0
        return cls(owner != 0, sane, at / 1e9, duration / 1e9, ready, missed, ready_at / 1e9, paused / 1e9)


class NodeSteps(Value):
    """Numbers of training steps that the slowest and the fastest rank of a node have ended."""

    least: int
    most: int

    @classmethod
    def decoded(cls, value: bytes) -> NodeSteps | None:
        """Read what an agent has told the others. Return ``None`` if its ranks cannot wait for a step.
        Raises :class:`ValueError` or :class:`TypeError` if some other program has written the value.
        """
        return cls(*map(int, value.split())) if value else None

    def encoded(self) -> bytes:
        return f"{self.least} {self.most}".encode()


class Send(Value):
    """The decision to send a signal now. ``why``: reason why the ranks are not at the agreed step. Empty if
    they are, or if there are no ranks.
    """

    why: str = ""


def progress(seen: Mapping[int, RankSteps], until: float) -> NodeSteps | Send:
    """Return how many steps the ranks of this node have ended, or the decision to send the signal now,
    because they cannot wait for a common step. Call this when each rank either waits at the end of a step, or
    will see there that the agent asks for that. ``seen``: what the ranks have written, by local rank.
    ``until``: time at which the signal is sent in any case.
    """
    if not seen:
        return Send()
    if idle := [rank for rank, each in seen.items() if not each.steps]:
        return Send(f"{phrases.local_ranks_text(idle)} ended no training step yet")
    longest = max(seen.values(), key=lambda each: each.duration)
    if longest.at + longest.duration > until:
        return Send(f"a step takes {longest.duration:.3g} s")
    steps = [each.steps for each in seen.values()]
    return NodeSteps(min(steps), max(steps))


def common_step(nodes: Sequence[NodeSteps | None]) -> int | Send:
    """Choose the number of steps after which all ranks get the signal, or decide to send it now because there
    is no such number. ``nodes``: how many steps the ranks of each node have ended; ``None`` for a node whose
    ranks cannot wait for a step.
    """
    spans = [each for each in nodes if each is not None]
    if len(spans) < len(nodes):
        return Send("the ranks of another node cannot wait for a step")
    least, most = min(each.least for each in spans), max(each.most for each in spans)
    if most - least > 1:
        return Send(f"the ranks are not in step: they have made {least} to {most} steps")
    return most + 1


def look(seen: Mapping[int, RankSteps], number: int, *, is_over: bool) -> Send | None:
    """Decide whether to send the signal now. The step after which the ranks get it is chosen already. Return
    ``None`` to wait for more ranks. ``seen``: what the running workers have written, by local rank.
    ``number``: the agent's request. ``is_over``: true if the signal must not be held back any longer.
    """
    if late := [rank for rank, each in seen.items() if each.missed == number]:
        return Send(f"{phrases.local_ranks_text(late)} had passed the agreed step")
    awaited = [rank for rank, each in seen.items() if each.ready != number]
    if not awaited:
        return Send()
    return Send(f"{phrases.local_ranks_text(awaited)} did not begin a step in time") if is_over else None


class AgreedSteps:
    """Sends signals to the workers of an agent at agreed steps (an agreed step is a training step after which
    all ranks of the job get the signal). Signals that come while another one is held back get the same step,
    or a later one.

    Args:
        tracker: sends the signals to the workers, and knows which of them run. If their attempt has no files
            in memory that the agent shares with them, no signal is held back.
        decisions: know whether the workers run, and how the agents of the nodes reach each other.
        job: the job.
        say: function that prints a line for the user.

    Attributes:
        is_asking: true from a request to the workers until their files say that the agent asks for nothing.
            Only then, :meth:`seconds_left`, :meth:`see`, :meth:`end` and :meth:`cancel` have anything to do.
    """

    def __init__(
        self, tracker: AttemptTracker, decisions: Decisions, job: JobSpec, say: Callable[[str], None]
    ) -> None:
        self._tracker, self._decisions, self._say = tracker, decisions, say
        self._keep_grace = job.keep_grace
        self._number = 0
        self._open: _Request | None = None
        self._queued: list[_Held] = []
        self._reset_at: float | None = None
        self.is_asking = False

    def stop(self, action: machine.Stop, tell: Tell | None) -> None:
        """Stop the workers with a signal. If nothing has failed, first let all ranks finish the same training
        step. Call ``tell`` when the signal is sent.
        """
        if not action.is_planned or not self._can_agree():
            self.end("another request to stop came")
            self._tracker.stop(action)
            if tell is not None:
                tell(Delivery(action.signum, None, _APART if action.is_planned else "a rank has failed"))
            return

        def send(waited: float) -> Sequence[int]:
            self._tracker.stop(action.replaced(grace=max(0.0, action.grace - waited)))
            return ()

        self._write(Agreed.NODE_LEAVES, int(action.node_leaves))
        hold = hold_of_stop(action.grace, by_hand=action.signum in KEYBOARD)
        self.begin(action.signum, hold, send, tell, self._exchange("stop"), is_stop=True)

    def pass_on(self, signum: int, tell: Tell | None) -> None:
        """Send a signal to the workers without stopping the job. If all ranks can agree on a training step,
        send the signal at the start of that step. Do nothing if this signal is already held back for a step.
        """

        def send(_waited: float) -> Sequence[int]:
            return self._tracker.forward(signum, are_running=self._decisions.phase.has_workers)

        is_running = self._decisions.phase is machine.Phase.RUNNING
        if self._open is None and not (is_running and self._can_agree()):
            send(0.0)
            if tell is not None:
                tell(Delivery(signum, None, _APART if is_running else ""))
        elif not self.is_held(signum):
            self.begin(signum, SAVE_HOLD, send, tell, self._exchange(f"signal {signum}"))

    def see(self, event: machine.Event) -> None:
        """Stop holding a signal back if this event means that the workers exited, or will be stopped."""
        if isinstance(event, (machine.GroupEnded, machine.StartFailed)):
            self.cancel()
        elif isinstance(event, (machine.FailureSeen, machine.HangSeen)):
            self.end("a rank has failed")

    def _can_agree(self) -> bool:
        """Return true if all ranks of this job can be stopped after the same training step: if all are on
        this node, or if this agent can exchange data with the agents of the other nodes.
        """
        plan, is_connected = self._decisions.plan, self._decisions.begin_exchange is not None
        return plan is not None and (is_connected or plan.ranks[0].group_world_size == 1)

    def _exchange(self, name: str) -> BeginExchange | None:
        """Return the function by which nodes tell each other their steps; ``None`` if the job has one."""
        plan, begin = self._decisions.plan, self._decisions.begin_exchange
        if plan is None or begin is None or plan.ranks[0].group_world_size == 1:
            return None
        return partial(begin, name)

    def _find_files(self) -> KeepFiles | None:
        attempt = self._tracker.attempt
        return None if attempt is None else attempt.keep_files

    def _running(self) -> Mapping[int, int]:
        attempt = self._tracker.attempt
        return {} if attempt is None else attempt.running()

    def is_held(self, signum: int) -> bool:
        """Return true if a signal of this number is held back. Then another one requests nothing new."""
        return any(each.signum == signum for each in self._all_held())

    def _all_held(self) -> list[_Held]:
        return [] if self._open is None else [*self._open.held, *self._queued]

    def begin(
        self,
        signum: int,
        hold: float,
        send: Callable[[float], Sequence[int]],
        tell: Tell | None = None,
        begin_exchange: BeginExchange | None = None,
        *,
        is_stop: bool = False,
    ) -> None:
        """Hold a signal back until all ranks stand at the start of the same training step, but for at most
        ``hold`` seconds. Then call ``send`` to send the signal, and call ``tell``. Does not block.

        Args:
            signum: number of the signal.
            hold: maximum seconds for which the signal is held back.
            send: function that sends the signal. It gets the seconds for which the signal was held back, and
                returns the local ranks that do not get it, because they have no handler.
            tell: function that is told how the signal was sent.
            begin_exchange: function that begins to tell the other nodes how many steps the ranks of this
                node have ended. Does not block. ``None`` if all ranks are on this node.
            is_stop: true if the signal stops the workers.
        """
        now = time.monotonic()
        new = _Held(signum, now, now + hold, send, tell, begin_exchange, is_stop)
        request = self._open
        if request is None:
            if self._may_help(signum, self._rank_steps()):
                self._ask([new])
            else:
                self._deliver(_Request([new], now), Send())
            return
        request.until = min(request.until, new.until)
        if new.by_order() < request.last.by_order():
            # Keep the request, because the ranks wait for its last signal, and get the new signal before.
            request.held = sorted([*request.held, new], key=_Held.by_order)
            return
        self._queued.append(new)
        if request.last.begin_exchange is None:
            self._ask_for_all(request)
        else:
            # Do not ask again yet: other nodes may have chosen the step already, and sent the signal.
            request.exchange_until = min(request.exchange_until, now + _SECOND_SIGNAL_LIMIT)

    def _ask(self, held: Sequence[_Held]) -> None:
        """Ask the workers to wait for a common step, after which they get the signals ``held``."""
        self._number += 1
        request = self._open = _Request(held, time.monotonic())
        until = int((request.until + self._keep_grace + 1) * 1e9)
        self._write(Agreed.STEP, 0, request.last.signum, until)
        self._write(Agreed.PAUSED, 0)
        self._write(Agreed.NUMBER, self._number)
        self._write(Agreed.STATE, AgreedState.WAIT)
        self._reset_at, self.is_asking = None, True

    def _may_help(self, signum: int, steps: Mapping[int, RankSteps]) -> bool:
        """Return true if the moment of the signal matters to a rank: if the job trains, and the rank handles
        the signal or keeps copies of its training state in memory.
        """
        files = self._find_files()
        if files is None or not any(each.is_training for each in steps.values()):
            return False
        if any(map(files.has_joined, steps)):
            return True
        pids = self._running()
        return not has_own_proc() or any(can_take(pids[rank], signum) for rank in steps)

    def seconds_left(self) -> float:
        """Do what is due for a signal that is held back. Return the seconds until the next call is needed."""
        request, now = self._open, time.monotonic()
        if request is None:
            return self._reset(now)
        steps = self._rank_steps()
        if request.step is None:
            if now - request.asked < _SETTLE:
                return _SETTLE
            chosen = self._choose(request, steps)
            if chosen is None and now < min(request.exchange_until, request.until):
                return _TICK
            if chosen is None and self._queued:
                self._ask_for_all(request)
                return _SETTLE
            if isinstance(chosen, int):
                request.step = chosen
                self._write(Agreed.STEP, chosen)
                self._write(Agreed.STATE, AgreedState.ACT)
                return _TICK
            decision = chosen or Send(f"another node does not answer; {_ALONE}")
        else:
            if any(each.ready == self._number for each in steps.values()):
                request.until = min(request.until, (request.first_ready or now) + _STALL)
                request.first_ready = request.first_ready or now
            found = look(steps, self._number, is_over=now >= request.until)
            if found is None:
                return _TICK if now - request.asked < _SOON else _LATER_TICK
            decision = found
        self._deliver(request, decision)
        return self._reset(now) if self._open is None else _SETTLE

    def _ask_for_all(self, request: _Request) -> None:
        """Ask the workers again for a common step, for the signals of the request and those in the queue."""
        request.close()
        held, self._queued = [*request.held, *self._queued], []
        self._ask(held)

    def _choose(self, request: _Request, steps: Mapping[int, RankSteps]) -> int | Send | None:
        """Choose the step after which all ranks get the signal, if necessary together with the other nodes.
        Return ``None`` until all nodes have answered, and :class:`Send` if there is no such step.
        """
        exchange = request.exchange
        if exchange is None:
            own = progress(steps, request.until)
            if request.last.begin_exchange is None:
                return own if isinstance(own, Send) else common_step([own])
            told = b"" if isinstance(own, Send) else own.encoded()
            exchange = request.exchange = request.last.begin_exchange(told)
            if isinstance(own, Send):
                return own
        if exchange.is_lost:
            return Send(f"the other nodes cannot be asked; {_ALONE}")
        if exchange.values is None:
            return None
        try:
            return common_step([NodeSteps.decoded(value) for value in exchange.values])
        except (TypeError, ValueError) as error:
            return Send(f"another node did not answer ({type(error).__name__}); {_ALONE}")

    def end(self, why: str) -> None:
        """Send all held signals now. ``why``: reason why the ranks are not at the agreed step."""
        if self._open is not None:
            self._deliver(self._open, Send(why))

    def cancel(self) -> None:
        """Do not send the signals any more that are held back, because the workers have exited."""
        if (request := self._open) is not None:
            held, now = self._all_held(), time.monotonic()
            self._open, self._queued, self.is_asking = None, [], False
            request.close()
            for each in held:
                if each.tell is not None:
                    each.tell(Delivery(each.signum, None, "the workers have exited", now - each.since))

    def _deliver(self, request: _Request, decision: Send) -> None:
        was_open, self._open = self._open is request, None
        request.close()
        held, queued, self._queued = request.held, self._queued, []
        if decision.why:
            # Hold no signal back for a step of its own if the ranks could not agree on the first step.
            held, queued = sorted([*held, *queued], key=_Held.by_order), []
        now = time.monotonic()
        step = request.step if was_open and not decision.why else None
        ranks = () if step is None else self._rank_steps().values()
        stood = max((now - each.ready_at + each.paused for each in ranks), default=0.0)
        # Send all signals before anything is printed, because the ranks wait for them.
        deaf = [each.send(now - each.since) for each in held]
        if was_open:
            if not decision.why:
                self._write(Agreed.SENT, self._number)
            self._write(Agreed.STATE, AgreedState.NONE if decision.why else AgreedState.SENT)
            self._reset_at = now + _RESET
        for each, not_sent in zip(held, deaf, strict=True):
            waited = now - each.since
            paused = min(waited, stood)
            if was_open:
                self._say(phrases.agreed(each.signum, step, decision.why, waited, paused, not_sent))
            if each.tell is not None:
                each.tell(Delivery(each.signum, step, decision.why, waited, paused))
        if queued:
            self._ask(queued)

    def _reset(self, now: float) -> float:
        """When it is time, write into the workers' files that the agent asks for nothing, so that their steps
        are fast again. Return the seconds until that time; infinity if there is nothing to write.
        """
        if self._reset_at is None:
            return float("inf")
        if now < self._reset_at:
            return self._reset_at - now
        self._reset_at, self.is_asking = None, False
        self._write(Agreed.STATE, AgreedState.NONE)
        return float("inf")

    def _rank_steps(self) -> dict[int, RankSteps]:
        files = self._find_files()
        return {} if files is None else {rank: RankSteps.of(files.steps_of(rank)) for rank in self._running()}

    def _write(self, word: int, *values: int) -> None:
        if (files := self._find_files()) is not None:
            files.ask(word, values)


class _Held(Value):
    """A signal that is held back.

    Args:
        since: time at which the signal came, in seconds of the monotonic clock.
        until: time until which it may be held back.
        is_stop: true if the signal stops the workers.
    """

    signum: int
    since: float
    until: float
    send: Callable[[float], Sequence[int]]
    tell: Tell | None
    begin_exchange: BeginExchange | None
    is_stop: bool

    def by_order(self) -> tuple[bool, int]:
        """Return a key that sorts signals in the order in which a rank gets them."""
        return self.is_stop, self.signum


class _Request:
    """A request of the agent to the workers to stop at a common step, with the signals that are held back.

    Attributes:
        held: the signals, in the order in which the ranks get them.
        until: time at which the signals are sent in any case, in seconds of the monotonic clock.
        exchange_until: time until which the agent waits for the other nodes to tell their steps.
    """

    def __init__(self, held: Sequence[_Held], asked: float) -> None:
        self.held: Sequence[_Held] = sorted(held, key=_Held.by_order)
        self.asked = asked
        self.until = min(each.until for each in held)
        self.exchange_until = asked + _EXCHANGE_LIMIT
        self.first_ready: float | None = None
        self.step: int | None = None
        self.exchange: Exchange | None = None

    @property
    def last(self) -> _Held:
        """The signal for which the ranks wait, because they get it last."""
        return self.held[-1]

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.end()
            self.exchange = None


def hold_of_stop(shutdown_timeout: float, *, by_hand: bool) -> float:
    """Return the maximum seconds for which a signal that stops the workers is held back. The workers need the
    rest of ``--shutdown-timeout`` to save. ``by_hand``: true if the signal comes from the keyboard.
    """
    return min(KEYBOARD_HOLD if by_hand else LONGEST_HOLD, shutdown_timeout / 3)
