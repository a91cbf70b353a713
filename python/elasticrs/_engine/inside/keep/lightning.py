"""Keeps the training state of Lightning's ``Trainer``, so that ``Trainer.fit`` goes on from it after a
restart.

The kept state is what Lightning would write into a checkpoint at the end of a batch, and Lightning's own code
for checkpoints restores it. So training goes on as from a checkpoint of the step that was kept.
"""

from __future__ import annotations

import functools
from importlib import import_module

from elasticrs._engine.inside.keep import frameworks
from elasticrs._engine.inside.keep.file import OffError
from elasticrs._engine.inside.keep.state import random_state, set_random_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from elasticrs._engine.inside.keep.frameworks import Fit

_NEEDED_OF_CONNECTOR = {
    "resume_start": ("checkpoint_path",),
    "resume_end": (),
    "restore_optimizers": (),
    "dump_checkpoint": ("weights_only",),
    "_get_lightning_module_state_dict": (),
}
"""Methods of Lightning's checkpoint connector (which writes and restores checkpoints) that this module
replaces or calls, with the names of the parameters that it uses.
"""

_NEEDED_ATTRIBUTES = (
    "_checkpoint_connector._loaded_checkpoint",
    "_checkpoint_connector._ckpt_path",
    "_logger_connector.on_batch_end",
    "fit_loop._combined_loader",
    "fit_loop._combined_loader_states_to_load",
    "strategy.optimizer_state",
)
"""Further attributes of a Trainer, or of its parts, that this module uses although they are not public."""

_OVERRIDDEN = ("resume_start", "resume_end", "restore_optimizers")

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""Lightning's strategies in which the module and the optimizers of each rank have the whole state. With other
strategies, no state is kept.
"""


def patch(module: ModuleType) -> None:
    """Replace ``Trainer.fit`` in the module of Lightning that defines ``Trainer``, so that the state is kept.

    Raises:
        UnknownVersionError: this version of Lightning lacks a method or parameter that is used here.
    """
    package = module.__name__.removesuffix(".trainer.trainer")
    frameworks.require(module.Trainer, {"fit": ("ckpt_path",)})
    frameworks.require(module._CheckpointConnector, _NEEDED_OF_CONNECTOR)
    lightning = import_module(package)
    plain = module.Trainer.fit

    @functools.wraps(plain)
    def fit(self: Any, *args: Any, **named: Any) -> Any:
        started = frameworks.begin("lightning", lambda: _unsupported(self))
        if started is None:
            return plain(self, *args, **named)
        with _Fitting(lightning, self, started):
            return plain(self, *args, **named)

    module.Trainer.fit = fit


def _unsupported(trainer: Any) -> str | None:
    """Return the name of a feature that this training uses, and for which its state cannot be kept. Return
    ``None`` if it uses no such feature.
    """
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        return f"strategy {strategy}"
    for path in _NEEDED_ATTRIBUTES:
        owner, _, name = path.partition(".")
        if not hasattr(getattr(trainer, owner, None), name):
            return f"this version of Lightning, which has no {path}"
    return "fast_dev_run" if trainer.fast_dev_run else None


class _Fitting:
    """Keeps the training state during one call of ``Trainer.fit``, and makes that call go on at the kept
    step.

    While this context is entered, its methods replace some methods of the Trainer's connectors (helper
    objects for checkpoints and logs).
    """

    def __init__(self, lightning: ModuleType, trainer: Any, fit: Fit) -> None:
        self.lightning, self.trainer, self.fit, self.progress = lightning, trainer, fit, fit.progress
        self.connector = trainer._checkpoint_connector
        self.plain = {name: getattr(self.connector, name) for name in _OVERRIDDEN}
        self.random: Any = None
        self.steps, self.global_step = 0, 0
        self.is_late = False
        """True if the module has a hook ``on_train_batch_end``. The hook may change the state, so a step ends
        only after it.
        """

    def __enter__(self) -> None:
        for name in _OVERRIDDEN:
            setattr(self.connector, name, getattr(self, name))
        logger = self.trainer._logger_connector
        self.plain_on_batch_end, logger.on_batch_end = logger.on_batch_end, self.on_late_batch_end
        callbacks = self.trainer.callbacks
        self.callback = _callback(self.lightning, self)
        # Put the callback that notes the ends of steps before the callbacks that save checkpoints, which come
        # last. A step has ended before a checkpoint is saved, because saving can fail.
        checkpoints = [each for each in callbacks if isinstance(each, self.lightning.callbacks.Checkpoint)]
        callbacks.insert(len(callbacks) - len(checkpoints), self.callback)

    def __exit__(self, error: object, *_: object) -> None:
        for name in _OVERRIDDEN:
            del self.connector.__dict__[name]
        del self.trainer._logger_connector.__dict__["on_batch_end"]
        if self.callback in self.trainer.callbacks:
            self.trainer.callbacks.remove(self.callback)
        if error is None:  # After an exception, the state can still be copied when the program ends.
            self.fit.close()

    def resume_start(self, checkpoint_path: Any = None, *args: Any, **named: Any) -> None:
        self.plain["resume_start"](checkpoint_path, *args, **named)
        if self.progress is None:
            return
        loaded = self.connector._loaded_checkpoint
        kept = self.progress["checkpoint"]
        path = checkpoint_path if loaded else None
        module = self.trainer.lightning_module
        if not self.fit.choose(module, path, int(loaded.get("global_step", 0)), kept["global_step"]):
            self.progress = None
            return
        self.connector._ckpt_path = None
        # The kept weights are loaded later, when the optimizers exist. Until then, hooks that look at the
        # checkpoint find the module's present weights.
        self.connector._loaded_checkpoint = {
            **_hyperparameters(self.trainer),
            "state_dict": module.state_dict(),
            "optimizer_states": [],
            **kept,
        }

    def restore_optimizers(self) -> None:
        if self.progress is None:
            self.plain["restore_optimizers"]()

    def resume_end(self) -> None:
        trainer = self.trainer
        # If a Trainer is used for a second fit, it counts on from the first one, so subtract the steps
        # before.
        steps = max(trainer.global_step - self.fit.base, 0)
        self.steps = steps if self.progress is None else self.progress["steps"]
        self.global_step = trainer.global_step
        module = trainer.lightning_module
        self.is_late = _has_hook(self.lightning, module, "on_train_batch_end")
        self.fit.open(
            _Progress(self),
            module=module,
            loaders=_Loaders(trainer),
            **{f"optimizer{number}": each for number, each in enumerate(trainer.optimizers)},
        )
        if self.progress is not None:
            self.random, self.progress = random_state(), None
        self.plain["resume_end"]()

    def on_late_batch_end(self) -> None:
        """Record that a step has ended, after Lightning has called all hooks of the end of a batch. This
        method replaces one that Lightning calls at that time.
        """
        self.plain_on_batch_end()
        if self.is_late and self.trainer.training:
            self.end_step()

    def end_step(self) -> None:
        """Record that a training step has ended, if an optimizer has run since the end of the last step."""
        if self.trainer.global_step != self.global_step:
            self.global_step = self.trainer.global_step
            self.steps += 1
            self.fit.step(self.steps)


def _callback(lightning: ModuleType, fitting: _Fitting) -> Any:
    """Return a callback for Lightning that notes the ends of steps. When training starts, it also sets the
    restored states of the random number generators.
    """

    class KeepSteps(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, *_: Any) -> None:
            if fitting.random is not None:
                set_random_state(fitting.random)
                fitting.random = None

        def on_train_batch_end(self, *_: Any) -> None:
            if not fitting.is_late:
                fitting.end_step()

        def on_train_end(self, *_: Any) -> None:
            fitting.fit.end()

    return KeepSteps()


class _Progress:
    """An object whose state is kept. Its state is what Lightning writes into a checkpoint, without the
    tensors of the module and the optimizers.
    """

    def __init__(self, fitting: _Fitting) -> None:
        self._fitting = fitting

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._fitting.steps, "checkpoint": self._checkpoint()}

    def _checkpoint(self) -> dict[str, Any]:
        fitting = self._fitting
        trainer, connector = fitting.trainer, fitting.connector
        module = trainer.lightning_module
        owners = (module, *trainer.callbacks)
        is_changed = any(_has_hook(fitting.lightning, each, "on_save_checkpoint") for each in owners)
        # Collecting the module's state takes long, so do it only if a hook may look at it in the checkpoint.
        weights = module.state_dict() if is_changed else {}
        connector._get_lightning_module_state_dict = lambda: dict(weights)
        trainer.strategy.optimizer_state = lambda _optimizer: {}
        try:
            checkpoint: dict[str, Any] = connector.dump_checkpoint(weights_only=False)
        finally:
            del connector.__dict__["_get_lightning_module_state_dict"]
            del trainer.strategy.__dict__["optimizer_state"]
        dumped = checkpoint.pop("state_dict")
        if dumped.keys() != weights.keys() or any(dumped[name] is not weights[name] for name in weights):
            raise OffError("a callback writes other weights than the module's into checkpoints")
        del checkpoint["optimizer_states"]
        for each in (module, trainer.datamodule):
            for name in ("NAME", "KEY", "TYPE") if each is not None else ():
                checkpoint.pop(getattr(each, f"CHECKPOINT_HYPER_PARAMS_{name}"), None)
        return checkpoint


class _Loaders:
    """An object whose state is kept: how far this rank's data loaders have come, if they have a state."""

    def __init__(self, trainer: Any) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        waiting = self._loop._combined_loader_states_to_load
        if self._loop.restarting and waiting:
            # Lightning loads the restored states when the training begins. If the process ends before that,
            # the copy of its state must still contain them.
            return {"loaders": waiting}
        loader = self._loop._combined_loader
        return {"loaders": [] if loader is None else loader._state_dicts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Set the loaders' positions here, because Lightning's checkpoints have only those of rank 0.
        self._loop._combined_loader_states_to_load = state["loaders"]


def _has_hook(lightning: ModuleType, owner: Any, name: str) -> bool:
    """Return true if the class of a module or callback defines the hook ``name``, and does not only inherit
    Lightning's own, which does nothing.
    """
    plain = (getattr(lightning.LightningModule, name), getattr(lightning.Callback, name))
    return getattr(type(owner), name, None) not in plain


def _hyperparameters(trainer: Any) -> dict[str, Any]:
    """Return the hyperparameters of the Trainer's module and data module, in the form of a checkpoint."""
    return {
        each.CHECKPOINT_HYPER_PARAMS_KEY: dict(each.hparams)
        for each in (trainer.lightning_module, trainer.datamodule)
        if each is not None and each.hparams
    }
