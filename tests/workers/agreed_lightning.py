"""A usual training with Lightning that believes to run under Slurm. On SIGUSR1, Lightning's own handler saves
a checkpoint, and calls a command that has Slurm queue the job again. Here, that command does nothing.

Usage: ``agreed_lightning.py FOLDER`` as the program of a job. It prints ``BEGUN RANK`` after three steps.
When a rank saves, it prints ``SAVES RANK STEP UPDATES``, with the numbers of steps and of updates of the
parameters in the checkpoint. When the checkpoint is saved, rank 0 prints ``SAVED NUMBER``.
"""

import logging
import os
import select
import sys
import warnings

import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["SLURM_JOB_ID"] = "1"


def say(text):
    os.write(1, f"{text}\n".encode())


class Slurm(SLURMEnvironment):
    """Lightning's support of Slurm, but ranks and address come from the variables that elasticrs sets."""

    creates_processes_externally = True
    main_address = property(lambda _self: os.environ["MASTER_ADDR"])
    main_port = property(lambda _self: int(os.environ["MASTER_PORT"]))

    def world_size(self):
        return WORLD

    def global_rank(self):
        return RANK

    def local_rank(self):
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self):
        return int(os.environ["GROUP_RANK"])

    def validate_settings(self, num_devices, num_nodes):
        pass


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))

    def training_step(self, batch, number):
        select.select([], [], [], 0.001 * (1 + os.urandom(1)[0] % 8))
        if number == 3:
            say(f"BEGUN {RANK}")
        return (self.net(batch) - batch).pow(2).mean()

    def on_save_checkpoint(self, checkpoint):
        updates = {int(each["step"]) for each in checkpoint["optimizer_states"][0]["state"].values()}
        say(f"SAVES {RANK} {checkpoint['global_step']} {' '.join(map(str, updates))}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Samples(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(RANK)
        while True:
            yield torch.randn(16, generator=generator)


def requeue(*_command):
    saved.append(trainer.global_step)
    say(f"SAVED {len(saved)}")
    return 0


saved = []
signal_connector.call = requeue
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[Slurm(auto_requeue=True)],
    default_root_dir=sys.argv[1],
)
trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=8))
