"""A LightningModule with Lightning's Trainer, which resumes from the last checkpoint.

Run: elasticrun --standalone --nproc-per-node 2 --max-restarts 3 examples/lightning_trainer.py
Try: pkill -9 -nf lightning_trainer.py kills a rank. Watch both resume.
"""

import os

import task
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = task.make_model()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        return cross_entropy(self(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_train_start(self) -> None:
        if self.current_epoch:
            task.say(f"resumed after epoch {self.current_epoch}")


def main() -> None:
    arguments = task.parse_arguments()
    # Lightning finds elasticrun's address and ranks, but must be given the number of workers.
    trainer = Trainer(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=arguments.epochs,
        callbacks=[ModelCheckpoint(dirpath=arguments.checkpoints, save_last=True)],
        logger=False,
        enable_model_summary=False,
    )
    model = Classifier()
    loader = DataLoader(task.Points(), batch_size=task.GLOBAL_BATCH // trainer.world_size, shuffle=True)
    trainer.fit(model, loader, ckpt_path="last")
    task.report(task.loss_on_points(model, trainer.strategy.root_device))


if __name__ == "__main__":
    main()
    task.leave()
