"""Count devices as torch sees them: in a process that has imported torch, or as a program that does."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def count(torch: Any, word: str) -> tuple[str, int]:
    """Return kind and number: ``cpu`` when there is none for ``auto``, ``unknown`` for a word that torch does
    not know.

    Args:
        torch: the module.
        word: ``gpu``, ``auto``, ``xpu``, or the name of a device that torch was extended with.
    """
    if word == "auto":
        if not torch.accelerator.is_available():
            return "cpu", 0
        return torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    if word in ("gpu", "xpu"):
        kind = "cuda" if word == "gpu" else word
        return kind, getattr(torch, kind).device_count()
    if word == torch._C._get_privateuse1_backend_name():
        module = getattr(torch, word, None)
        return word, module.device_count() if module is not None and module.is_available() else 0
    return "unknown", 0


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        # The modules beside this one have names that others have as well.
        del sys.path[0]
    import torch

    print("elasticrs", *count(torch, sys.argv[1]))
