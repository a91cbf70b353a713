"""Keeps the state of Lightning's ``Trainer``, and lets ``Trainer.fit`` go on from it.

What is kept is what Lightning writes into a checkpoint at the end of a batch, and is restored by the code
that restores a checkpoint. So training goes on as from a checkpoint of the kept step.
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
"""Methods of the checkpoint connector that are replaced or called, with the parameters that matter."""

_NEEDED_ATTRIBUTES = (
    "_checkpoint_connector._loaded_checkpoint",
    "_checkpoint_connector._ckpt_path",
    "_logger_connector.on_batch_end",
    "fit_loop._combined_loader",
    "fit_loop._combined_loader_states_to_load",
    "strategy.optimizer_state",
)
"""Further parts of a Trainer that are used here and are not public."""

_OVERRIDDEN = ("resume_start", "resume_end", "restore_optimizers")

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies in which the module and the optimizers of each rank have the whole state."""


def patch(module: ModuleType) -> None:
    """Replace ``Trainer.fit`` in a module ``….trainer.trainer`` of Lightning.

    Raises:
        UnknownVersionError: Lightning lacks something that is used here.
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
    """Return why the state of this training cannot be kept."""
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        return f"strategy {strategy}"
    for path in _NEEDED_ATTRIBUTES:
        owner, _, name = path.partition(".")
        if not hasattr(getattr(trainer, owner, None), name):
            return f"this version of Lightning, which has no {path}"
    return "fast_dev_run" if trainer.fast_dev_run else None


class _Fitting:
    """Keeps the state of one call of ``Trainer.fit``, and makes it go on at the kept step.

    While this context is entered, some methods of the Trainer's connectors are replaced.
    """

    def __init__(self, lightning: ModuleType, trainer: Any, fit: Fit) -> None:
        self.lightning, self.trainer, self.fit, self.progress = lightning, trainer, fit, fit.progress
        self.connector = trainer._checkpoint_connector
        self.plain = {name: getattr(self.connector, name) for name in _OVERRIDDEN}
        self.random: Any = None
        self.steps, self.global_step = 0, 0
        self.is_late = False
        """Whether a step ends after the module's ``on_train_batch_end``, which may change the state."""

    def __enter__(self) -> None:
        for name in _OVERRIDDEN:
            setattr(self.connector, name, getattr(self, name))
        logger = self.trainer._logger_connector
        self.plain_on_batch_end, logger.on_batch_end = logger.on_batch_end, self.on_late_batch_end
        callbacks = self.trainer.callbacks
        self.callback = _callback(self.lightning, self)
        # Callbacks that save checkpoints are the last ones. A step ends before them, because saving can fail.
        checkpoints = [each for each in callbacks if isinstance(each, self.lightning.callbacks.Checkpoint)]
        callbacks.insert(len(callbacks) - len(checkpoints), self.callback)

    def __exit__(self, error: object, *_: object) -> None:
        for name in _OVERRIDDEN:
            del self.connector.__dict__[name]
        del self.trainer._logger_connector.__dict__["on_batch_end"]
        if self.callback in self.trainer.callbacks:
            self.trainer.callbacks.remove(self.callback)
        if error is None:  # Otherwise, the state is kept when the exception has ended the program.
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
        # The kept weights are loaded when the optimizers exist. Until then, hooks find those of now.
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
        # A later fit of the same Trainer counts on.
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
        """Run after all hooks of the end of a batch."""
        self.plain_on_batch_end()
        if self.is_late and self.trainer.training:
            self.end_step()

    def end_step(self) -> None:
        """Tell that a step has ended, if the optimizer has run since the last one."""
        if self.trainer.global_step != self.global_step:
            self.global_step = self.trainer.global_step
            self.steps += 1
            self.fit.step(self.steps)


def _callback(lightning: ModuleType, fitting: _Fitting) -> Any:
    """Return a callback that tells when a step has ended."""

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
    """What Lightning writes into a checkpoint, without the tensors of the module and the optimizers."""

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
        # The state of a module takes long, so ask for it only if a hook may look at it.
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
    """The positions of the data loaders of this rank that have a state."""

    def __init__(self, trainer: Any) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        loader = self._loop._combined_loader
        return {"loaders": [] if loader is None else loader._state_dicts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # In a checkpoint, there are only the positions of rank 0.
        self._loop._combined_loader_states_to_load = state["loaders"]


def _has_hook(lightning: ModuleType, owner: Any, name: str) -> bool:
    """Return whether the class of a module or callback has defined a hook."""
    plain = (getattr(lightning.LightningModule, name), getattr(lightning.Callback, name))
    return getattr(type(owner), name, None) not in plain


def _hyperparameters(trainer: Any) -> dict[str, Any]:
    """Return the hyperparameters of module and data, as they are in a checkpoint."""
    return {
        each.CHECKPOINT_HYPER_PARAMS_KEY: dict(each.hparams)
        for each in (trainer.lightning_module, trainer.datamodule)
        if each is not None and each.hparams
    }
