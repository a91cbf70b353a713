"""The worker's side of the agreed step, the training step after which all ranks of a job get a signal.

The agent does not send the signal at once. It first asks for an agreed step, with numbers (words) that it
writes into a file in memory that it shares with the worker (:class:`.layout.Agreed`). This module counts the
steps of torch's optimizers. While the agent asks for nothing, this costs one write to memory and one read in
each step. When the agent asks, each rank waits at the end of its step until the agent has chosen a step that
no rank has passed. All ranks go on to that step, and stop once more at the start of the next one, because a
script's own counters, schedulers and data loaders are consistent there. Each rank writes into its file that
it has stopped, and waits until the agent sends the signal.

A compiler can hide the steps of an optimizer from torch's hooks, and a program may use other optimizers. As
long as no step of an optimizer was seen, this module instead counts calls that a program makes once in each
step: ``heartbeat(step)`` or ``optimizer.zero_grad()``.

- **STEP-1** a rank never waits longer than the limits in this module and in that file.
- **STEP-2** a problem in this module never fails the training. Without the file, a signal comes at any time.
- **STEP-3** forked children of a worker count no steps, and do not write to the worker's file.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident, get_native_id
from time import monotonic_ns, sleep

from elasticrs._engine.inside.keep import keep_before_stop, layout
from elasticrs._engine.inside.keep.layout import Agreed, AgreedState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_CHOICE_LIMIT_NS = 5_000_000_000
"""Maximum nanoseconds for which a rank waits at the end of a step until the agents have chosen a step."""

_SIGNAL_LIMIT_NS = 120_000_000_000
"""Maximum nanoseconds for which a rank waits for the signal, even if the agent has set a later limit."""

_UNNOTICED_NS = 50_000_000
"""Nanoseconds for which a rank waits after the agent has sent a signal whose arrival this module cannot see,
because no Python function handles the signal, or because the training does not run on the main thread.
"""

_LONG_NS, _SHORT_STEPS = 1_000_000, 64
"""A limit in nanoseconds, and a number of steps. If steps take longer than the limit, the time of each one is
measured. Otherwise, the time of this number of steps is measured at once, which costs less.
"""

_NEVER = 1 << 62
"""Number of a step that is never reached."""

_TRIES = 20
"""Number of times that a worker tries again to open the file that it shares with its agent."""

_TICK = 0.0001
_STEPS, _STATE = Agreed.STEPS, Agreed.STATE


def _map_words() -> memoryview | None:
    """Map the file in memory that this worker shares with its agent, as 8-byte numbers (words). Return
    ``None`` if there is no such file, or if another process uses it.
    """
    mark, _, path = os.environ.get(layout.VARIABLE, "").partition(":")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    from mmap import mmap

    try:
        head, size = os.pread(descriptor, 2 * layout.WORD, 0), os.fstat(descriptor).st_size
        if not layout.is_prepared(head, size, int(mark)):
            return None
        words = memoryview(mmap(descriptor, layout.HEAD_SIZE)).cast("Q")
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    owner, own = words[Agreed.OWNER], os.getpid()
    if owner not in (0, own) and os.path.exists(f"/proc/{owner}"):
        return None
    words[Agreed.OWNER] = own
    return words


def _private_words() -> memoryview:
    return memoryview(bytearray(layout.HEAD_SIZE)).cast("Q")


def _is_traced() -> bool:
    """Return true while torch's compiler traces the caller, and if this torch has no compiler."""
    import torch

    try:
        return torch.compiler.is_compiling()
    except AttributeError:
        return True


def follow_steps(optimizers: Any, beat: Callable[[int | None], None] | None) -> None:
    """Count the steps of torch's optimizers, and let the agent choose one after which all ranks get a signal.

    Only one optimizer is counted: the first that makes a step. After its destruction, the next optimizer that
    makes a step is counted.

    Args:
        optimizers: module ``torch.optim.optimizer``.
        beat: function that sends a heartbeat to the agent. It is called with the number of counted steps
            after each one, and with ``None`` at a step of another optimizer. ``None`` if the agent watches
            no heartbeats.
    """
    register = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register is None or not (beat or layout.VARIABLE in os.environ):
        return
    words = _map_words() or _private_words()
    from weakref import ref

    import torch

    boundary = _the_boundary()
    steps, state = _STEPS, _STATE
    count = due = counted = 0
    first: object = None
    has_others = False
    # With an old torch, no steps are counted. The agent then reports that the rank is not watched.
    is_traced = _is_traced

    def forget(_reference: object) -> None:
        nonlocal counted
        counted = 0

    def on_other_step(optimizer: object) -> bool:
        """Handle a step of an optimizer that is not counted. Return true if it is counted from now on."""
        nonlocal counted, first, has_others, is_traced
        if not counted:
            # From now on, use the faster function, which also returns true while torch traces `on_step`.
            is_traced = getattr(torch.compiler, "is_dynamo_compiling", is_traced)
            counted, first = id(optimizer), ref(optimizer, forget)
            boundary.counted = counted
            boundary.count_with(None)
            return True
        has_others = True
        boundary.others.add(id(optimizer))
        if beat is not None:
            beat(None)
        return False

    def on_step(optimizer: object, _args: object, _kwargs: object) -> None:
        nonlocal count, due, words
        # Do not count a compiled optimizer, because torch would warn that it cannot trace this function.
        if is_traced():
            return
        if id(optimizer) != counted and not on_other_step(optimizer):
            return
        if beat is not None:
            beat(count + 1)
        count += 1
        # The agent first writes into the file that it asks for an agreed step, and then reads the number of
        # steps. Here, the number is written before this function looks whether the agent asks. So either
        # the agent sees this step, or this rank sees that the agent asks.
        words[steps] = count
        if count >= due:
            words = boundary.map_again(words, count)
            due = boundary.measure(words, count)
        if has_others:
            boundary.awaited, boundary.others = boundary.others, set()
        if words[state]:
            boundary.reach(words, count)

    def detach() -> None:
        nonlocal words, due
        words, due = _private_words(), _NEVER

    register(on_step)
    os.register_at_fork(after_in_child=detach)
    boundary.await_optimizers(optimizers, detach)


def follow_heartbeats(stop: Callable[[], None]) -> Callable[[], None] | None:
    """Count heartbeats with a step number as training steps, as long as no step of an optimizer was seen.

    Args:
        stop: function that this module calls when heartbeats need not be counted any more.

    Returns:
        Function to call at each heartbeat with a step number; ``None`` if they need not be counted.
    """
    boundary = _the_boundary()
    if boundary.counted or boundary.names_steps or layout.VARIABLE not in os.environ:
        return None
    counter = _Counter(boundary, 0)
    counter.undo.append(stop)
    boundary.count_with(counter)
    from threading import main_thread

    trainer = main_thread().ident

    def count() -> None:
        # Another thread, which reports the progress of the training, sends heartbeats in the middle of steps.
        if get_ident() == trainer:
            counter.count()

    return count


_boundary: _Boundary | None = None


def _the_boundary() -> _Boundary:
    global _boundary  # noqa: PLW0603 -- one for each process
    if _boundary is None:
        _boundary = _Boundary()
    return _boundary


class _Boundary:
    """Stops this process between two training steps, if the agent asks for a step after which all ranks get a
    signal (the agreed step).

    Attributes:
        counted: identity (``id``) of the optimizer whose steps are counted as training steps.
        others: identities of the other optimizers that have made a step since the last counted step.
        awaited: the optimizers that made a step between the last two counted steps. The next training step
            begins only after all of them have made a step again.
        tries: number of attempts that are left to open the file that the worker shares with its agent.
        detach: function that ends the counting of the optimizers' steps.
        optimizers: module ``torch.optim.optimizer``; ``None`` before its import.
        names_steps: true if the program calls :func:`checkpoint_requested`, whose calls are counted.
        substitute: counter of the calls that are counted as long as no step of an optimizer was seen.
        begins_at_forward: true if a step may begin with the forward pass of a module.
    """

    def __init__(self) -> None:
        self.optimizers: Any = None
        self.names_steps = False
        self.substitute: _Counter | None = None
        self.begins_at_forward = True
        self.counted = 0
        self.others: set[int] = set()
        self.awaited: set[int] = set()
        self._done = 0
        self._thread = 0
        self._undo: list[Callable[[], object]] = []
        self._measured = 0
        self._measured_ns = 0
        self.tries = _TRIES
        self.detach: Callable[[], object] = int

    def await_optimizers(self, optimizers: Any, detach: Callable[[], object]) -> None:
        """Count calls of ``zero_grad`` as training steps until an optimizer makes a step, unless other calls
        are counted already. ``detach`` is a function that ends the counting of the optimizers' steps.
        """
        self.optimizers, self.detach = optimizers, detach
        if self.names_steps:
            detach()
        elif self.substitute is None and hasattr(optimizers, "Optimizer"):
            self.count_with(_ZeroGrads(self, optimizers.Optimizer))

    def count_with(self, substitute: _Counter | None) -> None:
        """Let ``substitute`` count the steps from now on. If it is ``None``, count an optimizer's steps."""
        if self.names_steps:
            return
        if self.substitute is not None:
            self.substitute.end()
        self.substitute = substitute
        self.begins_at_forward, self._measured = True, 0

    def map_again(self, words: memoryview, step: int) -> memoryview:
        """Return the words (8-byte numbers) of the file that this worker shares with its agent. If the file
        is not mapped yet, try again, because the agent prepares it while the workers are starting.
        """
        if words[Agreed.OWNER] or not self.tries:
            return words
        self.tries -= 1
        if (mapped := _map_words()) is None:
            return words
        mapped[Agreed.STEPS] = step
        return mapped

    def measure(self, words: memoryview, step: int) -> int:
        """Measure how long the steps take, and write that into the file for the agent. Return the number of
        the step at which to measure again: the next step if steps are long. If they are short, a later one,
        because measuring each step would cost too much.
        """
        now = monotonic_ns()
        if self._measured:
            duration = (now - self._measured_ns) // max(1, step - self._measured)
            words[Agreed.DURATION] = duration
            self._measured_ns, self._measured, words[Agreed.TIME] = now, step, now
            return step + (1 if duration > _LONG_NS else _SHORT_STEPS)
        self._measured_ns, self._measured, words[Agreed.TIME] = now, step, now
        return step + 1

    def reach(self, words: memoryview, step: int, *, is_start: bool = False) -> None:
        """Wait at the end of a step until the agent has chosen a step after which all ranks get a signal. If
        that is this ``step``, have the rank wait for the signal at the start of the next one. ``is_start``:
        true if the next step begins right here.
        """
        number = words[Agreed.NUMBER]
        if number == self._done:
            return
        begun = monotonic_ns()
        limit = begun + _CHOICE_LIMIT_NS
        while words[Agreed.STATE] == AgreedState.WAIT and words[Agreed.NUMBER] == number:
            if monotonic_ns() > limit:
                self._done = words[Agreed.MISSED] = number
                return
            sleep(_TICK)
        words[Agreed.PAUSED] += monotonic_ns() - begun
        if words[Agreed.STATE] != AgreedState.ACT or words[Agreed.NUMBER] != number:
            return
        if step < words[Agreed.STEP]:
            return
        self._done = number
        if step > words[Agreed.STEP]:
            words[Agreed.MISSED] = number
        elif is_start:
            _Stop(words, number).wait()
        else:
            self._arm(words, number)

    def _arm(self, words: memoryview, number: int) -> None:
        """Install hooks that stop this thread at the start of the next training step: when it takes a batch
        from a data loader, calls a module, or steps the counted optimizer again, whichever comes first.
        """
        self._thread = get_ident()

        def on_forward(_module: object, _args: object) -> None:
            self._begin(words, number)

        def before_step(optimizer: object, _args: object, _kwargs: object) -> None:
            self._begin(words, number, is_last=id(optimizer) == self.counted)

        if self.begins_at_forward:
            from torch.nn.modules.module import register_module_forward_pre_hook

            self._ignore_warning()
            self._undo.append(register_module_forward_pre_hook(on_forward).remove)
        if self.substitute is None:
            self._undo.append(self.optimizers.register_optimizer_step_pre_hook(before_step).remove)
        if (restore := _before_load(lambda: self._begin(words, number))) is not None:
            self._undo.append(restore)

    def _ignore_warning(self) -> None:
        """Suppress a warning of torch's compiled modules about hooks for all modules. The warning does not
        apply to the hook of :meth:`_arm`, because that hook is removed before the module does its work.
        """
        from warnings import filters, filterwarnings

        filterwarnings("ignore", message=".*there are global hooks on modules")
        added: Any = filters[0]

        def remove() -> None:
            if added in filters:
                cast_filters: Any = filters
                cast_filters.remove(added)

        self._undo.append(remove)

    def miss(self, words: memoryview) -> None:
        """Tell the agent if this rank was to stop at the start of a step, but has already begun that step."""
        if self._undo:
            self._disarm()
            words[Agreed.MISSED] = self._done

    def _disarm(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _begin(self, words: memoryview, number: int, *, is_last: bool = False) -> None:
        """Wait for the signal if the next training step begins now. ``is_last``: true just before a step of
        the counted optimizer, which is the last moment to wait.
        """
        if self._undo and get_ident() == self._thread and (is_last or self.awaited <= self.others):
            self._disarm()
            _Stop(words, number).wait()


def _before_load(act: Callable[[], None]) -> Callable[[], None] | None:
    """Have ``act`` called each time before a batch is taken from a data loader of torch. Return a function
    that undoes this; ``None`` if the program has not imported torch's data loaders.
    """
    loaders: Any = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(loaders, "_BaseDataLoaderIter", None)
    if kind is None:
        return None
    original = kind.__next__

    def take(iterator: object) -> Any:
        act()
        return original(iterator)

    def restore() -> None:
        if kind.__next__ is take:
            kind.__next__ = original

    kind.__next__ = take
    return restore


class _Stop:
    """Lets a rank wait at the start of a training step until its signal has come, and runs its handler."""

    def __init__(self, words: memoryview, number: int) -> None:
        self._words, self._number = words, number
        self._has_come = False

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self._has_come = True

    def wait(self) -> None:
        """Wait for the signal of the agent. Then run the program's handler, which may raise an exception.

        During the wait, another handler replaces the program's one, to note that the signal has come. A rank
        that went on before its signal has come would be a step ahead of the other ranks.
        """
        import signal

        torch: Any = sys.modules.get("torch")
        words = self._words
        if torch is not None and torch.cuda.is_initialized():
            # Let the GPU finish its work. A collective that still ran would hang if another rank exited.
            torch.cuda.synchronize()
        signum = words[Agreed.SIGNAL]
        if signum not in (signal.SIGUSR1, signal.SIGUSR2):
            keep_before_stop()
        handler = signal.getsignal(signum)
        is_noticed = callable(handler) and _is_main_thread()
        if is_noticed:
            signal.signal(signum, self._note)
        words[Agreed.READY_AT] = monotonic_ns()
        words[Agreed.READY] = self._number
        try:
            self._wait(is_noticed=is_noticed)
        finally:
            if is_noticed and signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
            # Do this also if the handler of an earlier signal has raised an exception.
            if self._has_come:
                signal.raise_signal(signum)

    def _wait(self, *, is_noticed: bool) -> None:
        words, number = self._words, self._number
        limit = monotonic_ns() + _SIGNAL_LIMIT_NS
        while not self._has_come and words[Agreed.STATE]:
            now, is_sent = monotonic_ns(), words[Agreed.SENT] == number
            if words[Agreed.NUMBER] != number and not is_sent:
                return
            if is_sent and not is_noticed:
                limit, is_noticed = min(limit, now + _UNNOTICED_NS), True
            if now > min(limit, words[Agreed.UNTIL]):
                return
            sleep(_TICK)


def _is_main_thread() -> bool:
    return get_native_id() == os.getpid()


class _Counter:
    """Counts calls that a program makes once in each training step, in place of its optimizer's steps.

    Args:
        boundary: the object that stops this process between two steps.
        first: number of steps that have ended at the first call: 0 if it may come before the first step.

    Attributes:
        is_at_start: true if a training step begins right at such a call.
        undo: functions to call when the calls are not counted any more.
    """

    is_at_start = True

    def __init__(self, boundary: _Boundary, first: int) -> None:
        self._boundary, self._next, self._due = boundary, first, 0
        self._words = _map_words() or _private_words()
        self.undo: list[Callable[[], None]] = []
        os.register_at_fork(after_in_child=self._detach)

    def _detach(self) -> None:
        self._words, self._boundary.tries = _private_words(), 0

    def end(self) -> None:
        """End the counting of calls."""
        while self.undo:
            self.undo.pop()()
        self._words[Agreed.STEPS] = 0
        self._words = _private_words()

    def count(self) -> None:
        """Count a call as a training step. Take only 0.1 microseconds, because there may be many calls."""
        step = self._next
        self._next = step + 1
        words = self._words
        words[_STEPS] = step
        if words[_STATE] or step >= self._due:
            self._look(step)

    def _look(self, step: int) -> None:
        """Measure how long steps take. Wait here if the agent asks after which step all ranks can stop."""
        words = self._words = self._boundary.map_again(self._words, step)
        self._due = self._boundary.measure(words, step)
        if words[_STATE]:
            self._boundary.reach(words, step, is_start=self.is_at_start)


class _ZeroGrads(_Counter):
    """Counts calls of ``zero_grad`` as training steps, as long as no step of an optimizer is seen. Only the
    calls for one optimizer are counted: the first for which the program calls it.

    A program may call ``zero_grad`` at the end of a step, or at the start of a step, when it already has the
    batch. So this class takes as the start of the next step the moment when the program takes a batch from a
    data loader, or, without data loaders, the next forward pass of a module. With several optimizers, that
    may be a forward pass in the middle of a step. So if a program has several, and no data loader, the
    counting ends.
    """

    is_at_start = False

    def __init__(self, boundary: _Boundary, kind: Any) -> None:
        super().__init__(boundary, 0)
        self._first: Callable[[], object] = lambda: None
        self._has_loaded = self._awaits_load = False
        from functools import wraps

        original = kind.zero_grad

        @wraps(original)
        def zero_grad(optimizer: object, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._note(optimizer)

        def restore() -> None:
            if kind.zero_grad is zero_grad:
                kind.zero_grad = original

        # Keep torch's compiler from tracing this function, because it does not trace the original one either.
        zero_grad._torchdynamo_disable = True  # type: ignore[attr-defined]
        kind.zero_grad = zero_grad
        self.undo.append(restore)

    def _note(self, optimizer: object) -> None:
        if not self.undo:
            return  # The program has stored this function, and still calls it after the end of the counting.
        if not self._awaits_load and (restore := _before_load(self._note_load)) is not None:
            self._awaits_load = True
            self.undo.append(restore)
        if self._first() is None:
            from weakref import ref

            self._first = ref(optimizer)
        if self._first() is optimizer:
            self._boundary.miss(self._words)
            self._boundary.begins_at_forward = not self._has_loaded
            self.count()
        elif self._next > 1 and not self._has_loaded:
            self._boundary.count_with(None)

    def _note_load(self) -> None:
        self._has_loaded = True


class _Calls(_Counter):
    """Counts the calls of :func:`checkpoint_requested` in this process as steps, and finds their answers."""

    def __init__(self) -> None:
        import signal

        boundary = _the_boundary()
        super().__init__(boundary, 1)
        boundary.detach()
        boundary.count_with(self)
        boundary.names_steps = True
        self._wish = ""
        if layout.VARIABLE not in os.environ or not _is_main_thread():
            return
        signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        noted = [signum for signum in signals if signal.getsignal(signum) == signal.SIG_DFL]
        for signum in noted:
            signal.signal(signum, self._note)

        masks: dict[int, set[int]] = {}

        # These signals are to end a forked child, as in a program that does not call this function. They are
        # blocked during a fork, because the handler would take a signal that comes right after it.
        def hold() -> None:
            masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, noted)

        def release() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(get_ident()))

        def release_child() -> None:
            for signum in noted:
                if signal.getsignal(signum) == self._note:
                    signal.signal(signum, signal.SIG_DFL)
            release()

        os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_child)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        from signal import SIGTERM

        self._wish = "stop" if signum == SIGTERM else self._wish or "save"

    def next(self) -> str:
        self.count()
        wish, self._wish = self._wish, ""
        return wish


_calls: _Calls | None = None


def checkpoint_requested() -> str:
    """Return whether to save a checkpoint now, and whether to exit then. Call this function once in each
    training step, at the same place on all ranks.

    All ranks get the same answer in the same step, also on several nodes, without a collective. Use this
    function in training loops whose steps elasticrs cannot count, because they neither use torch's optimizers
    nor send heartbeats. Use it also in programs that do not want to handle signals: if such a program has no
    handlers for SIGTERM, SIGUSR1 and SIGUSR2, these signals do not end the program after its first call of
    this function, and only set the answer. A call takes some microseconds.

    Returns:
        An empty text if nothing is requested. ``"save"`` to save a checkpoint and go on. ``"stop"`` to save a
        checkpoint and exit, because the agent stops the workers, and kills them after ``--shutdown-timeout``.
        In a program that no agent of elasticrs has started, the text is always empty.
    """
    global _calls  # noqa: PLW0603 -- one for each process
    if _calls is None:
        _calls = _Calls()
    return _calls.next()
