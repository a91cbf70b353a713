"""A script for Lightning's Trainer that knows nothing of Keep."""

import logging
import os
import sys
import warnings

import torch
from moments import begin_fit, digest, moment, note, setting
from torch import nn

if setting("package") == "pytorch_lightning":
    import pytorch_lightning as lightning
else:
    import lightning.pytorch as lightning

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Batches:
    """A loader with a state, so that Lightning restores the position in the data."""

    def __init__(self, size=16):
        self.size, self.at = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            moment("loader", self.at)
            chosen = torch.Generator().manual_seed(1000 * int(os.environ["RANK"]) + self.at)
            yield torch.randn(4, 16, generator=chosen), torch.randint(4, (4,), generator=chosen)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.Linear(64, 4),
        )
        self.automatic_optimization = not setting("manual")

    def training_step(self, batch, _number):
        data, wanted = batch
        loss = nn.functional.cross_entropy(self.net(data), wanted)
        note("batch", self.global_step, float(data.sum()).hex(), loss.item().hex())
        moment("forward", self.global_step)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                optimizer.step()
                scheduler.step()
        return loss

    def on_before_optimizer_step(self, _optimizer):
        moment("before optimizer", self.global_step)

    def optimizer_step(self, *arguments, **named):
        super().optimizer_step(*arguments, **named)
        moment("after optimizer", self.global_step)

    def on_train_batch_start(self, *_):
        moment("begin", self.global_step)

    def validation_step(self, batch, _number):
        data, wanted = batch
        moment("evaluate", self.global_step)
        self.log("loss", nn.functional.cross_entropy(self.net(data), wanted), sync_dist=True)

    def test_step(self, *batch):
        note("test", batch[1])

    def on_train_end(self):
        moment("train end", self.global_step)

    def configure_optimizers(self):
        halves = [self.net[:4], self.net[4:]] if setting("manual") else [self.net]
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in halves]
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 40) for each in optimizers]
        return optimizers, [{"scheduler": each, "interval": "step"} for each in schedulers]


class Average(Module):
    """Changes a buffer after each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(64, 16))

    def on_train_batch_end(self, *_):
        self.average.mul_(0.9).add_(self.net[0].weight.detach(), alpha=0.1)


def averages(module):
    return [module.average] if setting("average") else []


class Counts(lightning.Callback):
    """A callback with a state."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def main(folder):
    lightning.seed_everything(setting("seed", 1), verbose=False)
    module, counts = Average() if setting("average") else Module(), Counts()
    callbacks = [counts]
    if setting("checkpoints"):
        callbacks.append(
            lightning.callbacks.ModelCheckpoint(
                f"{folder}/out", every_n_train_steps=setting("checkpoints"), save_last=True
            )
        )
    options = {"max_steps": 24, **setting("options", {})}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=setting("strategy", "ddp"),
        logger=False,
        enable_checkpointing=bool(setting("checkpoints")),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )
    validation = [Batches(2)] if "val_check_interval" in options else []
    if setting("test"):
        trainer.test(module, Batches(3), verbose=False)
        return
    for fit in range(setting("fits", 1)):
        begin_fit(fit)
        trainer.fit(module, Batches(), validation, ckpt_path=setting("resume"))
        note(
            "trained",
            trainer.global_step,
            fit,
            digest([*module.parameters(), *averages(module)]),
            counts.batches,
        )
        moment("done", trainer.global_step)
        trainer.fit_loop.epoch_loop.max_steps += options["max_steps"]


main(setting("folder"))
sys.exit(0)
