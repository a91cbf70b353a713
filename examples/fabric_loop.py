"""A custom training loop on Lightning Fabric.

Run: elasticrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fabric_loop.py
Try: pkill -9 -nf fabric_loop.py kills a rank. Watch both resume.
"""

import os

import task
import torch
from lightning import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    arguments = task.parse_arguments()
    checkpoint = arguments.checkpoints / "fabric.ckpt"
    # Fabric finds elasticrun's address and ranks, but must be given the number of workers.
    fabric = Fabric(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    )
    fabric.launch()
    model = task.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    # Do not let Fabric set up the loader. It would count epochs from 0 in each attempt, so the order would
    # not be resumed.
    points = task.Points()
    sampler = DistributedSampler(points)
    loader = DataLoader(points, batch_size=task.GLOBAL_BATCH // fabric.world_size, sampler=sampler)

    state = {"model": model, "optimizer": optimizer, "epochs": 0}
    if checkpoint.exists():
        fabric.load(checkpoint, state)
        task.say(f"resumed after epoch {state['epochs']}")

    for epoch in range(state["epochs"], arguments.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            features, labels = fabric.to_device(batch)
            optimizer.zero_grad()
            loss = cross_entropy(model(features), labels)
            fabric.backward(loss)
            optimizer.step()
        task.say(f"epoch {epoch + 1}: loss {loss:.4f} on rank 0")
        state["epochs"] = epoch + 1
        fabric.save(checkpoint, state)
    task.report(task.loss_on_points(model, fabric.device))


if __name__ == "__main__":
    main()
    task.leave()
