"""A training loop of one's own on Lightning Fabric."""

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


def main() -> None:
    arguments = parse_arguments()
    checkpoint = arguments.directory / "fabric.ckpt"

    fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=WORLD_SIZE)
    fabric.launch()
    assert isinstance(fabric.strategy.cluster_environment, TorchElasticEnvironment)

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Rows(), batch_size=BATCH_SIZE))
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "step": 0}
    if checkpoint.exists():
        fabric.load(checkpoint, state)

    first = state["step"]
    for epoch in range(state["epoch"], EPOCHS):
        for features, labels in loader:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(features), labels))
            optimizer.step()
            state["step"] += 1
            fail_if_told(arguments, state["step"])
        state["epoch"] = epoch + 1
        fabric.save(checkpoint, state)

    report("fabric_loop", state["step"] - first, sum_of(model))


if __name__ == "__main__":
    main()
    leave()
