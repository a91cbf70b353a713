"""Collectives for :meth:`elasticrs.train.State.sync`: each is called by all workers together.

Without a process group, or alone in it, each returns what it is given. Tensors on the CPU go over the GPU
where the group is NCCL's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    # Its names are not exported in the sense of type checkers.
    import torch.distributed

    return torch.distributed


def is_distributed_training_run() -> bool:
    """True if there is a process group with more than one worker."""
    dist = _distributed()
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def get_rank() -> int:
    """Return the rank of this worker; 0 without a process group."""
    dist = _distributed()
    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0


def convert_to_distributed_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return a tensor that the process group can send, and where the given one was: ``"cpu"`` or ``"gpu"``.

    Args:
        tensor: on any device.
    """
    origin = "gpu" if tensor.is_cuda else "cpu"
    if origin == "cpu" and _distributed().get_backend() == "nccl":
        tensor = tensor.cuda()
    return tensor, origin


def convert_to_normal_tensor(tensor: torch.Tensor, orig_device: str) -> torch.Tensor:
    """Bring a tensor back to where it was.

    Args:
        tensor: which has been sent or received.
        orig_device: what :func:`convert_to_distributed_tensor` has told.
    """
    return tensor.cpu() if tensor.is_cuda and orig_device == "cpu" else tensor


def _broadcast(tensor: torch.Tensor, src: int) -> torch.Tensor:
    sent, origin = convert_to_distributed_tensor(tensor)
    _distributed().broadcast(sent, src)
    return convert_to_normal_tensor(sent, origin)


def broadcast_long(value: int, src: int = 0) -> int:
    """Return the whole number of one worker.

    Args:
        value: of this worker.
        src: the rank whose number counts.
    """
    import torch

    if not is_distributed_training_run():
        return value
    return int(_broadcast(torch.tensor([value], dtype=torch.long), src).item())


def broadcast_bool(value: bool, src: int = 0) -> bool:
    """Return the flag of one worker.

    Args:
        value: of this worker.
        src: the rank whose flag counts.
    """
    return bool(broadcast_long(int(value), src))


def broadcast_float_list(values: Sequence[float], src: int = 0) -> list[float]:
    """Return the list of one worker; those of the others may have another length.

    Args:
        values: of this worker.
        src: the rank whose list counts.
    """
    import torch

    if not is_distributed_training_run():
        return list(values)
    length = broadcast_long(len(values), src)
    sent = torch.tensor(values if get_rank() == src else [0.0] * length, dtype=torch.double)
    received: list[float] = _broadcast(sent, src).tolist()
    return received


def broadcast_model(model: torch.nn.Module, src: int = 0) -> None:
    """Give all workers the parameters of one of them, in place. Buffers stay.

    Args:
        model: of the same shape everywhere.
        src: the rank whose parameters count.
    """
    if not is_distributed_training_run():
        return
    dist = _distributed()
    pending = []
    for parameter in model.parameters():
        sent, origin = convert_to_distributed_tensor(parameter.data)
        pending.append((parameter, sent, origin, dist.broadcast(sent, src, async_op=True)))
    for parameter, sent, origin, work in pending:
        work.wait()
        received = convert_to_normal_tensor(sent, origin)
        if received is not parameter.data:
            parameter.data.copy_(received)


def broadcast_binary(array: torch.Tensor | None, src: int = 0) -> torch.Tensor | None:
    """Return the bytes of one worker. Large ones are sent in parts, all at once.

    Args:
        array: of this worker, of type ``uint8``; may be ``None`` where another's counts.
        src: the rank whose bytes count.
    """
    import torch

    if not is_distributed_training_run():
        return array
    length = broadcast_long(0 if array is None else array.numel(), src)
    is_source = get_rank() == src and array is not None
    data = array.reshape(-1) if is_source and array is not None else torch.empty(length, dtype=torch.uint8)
    sent, origin = convert_to_distributed_tensor(data.contiguous())
    dist = _distributed()
    parts = sent.chunk(_CHUNKS if length >= _LARGE else 1)
    for work in [dist.broadcast(part, src, async_op=True) for part in parts]:
        work.wait()
    return convert_to_normal_tensor(sent, origin)


def all_gather_longs(values: Sequence[int]) -> list[list[int]]:
    """Return the whole numbers of all workers, by rank; each has as many.

    Args:
        values: of this worker.
    """
    import torch

    if not is_distributed_training_run():
        return [list(values)]
    dist = _distributed()
    mine, _ = convert_to_distributed_tensor(torch.tensor(list(values), dtype=torch.long))
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    return [each.tolist() for each in everybodys]


def all_gather_return_max_long(value: int) -> tuple[int, int]:
    """Return the rank with the largest number (the lowest such rank), and that number.

    Alone, the rank is 0.

    Args:
        value: of this worker.
    """
    values = [each for (each,) in all_gather_longs([value])]
    largest = max(values)
    return values.index(largest), largest
