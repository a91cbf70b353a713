"""Keeps the state of a training program in memory, so that a restart loses no training step.

Under ``elasticrun``, the kept state survives the processes of the program::

    keep = Keep(model=model, optimizer=optimizer, scheduler=scheduler)
    step = keep.restore(default=0)
    while step < steps:
        ...
        optimizer.step()
        step += 1
        keep.step(step)

When a worker fails, the other workers copy their state into memory of the agent (the launcher's process)
before they are stopped. The restarted workers load these copies, and go on from there. If the state could not
be copied at the failure, they load the last periodic copies. Without ``elasticrun``, nothing is kept.
"""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, NamedTuple

from elasticrs._engine.inside.keep.layout import VARIABLE, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Literal

    from elasticrs._engine.inside.keep.keeper import Keeper
    from elasticrs._engine.inside.keep.reader import Reader

__all__ = ["Keep", "Source"]

_MODES = {"auto": Mode.AUTO, True: Mode.REPLICATED, False: Mode.SHARDED}


class Source(NamedTuple):
    """Where the copy of the training state comes from that this rank has restored after a restart.

    Attributes:
        step: number of the training step after which the state was copied.
        tier: where the copy was: ``"memory"`` is the memory of the agent, ``"peer"`` is that of a partner
            node, which had taken a copy before this rank's node was lost, and ``"disk"`` is the folder of
            ``--keep-save``, in which an earlier job has saved the copy.
        exact: true if all parts of this rank's state are from the end of that step.
        behind: ranks whose random numbers and the like are of another step, or were lost, unlike their
            parameters and the optimizer's state.
        at_death: true if the copy was made because of a failure or a stop, false if it was a periodic copy.
        from_rank: rank of the worker that made the copy.
    """

    step: int
    tier: Literal["memory", "peer", "disk"]
    exact: bool
    behind: tuple[int, ...]
    at_death: bool
    from_rank: int


class Keep:
    """Keeps the training state of a program's objects, so that a restarted program goes on from it.

    The tensors of modules and optimizers are copied when a failure is about to end this process, and
    periodically. The states of all other objects, and those of the random number generators of torch, CUDA,
    NumPy and :mod:`random`, are copied in each step. So the states of these other objects should be small.

    An error of ``Keep`` itself does not end the training. A line on standard error tells what is not kept,
    and why.

    Args:
        every: number of steps from one periodic copy to the next; 0 for none. ``"auto"`` copies as often as
            possible while the copies delay the training by at most 1 %.
        replicated: true if each rank has the whole state, as in data parallel training, and false if each has
            a part. ``"auto"`` finds out by comparing the copies that all ranks make of the second step.
        objects: the objects by name, each with ``state_dict()`` and ``load_state_dict()``.

    Raises:
        TypeError: an object lacks one of these methods, or an argument has the wrong type.
        ValueError: ``every`` or ``replicated`` has an unknown value.
    """

    def __init__(
        self,
        *,
        every: int | Literal["auto"] = "auto",
        replicated: bool | Literal["auto"] = "auto",
        **objects: Any,
    ) -> None:
        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                kind = type(each).__qualname__
                raise TypeError(f"{name} must have state_dict() and load_state_dict(), got {kind}")
        if every != "auto" and (every := _whole(every, "every")) < 0:
            raise ValueError(f"every must be 0 or more steps, or 'auto', got {every!r}")
        if replicated not in _MODES:
            raise ValueError(f"replicated must be True, False or 'auto', got {replicated!r}")
        self._values: dict[str, Any] = {}
        self._source: Source | None = None
        self._last: int | None = None
        self._keeper: Keeper | None = None
        if VARIABLE in os.environ:
            from elasticrs._engine.inside.keep import keeper

            interval = None if every == "auto" else every
            self._keeper = keeper.begin(objects, self._values, interval, _MODES[replicated])

    @property
    def values(self) -> dict[str, Any]:
        """Further values of the program, such as numbers and text, which are kept with the objects."""
        return self._values

    @values.setter
    def values(self, values: Mapping[str, Any]) -> None:
        new = dict(values)
        self._values.clear()
        self._values.update(new)

    @property
    def source(self) -> Source | None:
        """Where the restored state comes from; ``None`` if no state has been restored."""
        return self._source

    def restore(self, default: int | Callable[[], int] = 0, *, default_step: int | None = None) -> int:
        """Load the kept state into the objects that were given to ``Keep``, and into :attr:`values`.

        If the objects do not match the kept state, for example because a layer has another size now, nothing
        is loaded.

        Args:
            default: the step to begin after if nothing is loaded. It can be a function that returns this
                step, for example after loading a checkpoint from a disk.
            default_step: step of the checkpoint that the function loads. If this step is newer than the kept
                one, the kept state is not loaded, and the function is called. All ranks must give the same
                number. Without it, the function is called only if there is no kept state. If ``default`` is
                a number, it is compared with the kept step, and this argument is not needed.

        Returns:
            Number of the training step after which all ranks go on.

        Raises:
            TypeError: an argument, or the result of the function, is not an integer.
            RuntimeError: this rank cannot load its copy, but the other ranks may go on from theirs.
        """
        if not callable(default):
            default = _whole(default, "default (a step, or a function that returns one)")
        if default_step is not None:
            default_step = _whole(default_step, "default_step")
        elif not callable(default):
            default_step = default
        found = None
        if self._keeper is not None:
            found = self._keeper.restore(default_step)
        elif VARIABLE in os.environ:
            from elasticrs._engine.inside.keep import keeper

            keeper.check_start(default_step)
        if found is not None:
            self._source = Source(*found)
            return self._source.step
        step = _whole(default(), "the result of default()") if callable(default) else default
        if self._keeper is not None:
            self._keeper.begin_at(step)
        return step

    def reader(self) -> Reader | None:
        """Return a reader of the kept state of all ranks, for ``torch.distributed.checkpoint``.

        If the number of ranks has changed, and each rank kept only its part of the state (FSDP2,
        ``DTensor``), :meth:`restore` loads nothing. With the reader, ``torch.distributed.checkpoint``
        (``dcp``) can load the state instead, because it cuts and joins the tensors for the new number of
        ranks::

            def resharded():
                reader = keep.reader()
                if reader is None:
                    return 0
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                dcp.load(state, storage_reader=reader)
                set_state_dict(
                    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
                )
                return reader.step

            step = keep.restore(default=resharded)

        The keys of ``state`` are the names under which the objects were given to this ``Keep``.

        Returns:
            A ``StorageReader`` whose ``step`` is the training step after which the state was copied, and
            whose ``values`` are the kept :attr:`values`; ``None`` if there are no copies that this process
            can read, or if this process has already completed a step.

        Raises:
            RuntimeError: a copy is damaged, but the other ranks may go on from theirs.
        """
        return None if self._keeper is None else self._keeper.reader()

    def step(self, step: int) -> None:
        """Record that a training step has ended. Call this in each step, after the last change of the state.

        Args:
            step: number of training steps that have ended, as an integer (also of NumPy, or a tensor with one
                integer). It must be larger in each call.

        Raises:
            TypeError: ``step`` is not an integer.
            ValueError: ``step`` is negative, or not larger than in the call before.
        """
        step = _whole(step, "step")
        if step < 0 or (self._last is not None and step <= self._last):
            before = "" if self._last is None else f" and above {self._last}, the one before"
            raise ValueError(f"the step must be 0 or more{before}, got {step}")
        self._last = step
        if self._keeper is not None:
            self._keeper.step(step)

    def before_change(self) -> None:
        """Record that the program is about to change the state. Call this only if the change is not made by
        an optimizer of torch, or if the optimizer's step is compiled or part of a CUDA graph.
        """
        if self._keeper is not None:
            self._keeper.before_change()


def _whole(number: Any, name: str) -> int:
    """Convert an integer, also one of NumPy or in a tensor, to an ``int``."""
    is_truth_value = isinstance(number, bool) or str(getattr(number, "dtype", "")) in ("bool", "torch.bool")
    value: Any = None if is_truth_value else number
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {number!r}") from error


def _main() -> int:
    from argparse import ArgumentParser

    parser = ArgumentParser("python -m elasticrs.keep", description="Work with the state of elasticrs.Keep.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser("export", help="make a checkpoint of torch.distributed.checkpoint")
    export.add_argument(
        "folders",
        nargs="+",
        metavar="folder",
        help="folder of --keep-save, whose newest state is used (if each node has its own: those of all)",
    )
    export.add_argument("out", help="folder for the checkpoint, which must not exist yet")
    arguments = parser.parse_args()

    from elasticrs._engine.inside.keep.reader import export_saved

    try:
        step = export_saved(arguments.folders, arguments.out)
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(1, f"elasticrs: keep: nothing is exported: {error}\n")
    print(f"elasticrs: keep: step {step} is exported to {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
