"""A plain loop of torch, made distributed by Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from common import BATCH_SIZE, EPOCHS, Rows, fail_if_told, leave, make_model, parse_arguments, report, sum_of


class Progress:
    """What Accelerate saves and loads beside the model."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def main() -> None:
    arguments = parse_arguments()
    checkpoint = arguments.directory / "accelerate"

    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))

    first = progress.step
    for epoch in range(progress.epoch, EPOCHS):
        for features, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(features), labels))
            optimizer.step()
            progress.step += 1
            fail_if_told(arguments, progress.step)
        progress.epoch = epoch + 1
        accelerator.save_state(str(checkpoint))

    report("accelerate_loop", progress.step - first, sum_of(model))


if __name__ == "__main__":
    main()
    leave()
