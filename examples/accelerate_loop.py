"""A custom training loop, made distributed with Accelerate.

Run: elasticrun --standalone --nproc-per-node 2 --max-restarts 3 examples/accelerate_loop.py
Try: pkill -9 -nf accelerate_loop.py kills a rank. Watch both resume.
Try: pkill -USR1 -of accelerate_loop.py saves a checkpoint of the current step; pkill -of saves and stops.
"""

import task
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elasticrs import checkpoint_requested


def main() -> None:
    arguments = task.parse_arguments()
    # Let the order of the points depend only on the epoch, so that a resumed epoch has the same order.
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    # Set `cpu` on a machine without a GPU, because each rank would otherwise train alone, without the others.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
    model = task.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(
        task.Points(), batch_size=task.GLOBAL_BATCH // accelerator.num_processes, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # Checkpoints are named after the number of steps, because one may be saved in the middle of an epoch.
    done, steps = 0, len(loader)
    if (checkpoint := task.latest(arguments.checkpoints)) is not None:
        accelerator.load_state(checkpoint)
        done = task.number(checkpoint)
        task.say(f"resumed after epoch {done // steps}")

    def save() -> None:
        accelerator.save_state(arguments.checkpoints / "partial")
        task.publish(arguments.checkpoints / "partial", done)

    for epoch in range(done // steps, arguments.epochs):
        loader.set_epoch(epoch)
        for features, labels in accelerator.skip_first_batches(loader, done % steps):
            optimizer.zero_grad()
            loss = cross_entropy(model(features), labels)
            accelerator.backward(loss)
            optimizer.step()
            done += 1
            # All ranks get the same answer in the same step.
            wish = checkpoint_requested()
            if wish or done % steps == 0:
                save()
            if wish == "stop":
                return
        task.say(f"epoch {epoch + 1}: loss {loss:.4f} on rank 0")
    task.report(task.loss_on_points(model, accelerator.device))


if __name__ == "__main__":
    main()
    task.leave()
