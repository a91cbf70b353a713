"""A custom training loop, made distributed with Accelerate.

Run: elasticrun --standalone --nproc-per-node 2 --max-restarts 3 examples/accelerate_loop.py
Try: pkill -9 -nf accelerate_loop.py kills a rank. Watch both resume.
"""

import task
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    arguments = task.parse_arguments()
    accelerator = Accelerator()
    model = task.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(
        task.Points(), batch_size=task.GLOBAL_BATCH // accelerator.num_processes, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    first = 0
    if (checkpoint := task.latest(arguments.checkpoints)) is not None:
        accelerator.load_state(checkpoint)
        first = task.number(checkpoint)
        task.say(f"resumed after epoch {first}")

    for epoch in range(first, arguments.epochs):
        loader.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(features), labels)
            accelerator.backward(loss)
            optimizer.step()
        task.say(f"epoch {epoch + 1}: loss {loss:.4f} on rank 0")
        accelerator.save_state(arguments.checkpoints / "partial")
        task.publish(arguments.checkpoints / "partial", epoch + 1)
    task.report(task.loss_on_points(model, accelerator.device))


if __name__ == "__main__":
    main()
    task.leave()
