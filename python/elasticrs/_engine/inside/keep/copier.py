"""The one thread that copies the state of a training program into the agent's memory.

It sleeps until it gets a datagram: the agent orders a copy because it is about to stop this process, or
another thread of the program requests one. While it sleeps, it does not hold the GIL.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from _thread import start_new_thread
from math import ceil
from operator import add, and_, eq, le
from time import monotonic_ns

import torch

from elasticrs._core import copy_and_sum
from elasticrs._engine.inside.handover import without_signals
from elasticrs._engine.inside.keep import layout, trees
from elasticrs._engine.inside.keep.choice import NEAR
from elasticrs._engine.inside.keep.file import OffError, round_up, say, sizes_as_text
from elasticrs._engine.inside.keep.layout import Agreed, AgreedState, Answer, Head, Slot, Why
from elasticrs._engine.inside.keep.schedule import slots_to_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from mmap import mmap

    from elasticrs._engine.inside.keep.file import KeepFile, SlotRegion
    from elasticrs._engine.inside.keep.schedule import Schedule
    from elasticrs._engine.inside.keep.state import Boundary, Parts

_ORDER = b"keep"
"""Datagram that the agent sends: copy the state now, because this process is about to be stopped."""

_RESERVE, _PERIODIC, _OWN, _END = b"reserve", b"periodic", b"own", b"end"
"""Datagrams that ask the copying thread to allocate memory, copy periodically or after an error, or end."""

_CREDENTIALS = socket.CMSG_SPACE(12)
_PATIENCE = 0.3
"""Minimum seconds for which a copy that the agent has ordered waits for the end of the current step. It waits
longer if the optimizer took long in the step before.
"""

_CHANGE_PATIENCE = 0.1
"""Seconds for which such a copy waits for the optimizer to begin, if the backward pass has ended."""

_SETTLING = 0.3
"""Maximum seconds to wait for news of what other nodes have copied, before a copy that the agent ordered."""

_LIMIT = 300.0
"""Seconds after which the training no longer waits for a copy of its state, and no more copies are made."""

_PACE = 1_000_000_000
"""Assumed speed of a copy, in bytes per second, until the first copy has been timed."""

_LEAST_PACE_MS = 10

_PACES_OF_LIMIT = 3
"""The agent waits for a copy at most for this multiple of the duration that it has been told."""

_MOST_KILLED = 3
"""Number of copies in a row after which no more are made, if a signal ends the process that makes each."""

_INDEX_ROOM = 16384
"""Minimum bytes that are left free behind the index of a copy (random numbers and the like, and descriptions
of the tensors), so that the index of the next copy may be longer.
"""


class _Target:
    """The memory of a slot (a place for one copy in the rank's file), to copy the tensors into."""

    def __init__(self, slot: SlotRegion, parts: Parts, data_at: int) -> None:
        self.slot, self.parts, self.data_at, self.map = slot, parts, data_at, slot.map
        whole = torch.frombuffer(slot.map, dtype=torch.uint8)
        self.data = whole[data_at : data_at + parts.size]
        self._sources: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        """Tensors whose memory is copied as it is, the addresses for their copies, and their bytes."""
        self._pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """By device, the views to copy into, and those tensors of which torch makes the copies."""
        for tensor, offset in zip(parts.tensors, parts.offsets, strict=True):
            size, strides = tensor.numel() * tensor.element_size(), trees.strides_of(tensor)
            if not size:
                continue
            if trees.is_in_one_piece(tensor):
                self._sources.append(tensor)
                self._addresses.append(self.data.data_ptr() + offset)
                self._sizes.append(size)
            else:
                targets, sources = self._pairs.setdefault(tensor.device, ([], []))
                facts = trees.dtype_name(tensor.dtype), tuple(tensor.shape), strides
                targets.append(trees.lay_out(self.data[offset : offset + size], *facts))
                sources.append(tensor)

    def fits(self, parts: Parts, index: bytes) -> bool:
        is_same = self.parts is parts and self.map is self.slot.map
        return is_same and layout.HEAD_SIZE + len(index) <= self.data_at

    def copy(self) -> int:
        """Copy all tensors. Return the checksum of the copy.

        Raises:
            ChildProcessError: a signal ended the process that made the copy.
            _MemoryError: the program has shrunk the memory of a tensor, or is replacing it at this moment.
        """
        # Look up the addresses for each copy, because the program may have given a tensor another memory.
        # Hold that memory during the copy, so that it is not freed if the program does so again.
        storages = list(map(torch.Tensor.untyped_storage, self._sources))
        begins = list(map(torch.Tensor.data_ptr, self._sources))
        starts = list(map(torch.UntypedStorage.data_ptr, storages))
        lengths = list(map(len, storages))
        # Check both ends, because another thread may give a tensor another memory between the two look-ups.
        are_before = map(le, starts, begins)
        are_after = map(le, map(add, begins, self._sizes), map(add, starts, lengths))
        self._check(map(and_, are_before, are_after))
        # Copy all tensors in one call, which releases the GIL. A loop in Python would take the GIL for each
        # tensor, and slow down the training.
        digest = copy_and_sum(begins, self._addresses, self._sizes)
        # A program that resizes the memory of a tensor frees the old memory, although it is held here.
        self._check(map(eq, starts, map(torch.UntypedStorage.data_ptr, storages)))
        self._check(map(eq, lengths, map(len, storages)))
        if digest is None:
            raise _MemoryError(None)
        for targets, sources in self._pairs.values():
            torch._foreach_copy_(targets, sources)
        return digest_of(self.data) if self._pairs else digest

    def _check(self, are_right: Iterable[bool]) -> None:
        for tensor, is_right in zip(self._sources, are_right, strict=True):
            if not is_right:
                raise _MemoryError(tensor)


class _MemoryError(Exception):
    """A tensor is larger than its storage, or the program has replaced the storage during the copy."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        super().__init__()
        self.tensor = tensor
        """The tensor; ``None`` if its memory could not be read, but was not replaced by other memory."""


class Copier:
    """Copies the training state at the end of a step into one of the two slots of this rank's file.

    Args:
        file: the file, in the agent's memory, in which this rank keeps copies of its state.
        facts: words in the head of a slot that are the same for all copies, by their numbers.
        budget: bytes that both slots may take together.
        grace: maximum seconds for which the agent waits for a copy before it stops this process.
        notices: abstract name of the socket on which the agent gets messages of this process.
        ranks: knows from the files of other ranks what they have ended, copied and restored.
    """

    def __init__(
        self,
        file: KeepFile,
        facts: dict[int, int],
        budget: int,
        grace: float,
        notices: str,
        ranks: Schedule,
    ) -> None:
        self._file, self._facts, self._budget, self._grace = file, facts, budget, grace
        self._notices, self._ranks = notices, ranks
        self._live = threading.Lock()
        """Held while a copy reads the program's tensors, and while the training says that they change."""
        self._ended = threading.Condition(self._live)
        self._boundary: Boundary | None = None
        self._is_changing = True
        self._changed_ns = self._change_ns = 0
        """Time at which the present change of the state began (0 without one), and duration of the last."""
        self.has_exchanged = False
        """True if the step can end without the ranks of other nodes: the gradients have been added up."""
        self.is_ordered = self._awaits_stop = False
        """The first is true from the agent's first order on, which it gives because it is about to stop this
        process. The second is true from the copy after an order until the training has waited for its stop.
        """
        self._hands_over = False
        """True if another node has to get the copy that the agent orders next, before the order is answered.
        """
        self._is_copied = threading.Event()
        """Set while no periodic copy reads the tensors of the program."""
        self._is_copied.set()
        self._own_copy = threading.Event()
        self._has_ended = threading.Event()
        self._targets: dict[int, _Target] = {}
        self._touched: dict[int, mmap | None] = {}
        self._check_step: int | None = None
        self._told_pace = _LEAST_PACE_MS
        self._killed = 0
        """Number of copies in a row during which a signal ended the process that made the copy."""
        self._is_joined = self.is_off = False
        self.why_off = ""
        self.is_blind = False
        """True if tensors may change without a call of :meth:`change`. Then no copy is made when the agent is
        about to stop this process, and the training waits while a periodic copy reads the tensors.
        """
        self._older: int | None = None
        """Step of the copy of :meth:`protect`."""
        self._is_young_until = 0
        self._sequence = max(slot.sequence for slot in file.slots)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")
        self._name: bytes = self._socket.getsockname()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._sender.settimeout(1)
        with without_signals():
            start_new_thread(self._run, ())

    # What the training thread calls.

    def change(self) -> None:
        """Wait until no periodic copy reads the state. Then note that the program is about to change it."""
        self._wait_for_copy()
        while not self._begin_change():
            self.await_stop()
        self._changed_ns = monotonic_ns()

    def _begin_change(self) -> bool:
        with self._live:
            if not self._awaits_stop:
                self._is_changing = True
                self._ended.notify_all()
            return self._is_changing

    def await_stop(self) -> None:
        """Wait until this process is stopped, if the agent has ordered a copy for that. Otherwise, the
        training would end steps that are lost. Do not wait longer than the agent waits for copies. Do not
        wait at all if the program handles SIGTERM, because it may want to end its step before it exits.
        """
        if self._awaits_stop:
            if not callable(signal.getsignal(signal.SIGTERM)):
                time.sleep(self._limit())
            self._awaits_stop = False

    def end_step(self, boundary: Boundary, *, is_due: bool, is_check: bool) -> None:
        """Record that a step has ended, after which the state is ``boundary``. Begin a periodic copy if
        ``is_due``. If ``is_check`` is true, the ranks use this copy to find out if they all have the same
        state.
        """
        self._wait_for_copy()
        if self.is_off:
            return
        is_first = self._boundary is None
        if self._changed_ns:
            self._change_ns, self._changed_ns = monotonic_ns() - self._changed_ns, 0
        with self._live:
            self._boundary, self._is_changing, self.has_exchanged = boundary, False, False
            self._ended.notify_all()
        if is_first:
            self._ask(_RESERVE)
        if is_check:
            self._check_step = boundary.step
        if is_due:
            self._is_copied.clear()
            if not self._ask(_PERIODIC):
                self._note_copy(boundary, is_kept=False)
                self._is_copied.set()
                self._file.words[Head.FAILED_COPIES] += 1
            elif self.is_blind:
                self._wait_for_copy()
        if self.is_ordered:
            # The program goes on although it is being stopped. Keep each step with which it may end.
            self.keep_own()

    def go_blind(self, reason: str) -> None:
        """Make no copy any more when the agent is about to stop this process. Tell the user the reason, of
        which the subject is the state.
        """
        if not self.is_blind:
            self.is_blind = True
            self._ranks.has_copies_at_failure = False
            say(
                f"this rank cannot copy its state at a failure: {reason}. Periodic copies go on, so a failure"
                " may cost the steps since the last one"
            )
            self.leave()

    def turn_off(self, reason: str) -> None:
        """Make no copies of any kind from now on, and tell the user the reason."""
        if not self.is_off:
            self.is_off, self.why_off = True, reason
            say(f"Keep is off: {reason}")
            self._file.tell(reason)
            self._ranks.turn_off(reason)
            self.leave()

    def is_idle(self) -> bool:
        """Return true if no periodic copy is reading the tensors of the program."""
        return self._is_copied.is_set()

    def keep_own(self) -> None:
        """Copy the state, because this process is about to end. Wait for that a limited time."""
        if self._is_joined and self._grace > 0:
            self._own_copy.clear()
            if self._ask(_OWN):
                self._own_copy.wait(self._limit())

    def _limit(self) -> float:
        """Return how many seconds the agent waits for this process's copy before it stops the process."""
        return min(self._grace, max(0.5, _PACES_OF_LIMIT * self._told_pace / 1000))

    def wait_until_complete(self, limit: float) -> None:
        """Wait until the copy that was begun last can be restored, at most ``limit`` seconds."""
        self._own_copy.clear()
        # The copying thread handles this request after the copy, and finds nothing left to copy.
        if self._ask(_OWN):
            self._own_copy.wait(limit)

    def leave(self) -> None:
        """Tell the agent to order no more copies of this process before it stops the process."""
        if self._is_joined:
            self._is_joined = False
            self._notify(b"keep left")

    def hand_over_next(self) -> None:
        """Answer the agent's next order only when another node has this rank's copy, or after ``grace``
        seconds, because a node is leaving the job. Call this when all ranks stand at the same step.
        """
        self._hands_over, self._told_pace = True, ceil(1000 * self._grace / _PACES_OF_LIMIT)
        if self._is_joined:
            self._tell_pace()

    def finish(self, limit: float) -> None:
        """End the copying thread, after the copy that it is making. Wait at most ``limit`` seconds for it."""
        self.leave()
        if self._ask(_END):
            self._has_ended.wait(limit)
        self.is_off = True
        self._sender.close()

    def _wait_for_copy(self) -> None:
        if not self._is_copied.is_set():
            begun = monotonic_ns()
            if not self._is_copied.wait(_LIMIT):
                self.turn_off(f"a copy takes longer than {_LIMIT:.0f} s")
            self._file.words[Head.BLOCKED_NS] += monotonic_ns() - begun

    def _ask(self, message: bytes) -> bool:
        try:
            self._sender.sendto(message, self._name)
        except OSError:
            return False
        return True

    # What the copying thread runs.

    def _run(self) -> None:
        own, users = os.getpid(), (0, os.geteuid())
        try:
            while True:
                message, data, _, _ = self._socket.recvmsg(64, _CREDENTIALS)
                if data:
                    pid, user, _ = (int.from_bytes(data[0][2][at : at + 4], "little") for at in (0, 4, 8))
                    if message == _ORDER and user in users:
                        self._obey()
                    elif pid == own and message == _END:
                        self._socket.close()
                        self._has_ended.set()
                        return
                    elif pid == own:
                        self._serve(message)
        except OSError as error:
            # The program has closed the socket of this thread, or the interpreter is ending.
            self.turn_off(f"the socket for the agent's orders is lost ({error.strerror})")

    def _obey(self) -> None:
        self.is_ordered = True
        patience = max(_PATIENCE, 1.5 * self._change_ns / 1e9)
        generations, boundary = self._ranks.generations, self._boundary
        if not self._hands_over or generations is None or boundary is None or not self._is_stop_planned():
            self._file.words[Head.ANSWER] = self._try_copy(Why.AT_DEATH, patience)
        else:
            until = time.monotonic() + self._limit()
            with self._live:
                # All ranks stand at the same step, so the training must not go on during the wait below.
                self._awaits_stop = not self._is_changing
            generations.begin_last(boundary.step, self._limit())
            self._file.words[Head.ANSWER] = self._try_copy(Why.AT_DEATH, patience)
            is_kept = any(slot.complete_step == boundary.step for slot in self._file.slots)
            self._note_copy(boundary, is_kept=is_kept)
            generations.await_settled(until - time.monotonic())
        self._notify(b"keep answered")

    def _serve(self, message: bytes) -> None:
        if message == _RESERVE:
            self._reserve()
        elif message == _PERIODIC:
            boundary = self._boundary
            try:
                answer = self._try_copy(Why.PERIODIC, 0)
            finally:
                # Let the training continue: nothing reads its tensors any more.
                self._is_copied.set()
            if boundary is not None:
                self._note_copy(boundary, is_kept=answer == Answer.KEPT)
            self._reserve()
        elif message == _OWN:
            self._file.words[Head.ANSWER] = self._try_copy(Why.AT_DEATH, 0)
            self._own_copy.set()

    def _note_copy(self, boundary: Boundary, *, is_kept: bool) -> None:
        if self._ranks.generations is not None:
            self._ranks.generations.note_copy(boundary.step, is_kept=is_kept)

    def _try_copy(self, why: int, patience: float) -> int:
        """Copy the state, if that is possible now. Return the result as a code of :class:`.Answer`."""
        try:
            answer = self._copy(why, patience)
        except OSError as error:
            self.turn_off(f"there is not enough memory ({error.strerror})")
            answer = Answer.NO_MEMORY
        except OffError as error:
            self.turn_off(str(error))
            answer = Answer.NO_MEMORY
        # A failed copy must not end the training, whatever went wrong.
        except Exception as error:
            self.turn_off(f"a copy failed: {error!r}")
            answer = Answer.FAILED
        if answer != Answer.KEPT:
            self._file.words[Head.FAILED_COPIES] += 1
        return answer

    def _copy(self, why: int, patience: float) -> int:
        words = self._file.words
        with self._live:
            if patience and self._boundary is not None:
                self._ended.wait_for(lambda: self._is_changing or not self.has_exchanged, _CHANGE_PATIENCE)
                self._ended.wait_for(lambda: not self._is_ending_step(), patience)
                self._awaits_stop = not self._is_changing
            boundary = self._boundary
            if boundary is None or self.is_off or (why == Why.AT_DEATH and self.is_blind):
                return Answer.NOTHING
            if any(slot.complete_step == boundary.step for slot in self._file.slots):
                return Answer.KEPT
            if self._is_changing:
                return Answer.CHANGING
            if self._ranks.do_starts_differ():
                # Either some ranks have not restored their state yet, and need the copies that would be
                # overwritten. Or the ranks have restored different steps, so their copies would be a mixture
                # of two trainings.
                return Answer.APART
            begun = monotonic_ns()
            if self._has_changed(boundary):
                return Answer.TENSOR_CHANGED
            boundary.parts = boundary.parts.up_to_date()
            index = boundary.index()
            number = self._free_slot(boundary.step, is_at_death=why == Why.AT_DEATH)
            if number is None:
                return Answer.KEPT
            target = self._target(number, boundary.parts, index)
            parts, slot = boundary.parts, target.slot
            slot.begin(
                index,
                target.data_at,
                {
                    **self._facts,
                    Slot.STEP: boundary.step,
                    Slot.LAYOUT: parts.layout,
                    Slot.DATA_LENGTH: parts.size,
                    Slot.WHY: Why.AT_STOP if why == Why.AT_DEATH and self._is_stop_planned() else why,
                },
            )
            try:
                with torch.no_grad():
                    digest = target.copy()
            except (ChildProcessError, _MemoryError) as error:
                slot.drop()
                return self._note_failure(error, boundary)
            if self._has_changed(boundary):
                slot.drop()
                return Answer.TENSOR_CHANGED
        self._sequence += 1
        slot.complete(digest, self._sequence)
        self._killed = 0
        if boundary.step == self._check_step:
            words[Head.CHECK_DIGEST], words[Head.CHECK_STEP] = digest, boundary.step + 1
        words[Head.COPIES] += 1
        words[Head.LAST_BYTES], words[Head.LAST_NS] = parts.size, monotonic_ns() - begun
        return Answer.KEPT

    def _note_failure(self, error: ChildProcessError | _MemoryError, boundary: Boundary) -> int:
        """Record why a copy failed, and return the matching :class:`.Answer` code. Raise :class:`OffError` if
        no more copies are to be made.
        """
        if isinstance(error, _MemoryError):
            name = "a tensor" if error.tensor is None else trees.spell(boundary.parts.path_of(error.tensor))
            reason = f"the memory of {name} is smaller than the tensor, or was replaced during a copy"
            if self.is_blind:
                raise OffError(reason) from error
            self.go_blind(reason)
            return Answer.TENSOR_CHANGED
        self._killed += 1
        killed = "the process that makes the copy was killed, perhaps because memory is short"
        if self._killed == _MOST_KILLED:
            raise OffError(f"{killed}, in {_MOST_KILLED} copies in a row") from error
        say(f"this rank has no copy of step {boundary.step}: {killed}; the next copy is tried")
        return Answer.KILLED

    def _is_ending_step(self) -> bool:
        """Return true if this rank will soon complete a step. That is so if its optimizer is changing the
        state, or if another rank has already completed the step.
        """
        boundary = self._boundary
        return self._is_changing or (boundary is not None and boundary.step < self._ranks.newest_ended())

    def _is_stop_planned(self) -> bool:
        """Return true if the agent has announced a signal to all ranks, and no rank has failed since then."""
        return self._file.words[Agreed.STATE] != AgreedState.NONE

    def _has_changed(self, boundary: Boundary) -> bool:
        path = boundary.parts.changed(boundary.versions)
        if path is not None:
            self.go_blind(f"{trees.spell(path)} also changes outside the steps of its optimizer")
        return path is not None

    def protect(self, older: int | None, restored: int) -> None:
        """Do not overwrite the copy of step ``older`` in the next :data:`NEAR` steps after ``restored``, if
        that is possible. If the restored state makes the training fail again, all ranks go back to ``older``.
        """
        self._older, self._is_young_until = older, restored + NEAR

    def _free_slot(self, step: int, *, is_at_death: bool) -> int | None:
        """Return the slot of this rank's file for the next copy, which is of ``step``; ``None`` if both slots
        have to be kept.

        The other slots keep a step that all ranks can restore, and if possible the one of
        :meth:`protect`. The latter is not done if each rank has only a part of the state: if a
        rank died during its copy, all would then have to go back that far.
        """
        slots = self._file.slots
        if self._ranks.protected() is not None:
            if not (free := self._unprotected()):
                self._ranks.await_settled(_SETTLING)
                free = self._unprotected()
            return min(free, key=lambda each: slots[each].sequence, default=None)
        is_replicated = self._ranks.is_replicated()
        is_young = is_replicated and step < self._is_young_until
        held = [slot.complete_step for slot in slots]
        order = slots_to_use(held, self._older if is_young else None)
        if is_at_death and not is_replicated:
            # Another rank may still complete its copy of the newest step that this rank has copied.
            del order[1:]
        for number in order:
            copied = held[number]
            if copied is None:
                return number
            self._file.words[Head.GIVEN_UP] = copied + 1
            can_spare = self._ranks.can_spare(copied)
            # Without a look at the other ranks, suppose that each of them has completed its copies, because
            # its training waits for them. A rank that has died may not have done so.
            if can_spare or (can_spare is None and (is_replicated or not is_at_death)):
                return number
            self._file.words[Head.GIVEN_UP] = 0
        return None

    def _unprotected(self) -> list[int]:
        protected = (self._ranks.protected() or set()) - {None}
        return [each for each, slot in enumerate(self._file.slots) if slot.complete_step not in protected]

    def _target(self, number: int, parts: Parts, index: bytes) -> _Target:
        target = self._targets.get(number)
        if target is not None and target.fits(parts, index):
            return target
        slot = self._file.slots[number]
        data_at = round_up(layout.HEAD_SIZE + len(index) + len(index) // 4 + _INDEX_ROOM, layout.PAGE)
        if layout.SLOTS * (data_at + parts.size) > self._budget:
            need, allowed = sizes_as_text(layout.SLOTS * (data_at + parts.size), self._budget)
            raise OffError(f"two copies need {need}, and --keep-memory allows this rank {allowed}")
        self._targets.pop(number, None)
        slot.reserve(data_at + parts.size)
        target = self._targets[number] = _Target(slot, parts, data_at)
        words = slot.words
        assert words is not None
        if (words[Slot.LAYOUT], words[Slot.DATA_AT]) != (parts.layout, data_at):
            slot.drop()
            # Fill the gaps between the tensors with zeros, because the checksum includes the gaps, and equal
            # states must have equal checksums.
            target.data.zero_()
        return target

    def _reserve(self) -> None:
        """Allocate memory for two copies of the state in advance, because that takes long. Do not touch the
        copies that exist.
        """
        boundary = self._boundary
        if boundary is None or self.is_off:
            return
        try:
            for number, slot in enumerate(self._file.slots):
                if not self._is_copied.is_set():
                    # The training is waiting for a copy. This method is called again when that copy is
                    # complete.
                    break
                if slot.complete_step is None:
                    self._target(number, boundary.parts, boundary.index())
                elif slot.map is not None and slot.map is not self._touched.get(number):
                    # An earlier process of this rank has allocated these pages. Read a byte of each page, so
                    # that the kernel maps it into this process.
                    torch.frombuffer(slot.map, dtype=torch.uint8)[:: layout.PAGE].sum()
                self._touched[number] = slot.map
        except OSError as error:
            self.turn_off(f"there is not enough memory ({error.strerror})")
        except OffError as error:
            self.turn_off(str(error))
        self._join()

    def _join(self) -> None:
        """Tell the agent that this process can copy its state on an order, and how long that should take."""
        boundary, words = self._boundary, self._file.words
        if self.is_blind or self.is_off or self._hands_over or boundary is None:
            return
        expected = words[Head.LAST_NS] // 1_000_000 or boundary.parts.size * 1000 // _PACE
        pace = max(_LEAST_PACE_MS, expected + self._change_ns // 1_000_000)
        if not self._is_joined or not self._told_pace / 1.5 <= pace <= self._told_pace * 1.5:
            self._told_pace, self._is_joined = pace, True
            self._tell_pace()

    def _tell_pace(self) -> None:
        self._notify(b"keep joined %s %d" % (self._name[1:].hex().encode(), self._told_pace))

    def _notify(self, message: bytes) -> None:
        if self._notices:
            try:
                self._sender.sendto(message, f"\0{self._notices}")
            except OSError as error:
                # If the message was `keep joined`, the agent will not order this process to copy its state.
                # If it was an answer to such an order, the agent waits until the end of --keep-grace.
                say(f"the agent cannot be told about copies of this rank ({error.strerror})")


def digest_of(data: torch.Tensor) -> int:
    """Return the checksum of the data of a copy: the sum of its 8-byte words, modulo 2 to the power of 64."""
    return int(data.view(torch.int64).sum()) % (1 << 64)
