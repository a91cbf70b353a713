"""DistributedDataParallel with batches from data loaders that use worker processes.

Run: elasticrun --standalone --nproc-per-node 2 --max-restarts 3 examples/data_loaders.py
Try: pkill -9 -nf data_loaders.py kills a worker of a data loader. Its rank fails, and both ranks resume.
"""

import os

import task
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    arguments = task.parse_arguments()
    checkpoint = arguments.checkpoints / "model.pt"
    device = task.join()
    model = DistributedDataParallel(task.make_model().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epochs"]
        task.say(f"resumed after epoch {first}")

    points = task.Points()
    sampler = DistributedSampler(points)
    loader = DataLoader(
        points,
        batch_size=task.GLOBAL_BATCH // dist.get_world_size(),
        sampler=sampler,
        num_workers=2,
        persistent_workers=True,
    )
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(features.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        task.say(f"epoch {epoch + 1}: loss {loss:.4f} on rank 0")
        if dist.get_rank() == 0:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs": epoch + 1,
            }
            torch.save(state, checkpoint.with_suffix(".partial"))
            # Replace the checkpoint atomically, because this rank may be killed at any moment.
            os.replace(checkpoint.with_suffix(".partial"), checkpoint)
    task.report(task.loss_on_points(model, device))


if __name__ == "__main__":
    main()
    task.leave()
