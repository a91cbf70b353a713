"""FSDP2 with distributed checkpoints. Each rank saves its shards, and a different number of ranks can load
them.

Run: elasticrun --standalone --nproc-per-node 4 --max-restarts 3 examples/fsdp2.py
Try: pkill -9 -nf fsdp2.py kills a rank; all four resume. After Ctrl-C, resume with --nproc-per-node 2.
"""

import task
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler


class Training(dcp.stateful.Stateful):
    """Content of a checkpoint. dcp calls these methods on every rank."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def main() -> None:
    arguments = task.parse_arguments()
    device = task.join()
    model = task.make_model().to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    training = Training(model, optimizer)

    first = 0
    if (checkpoint := task.latest(arguments.checkpoints)) is not None:
        dcp.load({"training": training}, checkpoint_id=checkpoint)
        first = task.number(checkpoint)
        task.say(f"resumed after epoch {first}")

    points = task.Points()
    sampler = DistributedSampler(points)
    loader = DataLoader(points, batch_size=task.GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(features.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        task.say(f"epoch {epoch + 1}: loss {loss:.4f} on rank 0")
        dcp.save({"training": training}, checkpoint_id=arguments.checkpoints / "partial")
        task.publish(arguments.checkpoints / "partial", epoch + 1)
    task.report(task.loss_on_points(model, device))


if __name__ == "__main__":
    main()
    task.leave()
