"""Follows the steps of a training, has its state copied into the agent's memory, and restores it."""

from __future__ import annotations

import atexit
import os
import sys
from functools import wraps
from time import monotonic, monotonic_ns

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticrs._engine.inside.keep import choice, layout, nodes, restore, trees
from elasticrs._engine.inside.keep.copier import Copier
from elasticrs._engine.inside.keep.file import (
    DamagedCopyError,
    ForeignError,
    KeepFile,
    OffError,
    UnusableError,
    say,
    say_for_all,
)
from elasticrs._engine.inside.keep.layout import Agreed, Head, Slot
from elasticrs._engine.inside.keep.schedule import Schedule
from elasticrs._engine.inside.keep.state import Collector
from elasticrs._engine.job import phrases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Any, Literal, TypeAlias

    from elasticrs._engine.inside.keep.peers import Peers
    from elasticrs._engine.inside.keep.reader import Reader
    from elasticrs._engine.inside.keep.state import Boundary
    from elasticrs._engine.inside.keep.trees import Path

    Restored: TypeAlias = tuple[int, Literal["memory", "peer", "disk"], bool, tuple[int, ...], bool, int]
    """The values of :class:`elasticrs.keep.Source`, which tells what was loaded."""

_REFUSAL_LIMIT = 10.0
"""Maximum seconds for which a rank that cannot load its copy waits to see whether other ranks load theirs."""

_EXIT_LIMIT = 10.0
"""Maximum seconds for which the program, when it exits, waits for a copy that is being made."""


_HAND_OVER_LIMIT = 3.0
"""Maximum seconds for which a rank that gets no order to copy its state waits until another node has its
copy. The agent does not wait for the rank much longer.
"""

_active: Keeper | None = None
"""The object that keeps the state of this process; ``None`` without one."""
_why_unusable = ""
"""Why this process cannot use the agent's file; empty if it can, or if the file is not for this process."""
_is_used = False
"""True once a step has ended in this process. Then it no longer restores the copy that the agent chose."""
_agreement: nodes.Agreement | None = None
"""The agreement of the job's nodes on the step to restore; ``None`` before it is made."""
_trainings = 0
"""Number of trainings of this process that have told the other nodes whether they compare copies."""
_has_asked = False
"""True if the program has asked for a kept state, by :meth:`Keeper.restore` or :func:`peek`."""


def begin(objects: Mapping[str, Any], values: dict[str, Any], every: int | None, mode: int) -> Keeper | None:
    """Return a new :class:`Keeper` of this process. If that fails, tell the user why, and return ``None``."""
    global _active, _trainings, _why_unusable  # noqa: PLW0603 -- one for each process
    _why_unusable = ""
    try:
        if _active is not None and not _active.is_closed:
            raise ForeignError(
                "this process already has a Keep object, which goes on; give all objects to that one"
            )
        file = KeepFile(os.environ[layout.VARIABLE])
        plan = file.plan()
        if not plan["off"]:
            _active = Keeper(file, plan, objects, values, every, mode)
            return _active
        off = plan["off"]
        say_for_all(f"Keep is off: {off}", "LOCAL_RANK")
    except ForeignError as error:
        say(f"Keep is off: {error}")
        return None
    # A failure to keep the state must not end the training, whatever went wrong.
    except Exception as error:
        is_known = isinstance(error, OffError)
        off = _why_unusable = str(error) if is_known else f"the agent's memory cannot be used: {error!r}"
        say(f"Keep is off: {off}")
    if nodes.is_job_of_several_nodes():
        nodes.tell_off(off, f"/{_trainings}")
        _trainings += 1
    return None


def check_start(other: int | None = None) -> None:
    """Check that this rank may begin without a kept state, because :func:`begin` has returned ``None``.
    ``other`` is the step of a state that the program has, such as a checkpoint.

    Raises:
        UnusableError: this rank cannot use its file, and other ranks may restore a step.
        RuntimeError: the nodes of the job could not agree on a step.
    """
    if not _why_unusable or _is_used or os.environ["WORLD_SIZE"] == "1":
        return
    if nodes.is_job_of_several_nodes():
        step = nodes.agreed_step()
    else:
        kept = os.environ.get(layout.KEPT_VARIABLE)
        step = None if kept is None or choice.why_other(int(kept), other) else int(kept)
    if step is not None:
        raise UnusableError(
            f"elasticrs: keep: this rank cannot restore step {step}, but other ranks may do so:"
            f" {_why_unusable}. This attempt ends, because the ranks would train from different steps"
        )


def close() -> None:
    """Close the keeper of this process, and forget it. The process can then make another one."""
    global _active  # noqa: PLW0603 -- one for each process
    if _active is not None:
        _active.close()
        _active = None


def keep_own() -> None:
    """Copy the state of this process, because an error ends its program. Wait for that a limited time."""
    if _active is not None:
        _active.keep_own()


def keep_before_stop() -> None:
    """Copy the training state of this process, because the process is about to be stopped between two steps.
    Do so only if the state could not be copied later, when the agent orders a copy.
    """
    if _active is not None:
        _active.keep_before_stop()


def _close_in_child() -> None:
    """Let a process that is forked from this one keep nothing. The thread that copies is not in it."""
    if _active is not None:
        _active.is_closed = True


os.register_at_fork(after_in_child=_close_in_child)


class Peeked:
    """What :func:`peek` has read of a copy of the state: ``step`` is the step to which the training returns.
    ``objects`` are the states of the objects that are neither modules nor optimizers, without large tensors.
    ``shapes`` are the shapes of tensors, by the keys under which these are in the state.
    """

    def __init__(self, kept: restore.Kept) -> None:
        small = trees.decode(kept.small)
        self.step = kept.step
        self.objects: dict[str, Any] = {**small["objects"], **kept.common}
        self.shapes: dict[Path, tuple[int, ...]] = {path: shape for path, _, shape, *_ in kept.entries}
        self.shapes |= {path: tuple(each.shape) for path, each in small["volatile"].items()}


def peek() -> Peeked | None:
    """Read parts of the state that :meth:`Keeper.restore` would load, but load nothing. Return ``None`` if
    there is no such state.

    Raises:
        RuntimeError: the nodes of the job could not agree on a step.
    """
    global _has_asked  # noqa: PLW0603 -- one for each process
    _has_asked = True
    place = os.environ.get(layout.VARIABLE)
    if place is None or _is_used:
        return None
    try:
        file = KeepFile(place)
        plan = _agreed_plan(file, file.plan(), None)
        if plan["off"] or plan["step"] is None:
            return None
        large = plan["large"]
        kept = restore.Kept(KeepFile(large["file"]), large["slot"], plan["step"], large["sequence"])
    except (OffError, restore.DamagedError):
        return None  # `Keeper.restore` will tell the user why.
    return Peeked(kept)


def _agreed_plan(file: KeepFile, plan: Mapping[str, Any], other: int | None) -> Mapping[str, Any]:
    """Return the plan, in which the agent tells this worker what to restore. On several nodes, the workers
    first agree on a step, once per process. If the program has a newer state, that of step ``other``, the
    plan has no step.

    Raises:
        OffError: the nodes have no key-value store for their agreement.
        RuntimeError: a worker of another node did not take part in time, or no node could send a copy.
    """
    global _agreement  # noqa: PLW0603 -- one for each process
    if plan["off"]:
        return plan
    if "holdings" in plan:
        if _agreement is None:
            _agreement = nodes.agree(plan, file, other)
        return _agreement.plan
    why = choice.why_other(plan["step"], other)
    return {**plan, "step": None, "why": why, "reader": None} if why else plan


def _notice_backward(before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Have two functions called around each backward pass of torch. Return a function that ends this."""
    real = torch.autograd.backward

    @wraps(real)
    def backward(*args: Any, **kwargs: Any) -> None:
        is_seen = not torch.compiler.is_compiling()
        if is_seen:
            before()
        real(*args, **kwargs)
        if is_seen:
            after()

    def end() -> None:
        if torch.autograd.backward is backward:
            torch.autograd.backward = real

    torch.autograd.backward = backward
    return end


def _text_of_kept(plan: Mapping[str, Any]) -> str:
    """Return a noun phrase for the state that was kept for this attempt; empty if no state was kept."""
    if plan["step"] is not None:
        return f"the kept step {plan['step']}"
    holdings = [each["holding"] for each in plan.get("holdings", ()) if each is not None]
    return "the kept state" if any(choice.Holding.of_json(each).slots for each in holdings) else ""


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of :class:`Keeper`. If it fails, turn the keeping of the state off, so that the training
    goes on. Do nothing if it is off, or in a child that is forked from the process.
    """

    @wraps(method)
    def call(self: Keeper, *arguments: Any, **named: Any) -> None:
        if self._copier.is_off or self.is_closed:
            return
        try:
            method(self, *arguments, **named)
        except OffError as error:
            self._copier.turn_off(str(error))
        except OSError as error:
            self._copier.turn_off(f"there is not enough memory ({error.strerror})")
        except Exception as error:
            self._copier.turn_off(f"the state cannot be read: {error!r}")
        self._tell_if_off()

    return call


class Keeper:
    """Keeps the training state of a program: has it copied at the ends of steps, and restores it.

    Args:
        file: the agent's file for the state of this rank.
        plan: what the agent tells this rank to restore.
        objects: the objects with the state, such as modules and optimizers, by name.
        values: further plain values of the program.
        every: number of steps from one periodic copy to the next; 0 for none; ``None`` for a number that
            depends on how long copies block the training.
        mode: a code of :class:`.Mode`: whether all ranks have the same state.

    Raises:
        OffError: the state cannot be kept.
    """

    def __init__(
        self,
        file: KeepFile,
        plan: Mapping[str, Any],
        objects: Mapping[str, Any],
        values: dict[str, Any],
        every: int | None,
        mode: int,
    ) -> None:
        self._mode, self._every = mode, every
        self._peers: Peers | None = None
        self.is_closed = False
        """True if this object does nothing any more, also in a child that is forked from its process."""
        self._file, self._plan = file, plan
        self._world = int(os.environ["WORLD_SIZE"])
        rank, attempt = int(os.environ["RANK"]), self._plan["attempt"]
        self._file.join(rank, self._world, attempt, mode)
        self._collector, self._values = Collector(objects, values), values
        has_other_nodes = nodes.is_job_of_several_nodes()
        self._schedule = Schedule(
            self._file.words, plan["files"], rank, every, mode, has_other_nodes=has_other_nodes
        )
        facts = {Slot.RANK: rank, Slot.WORLD: self._world, Slot.ATTEMPT: attempt}
        notices = os.environ.get("ELASTICRS_NOTICES", "")
        memory, grace = self._plan["memory"], self._plan["grace"]
        self._copier = Copier(self._file, facts, memory, grace, notices, self._schedule)
        self._at: int | None = None
        self._read: int | None = None
        """Step of the copies that :meth:`reader` has opened."""
        self._stride = 1
        self._boundary: Boundary | None = None
        self._has_changed = self._has_told_gradients = self._are_starts_equal = False
        self._versions = self._collector.versions()
        self._backwards = self._usual_backwards = 0
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)
        self._backward = _notice_backward(self._before_backward, self._after_backward)
        self._previous = sys.excepthook
        sys.excepthook = self._excepthook
        atexit.register(self.close)

    def close(self) -> None:
        """Copy no further step. Wait for a copy that is being made, but only for a limited time."""
        if not self.is_closed:
            self.is_closed = True
            if self._peers is not None:
                self._peers.close()
            self._close_handover()
            self._hook.remove()
            self._backward()
            self._copier.finish(_EXIT_LIMIT)
            atexit.unregister(self.close)
            if sys.excepthook == self._excepthook:
                sys.excepthook = self._previous

    def _join_peers(self) -> None:
        """Prepare to compare this rank's periodic copies of its state with those of ranks on other nodes. Do
        this even if this rank makes no copies, so that it can tell the other ranks.
        """
        if self._peers is None and nodes.is_job_of_several_nodes():
            try:
                self._peers = self._new_peers()
            except OffError as error:
                self._copier.turn_off(str(error))
            # A failure to keep the state must not end the training, whatever went wrong.
            except Exception as error:
                self._copier.turn_off(f"its copies cannot be compared with those of other nodes: {error!r}")
            if self._copier.is_off:
                self._schedule.turn_off(self._copier.why_off)
            self._tell_if_off()

    def _new_peers(self) -> Peers | None:
        """Return an object that compares the periodic copies of all ranks; ``None`` if that is not needed.

        Raises:
            OffError: the nodes have no key-value store in which they could compare copies.
        """
        global _trainings  # noqa: PLW0603 -- one for each process
        is_replicated = self._mode == layout.Mode.REPLICATED
        if is_replicated and self._every is not None:
            return None
        from elasticrs._engine.inside.keep.peers import Peers

        agreement = None if _trainings else _agreement
        if agreement is None or agreement.store is None:
            # Create a store with keys that no earlier training of this process has used.
            store = nodes.Store(name=f"/{_trainings}")
            agreement = nodes.Agreement({**self._plan, "step": None}, store)
        _trainings += 1
        return Peers(agreement, self._file, self._schedule, has_partners=not is_replicated)

    def _tell_if_off(self) -> None:
        """If this rank makes no copies any more, tell the other nodes, even before its first step ends."""
        if self._copier.is_off and self._peers is not None:
            self._peers.begin()

    def _close_handover(self) -> None:
        """Stop serving this rank's copy to other nodes. None needs it when all ranks have ended a step."""
        if _agreement is not None and _agreement.handover is not None:
            _agreement.handover.close()
            _agreement.handover = None

    def restore(self, other: int | None = None) -> Restored | None:
        """Load the copy that the agent has chosen into the program's objects. Return ``None`` without one, or
        if the program has a newer state: that of step ``other``.

        Raises:
            RuntimeError: the copy is damaged. The attempt must end, because other ranks may load theirs.
        """
        global _has_asked  # noqa: PLW0603 -- one for each process
        _has_asked = True
        if _is_used or self.is_closed:
            return None
        try:
            plan = self._plan = _agreed_plan(self._file, self._plan, other)
        except OffError as error:
            self._copier.turn_off(str(error))
            return None
        step: int | None = plan["step"]
        found = None if step is None else self._restore(plan, step, other)
        plan, step = self._plan, self._plan["step"]
        if step is None and plan["why"]:
            readable = plan.get("reader")
            hint = f"; keep.reader() can load step {readable['step']}" if readable else ""
            say_for_all(f"no kept state is restored: {plan['why']}{hint}")
        if found is None:
            self._file.ring.drop_after(-1)
        self._join_peers()
        return found

    def _restore(self, plan: Mapping[str, Any], step: int, other: int | None) -> Restored | None:
        large = plan["large"]
        own = os.environ[layout.VARIABLE]
        try:
            # If an earlier job has saved its state on a disk, `home` in the plan is this rank's saved file.
            home = KeepFile(plan["home"]) if "home" in plan else self._file
            file = home if large["file"] == plan.get("home", own) else KeepFile(large["file"])
            kept = restore.Kept(file, large["slot"], step, large["sequence"])
            small, stale = restore.small_state(
                home, kept, plan.get("own"), is_own=plan.get("has_small", False)
            )
            kept.check()
        except (restore.DamagedError, OffError) as error:
            text = f"rank {large['rank']}'s copy of step {step} cannot be restored: {error}"
            # Check all other copies of this node now, and delete the damaged ones. Otherwise, the next
            # attempt could choose a damaged copy again.
            saved = (plan["home"], large["file"]) if "home" in plan else ()
            steps = restore.drop_damaged((*plan["files"], *plan.get("partner_files", ()), *saved))
            if steps:
                text += f"; {restore.deleted_text(steps)}"
            if self._world > 1:
                # If this rank went on from another step than the others, the training would go wrong.
                kind = DamagedCopyError if isinstance(error, restore.DamagedError) else RuntimeError
                raise kind(
                    f"elasticrs: keep: {text}. This attempt ends, and a restart does not use this copy"
                ) from error
            self._plan = self._plan_without_damage(plan, other)
            if self._plan["step"] is None:
                say(f"{text}; the script begins with its default")
                return None
            say(f"{text}; an older copy is used")
            return self._restore(self._plan, self._plan["step"], other)
        try:
            restore.apply(self._collector, kept, small, self._values)
        except (restore.DifferentError, OffError) as error:
            self._refuse(step, str(error), error)
            return None
        # The program's own objects load their states here, and may raise any exception.
        except Exception as error:
            self._refuse(step, repr(error), error)
            return None
        folder: str = plan.get("folder", "")
        chosen = choice.Choice.of_facts(plan).replaced(why_copied=kept.why_copied)
        text = chosen.described(folder)
        for node, ranks in plan.get("from_partners", {}).items():
            verb = "restores" if len(ranks) == 1 else "restore"
            text += f"; {phrases.ranks_text(ranks, 4)} {verb} from the copy on node {node}"
        self._go_on_from(step)
        say_for_all(f"the training continues at {text}")
        if stale:
            say(f"this rank had not reached the end of step {step}; older than that is: {', '.join(stale)}")
        is_exact = plan["exact"] and small is not None and not stale
        tier: Literal["memory", "peer", "disk"] = "disk" if folder else "memory"
        if plan.get("partner") is not None:
            # This rank's own node was lost, so the copy of its state came from a partner node.
            tier = "peer"
        return step, tier, is_exact, chosen.behind, bool(kept.why_copied), large["rank"]

    def _plan_without_damage(self, plan: Mapping[str, Any], other: int | None) -> Mapping[str, Any]:
        """Return a new plan for a job with one rank whose copy of the planned step is damaged. The new plan
        restores an older copy, if there is one. It restores nothing if the program has a newer state of its
        own, such as a checkpoint, at step ``other``.
        """
        global _agreement  # noqa: PLW0603 -- one for each process
        if "holdings" in plan:
            _agreement = nodes.agree({**plan, "must_check": True}, self._file, other)
            return _agreement.plan
        older = plan.get("older") or {"step": None, "why": "", "reader": None}
        return _agreed_plan(self._file, {**plan, **older, "older": None}, other)

    def _refuse(self, step: int, why: str, error: Exception) -> None:
        """Tell the user that this rank cannot load the copy of the step to which the training returns.

        Raises:
            RuntimeError: this rank must not begin anew alone, because other ranks have loaded their copies,
                or are on other nodes, where this rank cannot see whether they have.
        """
        self._file.tell(why)
        self._file.words[Head.REFUSED] = step + 1
        if nodes.is_job_of_several_nodes() or self._schedule.has_another_restored(_REFUSAL_LIMIT):
            raise RuntimeError(
                f"elasticrs: keep: step {step} is not restored: {why}. This attempt ends, because other ranks"
                " may go on from that step"
            ) from error
        say(f"step {step} is not restored: {why}; the script begins with its default")

    def reader(self) -> Reader | None:
        """Return a reader of the copies of all ranks; ``None`` without copies, or if a step has ended.

        Raises:
            RuntimeError: a copy is damaged. The attempt must end, because other ranks may load theirs.
        """
        if _is_used or self.is_closed:
            return None
        found = self._plan.get("reader")
        if not found:
            return None
        # Import this module only when it is needed, because it imports much of torch.
        from elasticrs._engine.inside.keep.reader import Reader, open_copies

        copies = open_copies(found, self._file, None if _agreement is None else _agreement.store)
        self._read = found["step"]
        return Reader(copies, int(os.environ["RANK"]))

    def _go_on_from(self, step: int) -> None:
        """Record that this rank has restored ``step``. Other ranks may now overwrite older copies."""
        self._file.ring.drop_after(step)
        self._begin_at(step, has_restored=True)
        self._copier.protect(self._plan.get("fallback"), step)
        # The agent says no line of its own about this step after this.
        self._file.words[Head.RESTORED] = step + 1

    def begin_at(self, step: int) -> None:
        """Record that the training continues from ``step``, which the program has loaded or started at."""
        if self._read == step:
            self._go_on_from(step)
        else:
            self._begin_at(step)

    @_guarded
    def _begin_at(self, step: int, *, has_restored: bool = False) -> None:
        if self._collector.is_complete():
            small = self._collector.begin_after(step)
            self._file.ring.put(step, True, small)
            if has_restored:
                self._file.ring.put(step, True, small, place=layout.RESTORED)
        self._at, self._versions = step, self._collector.versions()

    @_guarded
    def before_change(self) -> None:
        """Record that the program may change its state between now and the end of the step."""
        self._has_changed = True
        if self._boundary is None:
            self._file.words[Head.CHANGES] += 1
        self._copier.change()
        if not self._backwards:
            # Save the random numbers now, because no backward pass was seen before which to save them.
            self._put_next()

    def _before_backward(self) -> None:
        if self.is_closed:
            return
        self._copier.await_stop()
        self._copier.has_exchanged = False
        self._backwards += 1
        # Save the random numbers only before the last backward pass of a step (going by their number in the
        # step before), because the program draws more of them until then. Gradients are sent to the other
        # ranks in this pass, so these can end the step even if this process dies. Its next process then
        # restores their step, and needs the random numbers and the position in the data as they are now.
        if self._backwards >= self._usual_backwards:
            self._put_next()

    def _after_backward(self) -> None:
        if not self.is_closed and self._backwards >= self._usual_backwards:
            # On one node, the ranks see each other's steps instead.
            self._copier.has_exchanged = nodes.is_job_of_several_nodes()

    @_guarded
    def _put_next(self) -> None:
        if self._at is not None:
            self._file.ring.put(self._at + self._stride, False, self._collector.small())

    def _before_optimizer(self, _optimizer: object, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record that an optimizer is about to change the state. If its step gets a closure, which computes
        the loss and gradients, the change begins only when the closure has returned.
        """
        if torch.compiler.is_compiling():
            # torch's compiler cannot trace the following calls. `_step` notices that the state has changed.
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.before_change()
            return None

        def wrapped() -> Any:
            loss = closure()
            self.before_change()
            return loss

        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def step(self, step: int) -> None:
        """Record that ``step`` has ended, and have its state copied if a copy is due.

        Raises:
            RuntimeError: another rank has restored another step than this rank, so the training is wrong.
        """
        self._step(step)
        if not (self._are_starts_equal or self.is_closed):
            self._compare_starts()

    def _compare_starts(self) -> None:
        ranks, self._are_starts_equal = self._schedule.ranks_from_elsewhere()
        if ranks:
            self._are_starts_equal = False
            self._file.drop_from(-1)
            begun = self._file.words[Head.RESTORED]
            own = f"restored step {begun - 1}" if begun else "restored no state"
            others = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            raise RuntimeError(
                f"elasticrs: keep: this rank has {own}, but {others} did not do the same, so the result would"
                " be wrong. This attempt ends, and a restart does not use the kept state"
            )

    @_guarded
    def _step(self, step: int) -> None:
        global _is_used
        before, _is_used = self._boundary, True
        if self._has_only_gradients(before):
            if not self._has_told_gradients:
                self._has_told_gradients = True
                say(
                    f"step {step} is not kept, nor are other steps that only add up gradients; call keep.step"
                    " after the step of the optimizer"
                )
            return
        if before is None:
            self._join_peers()
        boundary = self._collector.boundary(step)
        if before is None:
            if not _has_asked and (kept := _text_of_kept(self._plan)):
                say(f"{kept} is not restored, because the script does not call keep.restore()")
            if self._peers is None or not self._peers.has_partners:
                self._close_handover()
            self._file.drop_from(step)
            if boundary.parts.is_sharded:
                self._schedule.declare_sharded(boundary.parts.twins)
            if not boundary.parts.is_on_cpu:
                self._copier.go_blind("it is on a GPU")
        elif not self._has_changed and before.parts.changed(before.versions):
            self._copier.go_blind(
                "no step of an optimizer of torch was seen that changed it; call keep.before_change() before"
                " each change"
            )
        self._stride = step - self._at if self._at is not None and step > self._at else 1
        self._at, self._boundary, self._has_changed = step, boundary, False
        self._usual_backwards, self._backwards = self._backwards, 0
        self._file.ring.put(step, True, boundary.small)
        words = self._file.words
        words[Head.ENDED], words[Head.ENDED_AT] = step + 1, monotonic_ns()
        is_due, is_check = self._schedule.next(step, is_idle=self._copier.is_idle())
        if is_due:
            self._file.ring.put(step, True, boundary.small, place=layout.COPIED)
        if is_due and not boundary.parts.is_on_cpu:
            torch.cuda.synchronize()
        self._copier.end_step(boundary, is_due=is_due, is_check=is_check)
        if before is None and self._peers is not None:
            self._peers.begin()

    def _has_only_gradients(self, before: Boundary | None) -> bool:
        """Return true if a step has changed only the gradients, which are not copied."""
        if self._has_changed or not self._backwards or not self._collector.has_gradients():
            return False
        if before is None:
            return self._collector.versions() == self._versions
        return before.parts.changed(before.versions) is None

    @_guarded
    def end_training(self) -> None:
        """Copy the state of the last step, because no step follows. Wait until the program may change it."""
        if self._boundary is not None and not self._has_changed:
            self._copier.end_step(self._boundary, is_due=True, is_check=False)
            self._copier.change()
            self._copier.wait_until_complete(_EXIT_LIMIT)

    @_guarded
    def keep_before_stop(self) -> None:
        """Copy the state at the end of the last step, because this process is about to be stopped between two
        steps. Do so only if the agent could not order a copy later: the state is on a GPU, or may change
        outside of torch's optimizers. Wait until the copy is complete. If a node leaves the job, and another
        node has to get copies for that, also wait until all nodes have theirs.
        """
        if self._boundary is None or self._has_changed:
            return
        has_partners = self._peers is not None and self._peers.has_partners
        is_needed = self._file.words[Agreed.NODE_LEAVES] and not self._schedule.is_replicated()
        generations = self._schedule.generations if has_partners and is_needed else None
        until = monotonic() + min(self._plan["grace"], _HAND_OVER_LIMIT)
        if self._copier.is_blind:
            if generations is not None:
                generations.begin_last(self._boundary.step, until - monotonic())
            self._copier.end_step(self._boundary, is_due=True, is_check=False)
            self._copier.wait_until_complete(_EXIT_LIMIT)
            if generations is not None:
                generations.await_settled(until - monotonic())
        elif generations is not None:
            self._copier.hand_over_next()

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # First call the hook set before: it tells the agent, so that the other ranks are stopped at once.
        self._previous(kind, error, trace)
        self.keep_own()

    @_guarded
    def keep_own(self) -> None:
        """Copy the state, because an error ends the program. Wait for that a limited time."""
        self._copier.keep_own()
