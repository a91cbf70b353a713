"""Signals to this process: events of the agent's loop, repeated stop requests, and forked children.

The agent's Python handlers do nothing. The interpreter writes the number of each signal to a socket that the
loop watches (:func:`signal.set_wakeup_fd`), so a signal never interrupts a decision, and none is lost.

- **SIG-1** A signal that was ignored at the agent's start (``nohup``) stays ignored, also in the workers.
- **SIG-2** Handlers are installed only in the main thread, because Python allows this only there.
- **SIG-3** If the host application has set a wake-up file descriptor, it still receives the signal numbers.
- **SIG-4** SIGTSTP has the same effect as in a program that does not catch it: a later SIGCONT always cancels
  a SIGTSTP, and several SIGTSTPs count as one.

A forked child would handle a signal as a request to stop the parent's job. Therefore, code that installs
handlers registers a function here that removes them, and each child calls this function first.

- **FORK-1** Installations are undone in reverse order.
- **FORK-2** The signals are blocked before the fork until the child has removed the parent's handlers.
- **FORK-3** The parent loses no signal. The hook of :func:`os.fork` drops exceptions of handlers that run
  inside it. So the parent takes the pending signals from the kernel. A thread sends them to the process again
  when the main thread has left the hook.
"""

from __future__ import annotations

import _socket
import _thread
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from types import FrameType
    from typing import TypeAlias

    from elasticrs import _core

    Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

_installed: list[tuple[Callable[[], None], Collection[int]]] = []
_masks: dict[int, set[int]] = {}
"""Signals that each thread had blocked before its fork began, by thread id."""


def undo_in_children(undo: Callable[[], None], signums: Collection[int]) -> None:
    """Register a function that restores the previous signal handling. Each forked child calls it first.
    ``signums`` are the signals that it restores. They are looked up at each fork, because they may change.
    """
    _installed.append((undo, signums))


def is_undone(undo: Callable[[], None]) -> None:
    """Unregister a function of :func:`undo_in_children`, once the signal handlers are removed. Idempotent."""
    _installed[:] = [each for each in _installed if each[0] != undo]


def _before() -> None:
    signums = {signum for _, each in _installed for signum in tuple(each)}
    if signums:
        # Save the mask by a separate call: each `pthread_sigmask` may run signal handlers, which may raise.
        _masks[_thread.get_ident()] = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.pthread_sigmask(signal.SIG_BLOCK, signums)


def _after_in_parent() -> None:
    mask = _masks.pop(_thread.get_ident(), None)
    if mask is None:
        return
    taken: list[int] = []
    try:
        # Only the main thread runs Python's signal handlers.
        if _thread.get_native_id() == os.getpid():
            ours = set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) - mask
            while (info := signal.sigtimedwait(ours, 0)) is not None:
                taken.append(info.si_signo)
    finally:
        if taken:
            _thread.start_new_thread(_send_after_hook, (taken, _thread.get_ident()))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _send_after_hook(signums: list[int], main_thread: int) -> None:
    while _is_in_hook(sys._current_frames().get(main_thread)):
        time.sleep(0.001)
    for signum in signums:
        os.kill(os.getpid(), signum)


def _is_in_hook(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _after_in_parent.__code__:
        frame = frame.f_back
    return frame is not None


def _after_in_child() -> None:
    mask = _masks.pop(_thread.get_ident(), None)
    _masks.clear()
    try:
        while _installed:
            undo, _ = _installed.pop()
            undo()
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


ECHO = 0.1
"""Seconds after the first stop signal in which further stop signals count as the same request to stop,
because systemd, schedulers and terminals send several kinds at once.
"""

RELAY = 2.0
"""Seconds after the first SIGTERM in which further ones count as the same request to stop. A wrapper program
that passes SIGTERM on may be late if the machine is busy.
"""

KEYBOARD = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Stop signals that a user can send from the keyboard."""


def how_to_hasten(signum: int) -> str:
    """Return a note that says how to kill the workers before the end of their grace period: by sending the
    stop signal ``signum`` again. Return an empty string if sending it again has no effect.
    """
    if signum in KEYBOARD:
        return " (at once if sent again)"
    return f" (at once if sent again after {RELAY:g} s)" if signum == signal.SIGTERM else ""


class StopRequests:
    """Decides whether a stop signal is a new request to stop, or only repeats an earlier one. ``elasticctl``
    may have made the earlier one.
    """

    __slots__ = ("_came",)

    def __init__(self) -> None:
        self._came: dict[int, float] = {}

    def is_new(self, signum: int, now: float) -> bool:
        """Record a stop signal that arrived at ``now`` (monotonic seconds). Return true if it is a new
        request to stop. The first signal always is. A later signal is one if it comes from the keyboard at
        least :data:`ECHO` seconds after the first signal, or if it is a SIGTERM at least :data:`RELAY`
        seconds after the first SIGTERM.
        """
        is_first = not self._came
        self._came.setdefault(signum, now)
        if is_first:
            return True
        if signum in KEYBOARD:
            return now - min(self._came.values()) >= ECHO
        return signum == signal.SIGTERM and now - self._came[signum] >= RELAY

    def note_order(self, now: float) -> None:
        """Record that ``elasticctl`` has requested a stop. A scheduler whose hook drains a node may send
        SIGTERM next. The workers would then be killed while they save.
        """
        self._came.setdefault(0, now)

    def repeated_after(self, signum: int, now: float) -> float | None:
        """Return the seconds since the first request if this signal is a SIGTERM that came at least
        :data:`ECHO` seconds later. A user may have sent it, although it counts as the same request. Return
        ``None`` for any other signal.
        """
        after = now - min(self._came.values(), default=now)
        return after if signum == signal.SIGTERM and after >= ECHO else None


IGNORED_BY_PYTHON = frozenset((signal.SIGPIPE, signal.SIGXFSZ))
"""Signals that Python itself ignores. So it is unknown whether they were ignored before Python started."""


def ignored_signals() -> tuple[int, ...]:
    return tuple(
        int(signum)
        for signum in signal.valid_signals()
        if signum not in IGNORED_BY_PYTHON and signal.getsignal(signum) == signal.SIG_IGN
    )


def catch_signals(signums: Iterable[int]) -> SignalPipe | None:
    """Catch these signals. Return ``None`` outside of the main thread. Raises ``OSError``."""
    try:
        return SignalPipe(signums)
    except ValueError:
        return None


def without_what_was_taken_back(received: bytes) -> bytes:
    """Drop every SIGTSTP except the last one, and also that one if a SIGCONT follows it (SIG-4)."""
    last = received.rfind(signal.SIGTSTP)
    is_wanted = last > received.rfind(signal.SIGCONT)
    return bytes(
        signum for at, signum in enumerate(received) if signum != signal.SIGTSTP or (is_wanted and at == last)
    )


def suspend(supervisor: _core.Supervisor | None, signals: SignalPipe) -> None:
    """Suspend this process after Ctrl-Z. Suspend its workers, too, because the terminal does not do so."""
    if supervisor is not None:
        supervisor.suspend()
    try:
        signals.stop_this_process()
    finally:
        if supervisor is not None:
            supervisor.resume()


class SignalPipe:
    """Catches signals that are not ignored. Raises ``ValueError`` outside of the main thread."""

    def __init__(self, signums: Iterable[int]) -> None:
        self._caught: dict[int, Handler] = {}
        self._wanted: frozenset[int] = frozenset()
        self._has_pauses = False
        self._reader, self._writer = _socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        try:
            self._host_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        except ValueError:
            self._reader.close()
            self._writer.close()
            raise
        undo_in_children(self.close, self._caught)
        self.catch(signums)

    @property
    def fd(self) -> int:
        return self._reader.fileno()

    @property
    def caught(self) -> frozenset[int]:
        return frozenset(self._caught)

    def catch(self, signums: Iterable[int], *, pauses: bool = False) -> None:
        """Catch exactly these signals, and, if ``pauses``, also SIGTSTP for :meth:`stop_this_process`."""
        wanted = set(signums)
        self._has_pauses = pauses and signal.SIGTSTP not in wanted
        if self._has_pauses:
            wanted.add(signal.SIGTSTP)
        self._wanted = frozenset(wanted)
        if self._has_pauses:
            wanted.add(signal.SIGCONT)
        for signum in wanted - self._caught.keys():
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._caught[signum] = signal.getsignal(signum)
                signal.signal(signum, _wake_only)
        for signum in self._caught.keys() - wanted:
            self._restore(signum)
        if self._has_pauses:
            self.order_pauses()

    def order_pauses(self) -> None:
        """Have SIGTSTP and SIGCONT handled in the order of arrival. A new handler for SIGTSTP undoes this."""
        from elasticrs import _core

        _core.order_stop_signals()

    def take(self) -> list[int]:
        """Return the signals that have arrived since the last call, in order. Never blocks."""
        received = bytearray()
        while True:
            try:
                received += (chunk := self._reader.recv(4096))
            except BlockingIOError:
                break
            if not chunk:
                break
        if received and self._host_fd != -1:
            self._forward(bytes(received))
        if self._has_pauses:
            received[:] = without_what_was_taken_back(bytes(received))
        return [signum for signum in received if signum in self._caught and signum in self._wanted]

    def stop_this_process(self) -> None:
        """Stop this process until it is continued, unless a SIGCONT has followed the last SIGTSTP."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))
        try:
            # A SIGCONT that arrives from now on discards this SIGTSTP. `_is_continued` detects earlier ones.
            signal.pthread_kill(_thread.get_ident(), signal.SIGTSTP)
            if not self._is_continued():
                _stop_unless_continued()
            held = signal.sigtimedwait((signal.SIGTSTP,), 0)
            if held is not None and held.si_pid != os.getpid():
                # `sigtimedwait` has consumed a SIGTSTP from another process, so raise it again.
                signal.pthread_kill(_thread.get_ident(), signal.SIGTSTP)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _is_continued(self) -> bool:
        try:
            return signal.SIGCONT in self._reader.recv(1 << 16, _socket.MSG_PEEK)
        except BlockingIOError:
            return False

    def close(self, *, ignore: bool = False) -> None:
        """Restore the previous handlers, or ``ignore`` the signals if the process is about to exit."""
        if self._reader.fileno() == -1:
            return
        for signum in list(self._caught):
            if ignore:
                self._caught[signum] = signal.SIG_IGN
            self._restore(signum)
        signal.set_wakeup_fd(self._host_fd, warn_on_full_buffer=False)
        is_undone(self.close)
        self._reader.close()
        self._writer.close()

    def _restore(self, signum: int) -> None:
        previous = self._caught.pop(signum)
        # `None` means that C code installed the handler, so Python cannot restore it.
        signal.signal(signum, signal.SIG_DFL if previous is None else previous)

    def _forward(self, received: bytes) -> None:
        try:
            os.write(self._host_fd, received)
        except (BlockingIOError, BrokenPipeError):
            # The pipe is full or closed. The interpreter also drops the signal number in this case.
            return


def _stop_unless_continued() -> None:
    from elasticrs import _core

    try:
        _core.stop_unless_continued()
    except OSError:
        # The helper process could not be created. Stop anyway, because the suspended workers resume with this
        # process. Signal this thread, because a signal to the process may take effect after the return.
        signal.pthread_kill(_thread.get_ident(), signal.SIGSTOP)


def _wake_only(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing, because the interpreter has already written the signal number to the wake-up socket."""
