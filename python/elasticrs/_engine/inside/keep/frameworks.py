"""Lets unmodified scripts of Lightning and transformers go on at the kept step (``elasticrun --keep``).

A *fit* is one call of a framework's training method: ``Trainer.fit`` or ``Trainer.train``. The fits of a
process are counted, because a script may train more than once. The steps of all fits are numbered in one
sequence: the first step of a fit follows the last one of the fit before (``base``).
"""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module

from elasticrs._engine.inside.keep import keeper
from elasticrs._engine.inside.keep.keeper import say
from elasticrs._engine.inside.keep.layout import Mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

    from elasticrs._engine.inside.keep.keeper import Keeper, Peeked


class UnknownVersionError(Exception):
    """A framework lacks what a patch uses. The text says what, without a full stop."""


def patch(module: ModuleType) -> None:
    """Patch the module of a framework's trainer, which has just been imported. If this version of the
    framework is unknown, say so in one line, and leave the module as it is.
    """
    package = module.__name__.partition(".")[0]
    try:
        name = "transformers" if package == "transformers" else "lightning"
        import_module(f"{__package__}.{name}").patch(module)
    except Exception as error:
        problem = str(error) if isinstance(error, UnknownVersionError) else repr(error)
        version = getattr(sys.modules[package], "__version__", "of unknown version")
        say(f"off, because {package} {version} is not known to work: {problem}; use Keep in the script")


def require(owner: Any, needed: Mapping[str, tuple[str, ...]]) -> None:
    """Check that a class has methods, and that each has the parameters that a patch relies on.

    Raises:
        UnknownVersionError: a method or a parameter is missing.
    """
    for name, parameters in needed.items():
        method = getattr(owner, name, None)
        if method is None:
            raise UnknownVersionError(f"{owner.__qualname__} has no {name}")
        known = inspect.signature(method).parameters
        missing = [each for each in parameters if each not in known]
        if missing:
            raise UnknownVersionError(f"{owner.__qualname__}.{name} has no parameter {missing[0]}")


class _Process:
    """What the fits of this process have in common."""

    fits = 0
    step = 0
    """The last step of all fits."""
    keeper: Keeper | None = None
    """Keeps the state of the last fit."""


class Fit:
    """One call of a framework's training method.

    Args:
        framework: ``"lightning"`` or ``"transformers"``.
        base: the number that is added to this fit's own steps.
        kept: the state of a step of this fit; ``None`` if none is kept.
        is_refused: whether the state of another fit is kept, which must not be restored.
    """

    def __init__(self, framework: str, base: int, kept: Peeked | None, *, is_refused: bool) -> None:
        self.framework, self.number, self.base = framework, _Process.fits, base
        self._kept, self._is_refused = kept, is_refused
        self.progress: Mapping[str, Any] | None = None
        """What was kept of the framework's progress; ``None`` if this fit begins anew."""
        if kept is not None:
            self.progress = kept.objects[framework]["progress"]

    def choose(self, module: Any, path: Any, step: int, kept: int) -> bool:
        """Return whether to go on from the kept state, and not from the checkpoint that the script asks for.
        If not, nothing of the kept state is used, and a line says why.

        Args:
            module: the module that is trained.
            path: where the checkpoint is; ``None`` if the script asks for none.
            step: the checkpoint's step.
            kept: the kept step, by the framework's count.
        """
        assert self._kept is not None
        is_chosen = path is None or step <= kept
        if path is not None and os.environ["RANK"] == "0":
            used = "kept state" if is_chosen else "checkpoint"
            say(f"the checkpoint {path} is of step {step}, and step {kept} is kept: using the {used}")
        # Compare here, because the framework cannot start anew when it has begun at the kept step.
        state = module.state_dict()
        now = {("module", name): tuple(each.shape) for name, each in state.items() if hasattr(each, "shape")}
        was = {path: shape for path, shape in self._kept.shapes.items() if path[0] == "module"}
        if is_chosen and now != was:
            changed = ", ".join(sorted({path[1] for path, _ in now.items() ^ was.items()})[:3])
            say(f"step {kept} is not restored: the module has other tensors now ({changed})")
            is_chosen = False
        if not is_chosen:
            self.progress, self._is_refused = None, True
        return is_chosen

    def open(self, progress: Any, **objects: Any) -> None:
        """Begin to keep the state of objects, and restore it if it was kept."""
        self.close()
        everything = {**objects, self.framework: _Common(self, progress)}
        _Process.keeper = keeper.begin(everything, {}, None, Mode.AUTO)
        if _Process.keeper is None or self._is_refused:
            return
        if _Process.keeper.restore() is None and self.progress is not None:
            # The framework goes on at the kept step, but with objects that are not of this step.
            raise RuntimeError("elasticrs: keep: the kept state does not fit the optimizer or the schedule")

    def step(self, number: int) -> None:
        """Tell that a step of this fit has ended."""
        _Process.step = self.base + number
        if _Process.keeper is not None:
            _Process.keeper.step(_Process.step)

    def end(self) -> None:
        """Tell that the last step has ended, and that the framework may change the state now."""
        if _Process.keeper is not None:
            _Process.keeper.end_training()

    def close(self) -> None:
        """Forget the objects, so that the script can free their memory."""
        if _Process.keeper is not None:
            keeper.close()
            _Process.keeper = None


class _Common:
    """The progress of a fit, with the fit's number. It is equal on all ranks."""

    keep_common = True

    def __init__(self, fit: Fit, progress: Any) -> None:
        self._fit, self._progress = fit, progress

    def state_dict(self) -> dict[str, Any]:
        return {"fit": self._fit.number, "base": self._fit.base, "progress": self._progress.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing, because the framework needs its progress before the optimizer exists."""


def begin(framework: str, unsupported: Callable[[], str | None]) -> Fit | None:
    """Begin a fit. Return ``None`` if its steps are not kept; a line says why.

    Args:
        framework: ``"lightning"`` or ``"transformers"``.
        unsupported: returns what --keep does not know in this training; ``None`` if there is nothing.
    """
    _Process.fits += 1
    reason = unsupported()
    if reason is not None:
        say(f"off for this training: --keep does not know {reason}")
        return None
    kept = keeper.peek()
    if kept is None:
        return Fit(framework, _Process.step, None, is_refused=False)
    state = kept.objects.get(framework, {"fit": 0})
    number, other = _Process.fits, state["fit"]
    if number < other:
        of_other = f"step {kept.step}, which belongs to training {other}"
        say(f"training {number} of the script begins anew, and its steps are not kept; kept is {of_other}")
        return None
    if number > other:
        return Fit(framework, kept.step, None, is_refused=True)
    return Fit(framework, state["base"], kept, is_refused=False)
