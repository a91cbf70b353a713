"""Collectives for :meth:`elasticrs.train.State.sync`. All workers must call each collective together.

Without a process group, or with a single worker, the result is this worker's own data. NCCL groups copy CPU
tensors to the GPU and back. A broadcast sends only the value of ``src_rank``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "all_gather_longs",
    "all_gather_return_max_long",
    "broadcast_binary",
    "broadcast_bool",
    "broadcast_float_list",
    "broadcast_long",
    "broadcast_model",
    "convert_to_distributed_tensor",
    "convert_to_normal_tensor",
    "get_rank",
    "is_distributed_training_run",
]

_CHUNKS = 8
_LARGE = 8 << 20


def _distributed() -> Any:
    # Type checkers consider the names in `torch.distributed` private.
    import torch.distributed

    return torch.distributed


def is_distributed_training_run() -> bool:
    """Return true if there is a process group with more than one worker."""
    dist = _distributed()
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def get_rank() -> int:
    """Return this worker's rank, or 0 without a process group."""
    dist = _distributed()
    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0


def convert_to_distributed_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return a tensor that the process group can send, and the original device: ``"cpu"`` or ``"gpu"``."""
    origin = "gpu" if tensor.is_cuda else "cpu"
    if origin == "cpu" and _distributed().get_backend() == "nccl":
        tensor = tensor.cuda()
    return tensor, origin


def convert_to_normal_tensor(tensor: torch.Tensor, orig_device: str) -> torch.Tensor:
    """Move a tensor back to the device that :func:`convert_to_distributed_tensor` returned."""
    return tensor.cpu() if tensor.is_cuda and orig_device == "cpu" else tensor


def broadcast_long(value: int, src_rank: int = 0) -> int:
    """Broadcast an integer from one worker to all workers, and return it."""
    import torch

    if not is_distributed_training_run():
        return value
    sent, _ = convert_to_distributed_tensor(torch.tensor([value], dtype=torch.long))
    _distributed().broadcast(sent, src_rank)
    return int(sent.item())


def broadcast_bool(value: bool, src_rank: int = 0) -> bool:
    """Broadcast a boolean from one worker to all workers, and return it."""
    return bool(broadcast_long(int(value), src_rank))


def broadcast_float_list(float_list: Sequence[float], src_rank: int = 0) -> list[float]:
    """Broadcast a list of floats from one worker to all workers, and return it. The lengths may differ."""
    import torch

    if not is_distributed_training_run():
        return list(float_list)
    sent = torch.tensor(float_list, dtype=torch.double).view(torch.uint8)
    received: list[float] = broadcast_binary(sent, src_rank).view(torch.double).tolist()
    return received


def broadcast_model(model: torch.nn.Module | int, src_rank: int | torch.nn.Module = 0) -> None:
    """Broadcast a model's parameters, but not its buffers, in place. All workers must have the same shapes.

    Positional arguments may come in either order, because torchelastic 0.1 takes the rank first.
    """
    if isinstance(model, int):
        model, src_rank = src_rank, model
    if not is_distributed_training_run():
        return
    dist = _distributed()
    pending = []
    for parameter in cast("torch.nn.Module", model).parameters():
        sent, origin = convert_to_distributed_tensor(parameter.data)
        pending.append((parameter, sent, origin, dist.broadcast(sent, src_rank, async_op=True)))
    for parameter, sent, origin, work in pending:
        work.wait()
        received = convert_to_normal_tensor(sent, origin)
        if received is not parameter.data:
            parameter.data.copy_(received)


def broadcast_binary(data: Any, src_rank: int = 0) -> Any:
    """Broadcast a NumPy array or tensor of type ``uint8``. Ranks other than the source may pass ``None``.

    Raises:
        TypeError: this worker passed an object of another type.
    """
    import torch

    is_tensor = isinstance(data, torch.Tensor)
    if not is_tensor and data is not None and not hasattr(data, "__array_interface__"):
        raise TypeError(f"data: got {type(data).__name__}, expected a numpy.ndarray or a tensor")
    if not is_distributed_training_run():
        return data
    mine = torch.empty(0, dtype=torch.uint8)
    if data is not None:
        # Copy a read-only array, because tensors cannot be read-only, and torch would warn.
        mine = torch.as_tensor(data if is_tensor or data.flags.writeable else data.copy())
    # Send the type and the length as one integer: n for a tensor of n bytes, and -1 - n for an array.
    length = broadcast_long(mine.numel() if is_tensor else -1 - mine.numel(), src_rank)
    if get_rank() != src_rank:
        mine = torch.empty(length if length >= 0 else -1 - length, dtype=torch.uint8)
    sent, origin = convert_to_distributed_tensor(mine.reshape(-1).contiguous())
    dist = _distributed()
    parts = sent.chunk(_CHUNKS if sent.numel() >= _LARGE else 1)
    for work in [dist.broadcast(part, src_rank, async_op=True) for part in parts]:
        work.wait()
    received = convert_to_normal_tensor(sent, origin)
    return received if length >= 0 else received.numpy()


def all_gather_longs(values: Sequence[int]) -> list[list[int]]:
    """Return the integers of all workers, ordered by rank. All workers must pass equally many integers."""
    import torch

    if not is_distributed_training_run():
        return [list(values)]
    dist = _distributed()
    mine, _ = convert_to_distributed_tensor(torch.tensor(list(values), dtype=torch.long))
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    return [each.tolist() for each in everybodys]


def all_gather_return_max_long(value: int) -> tuple[int, int]:
    """Return a rank and a value: the largest value of all workers, and the lowest rank that has it."""
    values = [each for (each,) in all_gather_longs([value])]
    largest = max(values)
    return values.index(largest), largest
