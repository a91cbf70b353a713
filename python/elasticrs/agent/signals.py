"""Signals of the agent, as events of its loop.

Python's handlers do nothing: the interpreter writes the number of each signal to a socket
(:func:`signal.set_wakeup_fd`), whose other end the loop watches like any other descriptor. So a signal never
interrupts a decision half-way, and none is lost, from the first moment on. What was installed before is put
back by :meth:`SignalPipe.close`.

- **SIG-1** a signal that was ignored when the agent was started (``nohup``) stays ignored, here and in the
  workers;
- **SIG-2** handlers are installed in the main thread only: elsewhere Python cannot;
- **SIG-3** a wake-up descriptor of the host application goes on getting its bytes;
- **SIG-4** a SIGTSTP does what it does to a program that does not catch it: a SIGCONT takes it back, however
  soon it comes, and many at a time are one;
- **SIG-5** a child that the host application makes by ``fork`` has what was there before: what it is sent
  never comes here (:mod:`elasticrs.forks`).
"""

from __future__ import annotations

import _socket
import _thread
import os
import signal

from elasticrs.forks import is_undone, undo_in_children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType
    from typing import TypeAlias

    from elasticrs import _core

    Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

IGNORED_BY_PYTHON = frozenset((signal.SIGPIPE, signal.SIGXFSZ))
"""The interpreter itself ignores these, so nobody can tell whether they had been ignored; workers get the
defaults."""


def ignored_signals() -> tuple[int, ...]:
    """Signals that this process was started with as ignored, as far as Python can tell."""
    return tuple(
        int(signum)
        for signum in signal.valid_signals()
        if signum not in IGNORED_BY_PYTHON and signal.getsignal(signum) == signal.SIG_IGN
    )


def catch_signals(signums: Iterable[int]) -> SignalPipe | None:
    """Catch these signals; ``None`` outside of the main thread, where that cannot be done.

    Raises:
        OSError: no descriptors.
    """
    try:
        return SignalPipe(signums)
    except ValueError:
        return None


def without_what_was_taken_back(received: bytes) -> bytes:
    """Return the signals with at most one SIGTSTP, the last one, and that only if no SIGCONT
    follows (SIG-4).
    """
    last = received.rfind(signal.SIGTSTP)
    is_wanted = last > received.rfind(signal.SIGCONT)
    return bytes(
        signum for at, signum in enumerate(received) if signum != signal.SIGTSTP or (is_wanted and at == last)
    )


def suspend(supervisor: _core.Supervisor | None, signals: SignalPipe) -> None:
    """Control-Z, taken from ``signals``: the workers are not in the terminal's process group, so they are
    stopped from here.
    """
    if supervisor is not None:
        supervisor.suspend()
    try:
        signals.stop_this_process()
    finally:
        if supervisor is not None:
            supervisor.resume()


class SignalPipe:
    """Catches signals and hands them out in order.

    Args:
        signums: what to catch; ignored ones are left alone.

    Raises:
        ValueError: this is not the main thread.
        OSError: no descriptors.
    """

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
        """Readable while :meth:`take` has something."""
        return self._reader.fileno()

    @property
    def caught(self) -> frozenset[int]:
        """The signals that are caught."""
        return frozenset(self._caught)

    def catch(self, signums: Iterable[int], *, pauses: bool = False) -> None:
        """Catch these from now on, and no others; with ``pauses`` SIGTSTP as well, as a request for
        :meth:`stop_this_process`, if it is not one of them.
        """
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
        """To be called again by whoever has given SIGTSTP another handler."""
        from elasticrs import _core

        _core.order_stop_signals()

    def take(self) -> list[int]:
        """The signals that came since the last call, in order; never blocks."""
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
        """Stop, and return when this process goes on.

        That is at once if a SIGCONT has come since the SIGTSTP that was taken last (SIG-4).
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))
        try:
            # The kernel discards it on the first SIGCONT from here on; those before are in the pipe.
            signal.pthread_kill(_thread.get_ident(), signal.SIGTSTP)
            if not self._is_continued():
                _stop_unless_continued()
            held = signal.sigtimedwait((signal.SIGTSTP,), 0)
            if held is not None and held.si_pid != os.getpid():
                # It came after the SIGCONT.
                signal.pthread_kill(_thread.get_ident(), signal.SIGTSTP)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _is_continued(self) -> bool:
        try:
            return signal.SIGCONT in self._reader.recv(1 << 16, _socket.MSG_PEEK)
        except BlockingIOError:
            return False

    def close(self, *, ignore: bool = False) -> None:
        """Put everything back as it was. Idempotent.

        With ``ignore`` the caught signals are ignored from now on instead: for a process that is about to
        exit.
        """
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
        # None: the handler was installed by C code, and Python cannot put it back.
        signal.signal(signum, signal.SIG_DFL if previous is None else previous)

    def _forward(self, received: bytes) -> None:
        try:
            os.write(self._host_fd, received)
        except (BlockingIOError, BrokenPipeError):
            # Full or closed: the interpreter drops the byte as well.
            return


def _stop_unless_continued() -> None:
    from elasticrs import _core

    try:
        _core.stop_unless_continued()
    except OSError:
        # There are too many processes, and the workers stand still already. Sent to this thread: a signal to
        # the process may stop it only after this call has returned.
        signal.pthread_kill(_thread.get_ident(), signal.SIGSTOP)


def _wake_only(_signum: int, _frame: FrameType | None) -> None:
    """The byte in the wake-up descriptor is all that is needed."""
