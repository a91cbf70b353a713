"""A script for the Trainer of transformers that knows nothing of Keep."""

import os
import sys

import torch
import transformers
from moments import begin_fit, digest, moment, note, setting
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

torch.set_num_threads(1)


class Words(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        self.words = torch.randint(32, (size, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, at):
        moment("loader", Watch.step)
        return {"input_ids": self.words[at], "labels": (self.words[at][0] >= 16).long()}


class Watched(Trainer):
    def compute_loss(self, model, inputs, *arguments, **named):
        loss = super().compute_loss(model, inputs, *arguments, **named)
        value = loss[0] if isinstance(loss, tuple) else loss
        if model.training:
            note("batch", self.state.global_step, int(inputs["input_ids"].sum()), value.item().hex())
            moment("forward", self.state.global_step)
        else:
            moment("evaluate", self.state.global_step)
        return loss

    def _save_checkpoint(self, *arguments, **named):
        super()._save_checkpoint(*arguments, **named)
        moment("saved", self.state.global_step)


class Watch(TrainerCallback):
    step = 0
    """Number of the last step that has ended, which the data set reads."""

    def on_pre_optimizer_step(self, _args, state, _control, **_):
        moment("before optimizer", state.global_step)

    def on_optimizer_step(self, _args, state, _control, **_):
        moment("after optimizer", state.global_step)

    def on_step_begin(self, _args, state, _control, **_):
        Watch.step = state.global_step
        moment("begin", state.global_step)

    def on_log(self, _args, state, _control, logs, **_):
        kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
        note("log", state.global_step, {name: value for name, value in logs.items() if name in kept})

    def on_evaluate(self, _args, state, _control, metrics, **_):
        note("evaluated", state.global_step, metrics["eval_loss"].hex())

    def on_train_end(self, _args, state, _control, **_):
        moment("train end", state.global_step)


def main(folder):
    transformers.set_seed(setting("seed", 1))
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=12,
    )
    model = BertForSequenceClassification(config)
    options = {
        "max_steps": 24,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "logging_strategy": "no",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "ddp_find_unused_parameters": False,
        **setting("options", {}),
    }
    arguments = TrainingArguments(
        output_dir=f"{folder}/out", disable_tqdm=True, report_to="none", use_cpu=True, **options
    )
    callbacks = [Watch()]
    if setting("patience"):
        callbacks.append(transformers.EarlyStoppingCallback(setting("patience")))
    trainer = Watched(
        model=model,
        args=arguments,
        train_dataset=Words(setting("size", 128), 7),
        eval_dataset=Words(16, 8),
        callbacks=callbacks,
    )
    for fit in range(setting("fits", 1)):
        begin_fit(fit)
        resume = setting("resume")
        if resume == "last":
            os.makedirs(arguments.output_dir, exist_ok=True)
            resume = transformers.trainer_utils.get_last_checkpoint(arguments.output_dir) is not None
        result = trainer.train(resume_from_checkpoint=resume)
        note("trained", result.global_step, fit, digest(model.parameters()), trainer.state.epoch)
        moment("done", result.global_step)


main(setting("folder"))
sys.exit(0)
