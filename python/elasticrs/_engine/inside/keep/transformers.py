"""Keeps the training state of ``transformers.Trainer``, so that ``Trainer.train`` goes on from it after a
restart.

The state of a step is taken when the callbacks of the step's end have run, but before the Trainer logs,
evaluates and saves. When training goes on from a kept step, the Trainer first logs, evaluates and saves after
this step (perhaps for the second time), because an evaluation draws random numbers, on which the next step
depends.
"""

from __future__ import annotations

import functools
import json

from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState

from elasticrs._engine.inside.keep import frameworks
from elasticrs._engine.inside.keep.frameworks import UnknownVersionError
from elasticrs._engine.inside.keep.state import random_state, set_random_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from elasticrs._engine.inside.keep.frameworks import Fit

_NEEDED = {
    "train": ("resume_from_checkpoint", "trial"),
    "_inner_training_loop": ("args", "resume_from_checkpoint", "trial"),
    "_init_training_state": (
        "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial",
    ),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_run_epoch": ("model", "epoch", "trial", "ignore_keys_for_eval", "start_time"),
    "_get_grad_norm": (),
    "_finalize_training": (),
    "_get_learning_rate": (),
    "_maybe_log_save_evaluate": (
        "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time",
        "learning_rate",
    ),
}  # fmt: skip
"""Methods of the Trainer that this module replaces or calls, with the parameters that matter for that."""

_OVERRIDDEN = (
    "_inner_training_loop",
    "_init_training_state",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_run_epoch",
    "_get_grad_norm",
    "_finalize_training",
)

_PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of the Trainer's ``TrainerState`` that change while it trains. ``log_history`` is not among them,
because it is kept in another form.
"""

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")

_RESUMED = "the state that elasticrs has kept"
"""Text that the Trainer's messages show in place of a checkpoint's path when a kept state is restored."""


def patch(module: ModuleType) -> None:
    """Replace ``Trainer.train`` in the module ``transformers.trainer``, so that the training state is kept.

    Raises:
        UnknownVersionError: this version of the Trainer lacks a method, parameter or field that is used here.
    """
    trainer_class = module.Trainer
    frameworks.require(trainer_class, _NEEDED)
    for owner, names in ((TrainerState, (*_PROGRESS, "log_history")), (TrainerControl, _FLAGS)):
        missing = [name for name in names if name not in owner.__dataclass_fields__]
        if missing:
            raise UnknownVersionError(f"{owner.__qualname__} has no field {missing[0]}")
    plain = trainer_class.train

    @functools.wraps(plain)
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **others: Any
    ) -> Any:
        fit = frameworks.begin("transformers", lambda: _unsupported(self, trial))
        if fit is None:
            return plain(self, resume_from_checkpoint, trial, *args, **others)
        if fit.progress is not None:
            path, step = _checkpoint(module, self, resume_from_checkpoint)
            is_kept = fit.choose(self.model, path, step, fit.progress["state"]["global_step"])
            resume_from_checkpoint = None if is_kept else resume_from_checkpoint
        with _Training(self, fit):
            return plain(self, resume_from_checkpoint, trial, *args, **others)

    trainer_class.train = train


def _unsupported(trainer: Any, trial: Any) -> str | None:
    """Return the name of a feature that this training uses, and for which its state cannot be kept. Return
    ``None`` if it uses no such feature.
    """
    reasons = {
        "a hyperparameter search": trial is not None,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "auto_find_batch_size": trainer.args.auto_find_batch_size,
        f"device {trainer.args.device.type}": trainer.args.device.type not in ("cpu", "cuda"),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _checkpoint(module: ModuleType, trainer: Any, wanted: Any) -> tuple[str | None, int]:
    """Return the path of the checkpoint that the script asks for, and the number of its step. Return ``None``
    and 0 if the script asks for none, or if the checkpoint cannot be read.
    """
    path = module.get_last_checkpoint(trainer.args.output_dir) if wanted is True else wanted
    if not path:
        return None, 0
    try:
        with open(f"{path}/trainer_state.json", encoding="utf-8") as file:
            return path, int(json.load(file)["global_step"])
    except (OSError, ValueError, KeyError):
        return None, 0  # The checkpoint cannot be read, so the kept state is used.


class _Training:
    """Keeps the training state during one call of ``Trainer.train``, and makes that call go on at the kept
    step.

    While this context is entered, its methods replace some methods of the Trainer. They load the kept state
    in the order in which the Trainer would load a checkpoint.
    """

    def __init__(self, trainer: Any, fit: Fit) -> None:
        self.trainer, self.fit, self.progress = trainer, fit, fit.progress
        self.plain = {name: getattr(trainer, name) for name in _OVERRIDDEN}
        self.history = _History()
        self.losses = _Losses(trainer)
        self.random: Any = None
        self.is_open = False
        self.epoch, self.epoch_began_at = 0, 0
        self.grad_norm: Any = None
        self.learning_rate: float | None = None

    def __enter__(self) -> None:
        for name in _OVERRIDDEN:
            setattr(self.trainer, name, getattr(self, name))
        self.accelerator = self.trainer.accelerator
        self.plain_backward, self.accelerator.backward = self.accelerator.backward, self._backward
        self.callback = _Steps(self)
        self.trainer.add_callback(self.callback)

    def __exit__(self, error: object, *_: object) -> None:
        for name in _OVERRIDDEN:
            del self.trainer.__dict__[name]
        del self.accelerator.backward
        self.trainer.remove_callback(self.callback)
        if error is None:  # After an exception, the state can still be copied when the program ends.
            self.fit.close()

    def open(self) -> None:
        """Begin to keep the states of the Trainer's model, optimizer, scheduler and the like. If they were
        kept before a restart, load them.
        """
        trainer = self.trainer
        # Take torch's optimizer, which the library Accelerate may have wrapped.
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        scaler = getattr(trainer.accelerator, "scaler", None)
        self.is_open = True
        self.fit.open(
            _Progress(self),
            module=trainer.model,
            optimizer=optimizer,
            scheduler=trainer.lr_scheduler,
            losses=self.losses,
            **({} if scaler is None else {"scaler": scaler}),
        )

    def _inner_training_loop(self, *args: Any, **named: Any) -> Any:
        if self.progress is not None:
            named["resume_from_checkpoint"] = _RESUMED
        return self.plain["_inner_training_loop"](*args, **named)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> Any:
        plain, progress = self.plain["_init_training_state"], self.progress
        counts = max_steps, num_update_steps_per_epoch, num_train_epochs
        if progress is None:
            return plain(*counts, resume_from_checkpoint, trial)
        plain(*counts, None, trial)
        trainer = self.trainer
        for name in _PROGRESS:
            setattr(trainer.state, name, progress["state"][name])
        trainer.state.log_history = self.history.load(progress["history"])
        _set_callbacks(trainer, progress["callbacks"])
        self.epoch, self.epoch_began_at = progress["epoch"], progress["epoch_began_at"]
        steps = trainer.state.global_step - self.epoch_began_at
        self.is_epoch_over = steps >= num_update_steps_per_epoch
        skipped = 0 if trainer.args.ignore_data_skip else steps * trainer.args.gradient_accumulation_steps
        return self.epoch, skipped

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if self.progress is None:
            self.plain["_load_optimizer_and_scheduler"](checkpoint)
        else:
            self.open()
            self.random = random_state()

    def _load_scaler(self, checkpoint: Any) -> None:
        if self.progress is None:
            self.plain["_load_scaler"](checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self.random is None:
            self.plain["_load_rng_state"](checkpoint)
        else:
            set_random_state(self.random)

    def _run_epoch(self, **named: Any) -> None:
        if self.progress is not None:
            if self._finish_step(named):
                return
        else:
            self.epoch, self.epoch_began_at = named["epoch"], self.trainer.state.global_step
        self.plain["_run_epoch"](**named)

    def _finish_step(self, named: dict[str, Any]) -> bool:
        """Log, evaluate and save after the kept step, as the Trainer would have done without the restart.
        Return true if the epoch is over.
        """
        trainer, progress = self.trainer, self.progress
        assert progress is not None
        self.progress = None
        set_random_state(self.random)
        for name in _FLAGS:
            setattr(trainer.control, name, progress["flags"][name])
        self._log_save_evaluate(named, progress)
        if self.is_epoch_over or trainer.control.should_epoch_stop or trainer.control.should_training_stop:
            handler = trainer.callback_handler
            trainer.control = handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._log_save_evaluate(named, progress)
            return True
        self.random = random_state()
        return False

    def _log_save_evaluate(self, named: dict[str, Any], progress: Any) -> None:
        self.trainer._maybe_log_save_evaluate(
            self.trainer._tr_loss,
            progress["grad_norm"],
            named["model"],
            named["trial"],
            named["epoch"],
            named["ignore_keys_for_eval"],
            named["start_time"],
            learning_rate=progress["learning_rate"],
        )

    def _backward(self, loss: Any, **named: Any) -> None:
        self.losses.coming = loss.detach()
        try:
            self.plain_backward(loss, **named)
        finally:
            self.losses.coming = None

    def _get_grad_norm(self, *args: Any, **named: Any) -> Any:
        self.grad_norm = self.plain["_get_grad_norm"](*args, **named)
        return self.grad_norm

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        self.fit.end()  # Keep the last step now, because the Trainer may load the weights of its best step.
        return self.plain["_finalize_training"](*args, **named)


class _Steps(TrainerCallback):  # type: ignore[misc]
    """A callback that notes the end of each step. It is the last callback, so that the decisions of the
    others, such as to stop the training, are kept with the step.
    """

    def __init__(self, training: _Training) -> None:
        self._training = training

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if not self._training.is_open:
            self._training.open()
        else:
            self._training.losses.apply()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._training.learning_rate = self._training.trainer._get_learning_rate()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._training.fit.step(state.global_step)


class _Progress:
    """An object whose state is kept. Its state is the Trainer's progress: counts of steps, the log, the
    states of callbacks, and the like.
    """

    def __init__(self, training: _Training) -> None:
        self._training = training

    def state_dict(self) -> dict[str, Any]:
        training = self._training
        trainer = training.trainer
        grad_norm = training.grad_norm
        # Reading the norm of the gradients from a GPU takes time, so do it only if the Trainer logs it in
        # this step.
        is_read = grad_norm is not None and (trainer.control.should_log or getattr(grad_norm, "is_cpu", True))
        return {
            "state": {name: getattr(trainer.state, name) for name in _PROGRESS},
            "history": training.history.dump(trainer.state.log_history),
            "flags": {name: getattr(trainer.control, name) for name in _FLAGS},
            "callbacks": [
                [type(each).__qualname__, json.dumps(each.state()["attributes"])]
                for each in trainer.callback_handler.callbacks
                if isinstance(each, ExportableState)
            ],
            "epoch": training.epoch,
            "epoch_began_at": training.epoch_began_at,
            "grad_norm": float(grad_norm) if is_read else None,
            "learning_rate": training.learning_rate,
        }


def _set_callbacks(trainer: Any, states: list[list[str]]) -> None:
    """Load kept states into those callbacks of the Trainer that have a state. Leave out a callback if another
    class of callback was in its place when the states were kept.
    """
    callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
    for callback, (name, attributes) in zip(callbacks, states, strict=False):
        if type(callback).__qualname__ == name:
            for attribute, value in json.loads(attributes).items():
                setattr(callback, attribute, value)


class _History:
    """Encodes the entries of the Trainer's ``log_history``. This list only grows, so the text of the entries
    is remembered, and each entry is encoded only once.
    """

    def __init__(self) -> None:
        self._count, self._text = 0, ""

    def dump(self, entries: list[dict[str, float]]) -> str:
        """Return all entries as text, one in each line."""
        if len(entries) < self._count:
            self._count, self._text = 0, ""
        self._text += "".join(json.dumps(entry) + "\n" for entry in entries[self._count :])
        self._count = len(entries)
        return self._text

    def load(self, text: str) -> list[dict[str, float]]:
        """Return the entries that :meth:`dump` has turned into ``text``."""
        return [json.loads(line) for line in text.splitlines()]


class _Losses:
    """An object whose state is kept: the sum of this rank's losses since the Trainer has last logged."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}
        self.coming: Any = None
        """Loss of the batch whose backward pass runs now. The Trainer adds this loss to its sum after the
        pass, but the state that is kept for the step's end is written before the pass.
        """

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # As long as the training has not begun, return the restored state. If the process ends before the
        # training begins, the copy of its state must still contain the restored one.
        if self._loaded or not hasattr(trainer, "_tr_loss"):
            return self._loaded
        total, coming = trainer._tr_loss, self.coming
        # Do not read the sum from a GPU, because reading would wait for the GPU's earlier work.
        is_on_cpu = total.device.type == "cpu"
        if (
            is_on_cpu
            and coming is not None
            and (coming.isfinite() or not trainer.args.logging_nan_inf_filter)
        ):
            total = total + coming
        return {
            "loss": total.item() if is_on_cpu else None,
            "logged_at": trainer._globalstep_last_logged,
            "operations": trainer.current_flos,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def apply(self) -> None:
        """Set the Trainer's losses to the kept ones. Call this after the Trainer has set its losses to zero.

        At its end, the Trainer reports the average loss of all steps since it was resumed. So subtract the
        kept losses, which are of earlier steps, from the sum for this average.
        """
        trainer, state = self._trainer, self._loaded
        if state.get("loss") is not None:
            trainer._tr_loss.fill_(state["loss"])
            trainer._total_loss_scalar = -state["loss"]
            trainer._globalstep_last_logged = state["logged_at"]
            trainer.current_flos = state["operations"]
        self._loaded = {}
