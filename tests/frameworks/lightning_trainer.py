"""A module trained by Lightning's Trainer, which resumes from the last checkpoint that there is."""

import argparse
from typing import Any

import lightning
import torch
from common import (
    BATCH_SIZE,
    EPOCHS,
    WORLD_SIZE,
    Rows,
    fail_if_told,
    leave,
    make_model,
    parse_arguments,
    report,
    sum_of,
)
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Watch(Callback):
    """Counts the steps of this attempt, and has the accident."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.steps = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.steps += 1
        fail_if_told(self.arguments, trainer.global_step)


def main() -> None:
    arguments = parse_arguments()
    watch = Watch(arguments)
    keep = ModelCheckpoint(dirpath=arguments.directory / "trainer", save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=WORLD_SIZE,
        max_epochs=EPOCHS,
        callbacks=[watch, keep],
        default_root_dir=arguments.directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)
    model = Classifier()
    trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=BATCH_SIZE), ckpt_path="last")
    report("lightning_trainer", watch.steps, sum_of(model))


if __name__ == "__main__":
    main()
    leave()
