"""Keeps the training state of unmodified scripts that use Lightning or transformers (``elasticrun --keep``),
so that after a restart, they go on at the step to which the kept state belongs.

A *fit* is one call of a framework's training method: ``Trainer.fit`` or ``Trainer.train``. The fits of a
process are counted, because a script may train more than once. The steps of all fits are numbered in one
sequence: if the last step of a fit has the number 10 (the ``base`` of the next fit), the next fit begins with
step 11.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module

from elasticrs._engine.inside.keep import keeper
from elasticrs._engine.inside.keep.file import say, say_for_all
from elasticrs._engine.inside.keep.layout import Mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

    from elasticrs._engine.inside.keep.keeper import Keeper, Peeked


class UnknownVersionError(Exception):
    """A framework lacks a part that a patch here uses. The error's text names it, without a full stop."""


def patch(module: ModuleType) -> None:
    """Patch a framework's module that defines its ``Trainer``, so that the state of its training is kept. If
    the patch does not fit this version of the framework, tell the user so, and leave the module as it is.
    """
    package = module.__name__.partition(".")[0]
    try:
        name = "transformers" if package == "transformers" else "lightning"
        import_module(f"{__package__}.{name}").patch(module)
    except Exception as error:
        problem = str(error) if isinstance(error, UnknownVersionError) else repr(error)
        version = getattr(sys.modules[package], "__version__", "of unknown version")
        say(
            f"Keep is off, because {package} {version} is not known to work: {problem}; use elasticrs.Keep in"
            " the script"
        )


def require(owner: Any, needed: Mapping[str, tuple[str, ...]]) -> None:
    """Check that the class ``owner`` of a framework has the methods that a patch replaces or calls, and that
    they have the needed parameters. ``needed`` has the names of the parameters by the names of the methods.

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
    """What all fits (calls of a framework's training method) of this process share."""

    fits = 0
    step = 0
    """Number of the last step that has ended, in the sequence of the steps of all fits."""
    keeper: Keeper | None = None
    """The object that keeps the state of the last fit; ``None`` if that is not kept."""


class Fit:
    """One call of a framework's training method.

    Args:
        framework: ``"lightning"`` or ``"transformers"``.
        base: number that is added to the framework's step numbers in this fit, so that the steps of all fits
            are numbered in one sequence.
        kept: what was read of the kept state, if that is the state of this fit; otherwise ``None``.
        is_refused: true if the kept state is that of another fit. Then it must not be restored.
    """

    def __init__(self, framework: str, base: int, kept: Peeked | None, *, is_refused: bool) -> None:
        self.framework, self.number, self.base = framework, _Process.fits, base
        self._kept, self._is_refused = kept, is_refused
        self.progress: Mapping[str, Any] | None = None
        """The kept progress of the framework, such as its step counts; ``None`` if the fit begins anew."""
        if kept is not None:
            self.progress = kept.objects[framework]["progress"]

    def choose(self, module: Any, path: Any, step: int, kept: int) -> bool:
        """Decide whether this fit goes on from the kept state. Return false if the checkpoint that the script
        asks for is newer, or if the module has changed. Then tell the user so, and use no kept state at all.

        Args:
            module: the module that is trained.
            path: path of the checkpoint; ``None`` if the script asks for none.
            step: number of the training step that the checkpoint was written after.
            kept: number of the training step that the kept state belongs to, as the framework counts.
        """
        assert self._kept is not None
        is_chosen = path is None or step <= kept
        if path is not None:
            used = "kept state" if is_chosen else "checkpoint"
            say_for_all(f"the checkpoint {path} is of step {step}, and step {kept} is kept: using the {used}")
        # Compare the module's tensors with the kept ones already here. Once the framework has begun at the
        # kept step, it cannot start anew.
        state = module.state_dict()
        now = {("module", name): tuple(each.shape) for name, each in state.items() if hasattr(each, "shape")}
        was = {path: shape for path, shape in self._kept.shapes.items() if path[0] == "module"}
        if is_chosen and now != was:
            changed = ", ".join(sorted({path[1] for path, _ in now.items() ^ was.items()})[:3])
            say(f"step {kept} is not restored: the module has other tensors now ({changed}); it begins anew")
            is_chosen = False
        if not is_chosen:
            self.progress, self._is_refused = None, True
        return is_chosen

    def open(self, progress: Any, **objects: Any) -> None:
        """Begin to keep the state of ``objects`` and of the framework's ``progress``. If the state of this
        fit was kept before a restart, load it into the objects.

        Raises:
            RuntimeError: the kept state does not match the objects.
        """
        self.close()
        everything = {**objects, self.framework: _Common(self, progress)}
        _Process.keeper = keeper.begin(everything, {}, None, Mode.AUTO)
        if _Process.keeper is None:
            keeper.check_start()
            return
        if self._is_refused:
            return
        if _Process.keeper.restore() is None and self.progress is not None:
            # The framework's step counter already has the value of the kept step, but no state was loaded.
            raise RuntimeError("elasticrs: keep: the kept state does not fit the optimizer or the schedule")

    def step(self, number: int) -> None:
        """Record that a step of this fit has ended. ``number`` is the framework's count of steps."""
        _Process.step = self.base + number
        if _Process.keeper is not None:
            _Process.keeper.step(_Process.step)

    def end(self) -> None:
        """Record that the last step of this fit has ended. The framework may now change the state."""
        if _Process.keeper is not None:
            _Process.keeper.end_training()

    def close(self) -> None:
        """Stop keeping the state of this fit, and forget its objects, so that their memory can be freed."""
        if _Process.keeper is not None:
            keeper.close()
            _Process.keeper = None


class _Common:
    """The framework's progress in a fit, and the number and ``base`` of the fit. The keeper of the state
    treats it as one of the objects. It is equal on all ranks.
    """

    keep_common = True

    def __init__(self, fit: Fit, progress: Any) -> None:
        self._fit, self._progress = fit, progress

    def state_dict(self) -> dict[str, Any]:
        return {"fit": self._fit.number, "base": self._fit.base, "progress": self._progress.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing, because the progress has been loaded already: the framework needs it before the
        optimizer exists, and the state of the objects is loaded only afterwards.
        """


def begin(framework: str, unsupported: Callable[[], str | None]) -> Fit | None:
    """Begin a fit (a call of the framework's training method). If the state of its steps cannot be kept, tell
    the user why, and return ``None``.

    Args:
        framework: ``"lightning"`` or ``"transformers"``.
        unsupported: function that returns the name of a feature in use for which the state cannot be kept,
            and ``None`` if there is no such feature.
    """
    _Process.fits += 1
    reason = unsupported()
    if reason is not None:
        say_for_all(f"the state of this training is not kept: --keep does not support {reason}")
        return None
    kept = keeper.peek()
    if kept is None:
        return Fit(framework, _Process.step, None, is_refused=False)
    state = kept.objects.get(framework, {"fit": 0})
    number, other = _Process.fits, state["fit"]
    if number < other:
        say_for_all(
            f"training {number} of the script is done again, and its steps are not kept, because the kept"
            f" step {kept.step} belongs to training {other}, which continues there"
        )
        return None
    if number > other:
        return Fit(framework, kept.step, None, is_refused=True)
    return Fit(framework, state["base"], kept, is_refused=False)
