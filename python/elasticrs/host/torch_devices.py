"""Counting of devices with torch: a function for processes that have imported torch, and a program that
imports it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def count(torch: Any, word: str) -> tuple[str, int]:
    """Return the kind and number of devices: ``cpu`` if ``auto`` finds no accelerator, ``unknown`` for a word
    that torch does not know.

    Args:
        torch: module ``torch``.
        word: ``gpu``, ``auto``, ``xpu``, or the name of a device from an extension of torch.
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
        # Remove this folder from the path, because its modules have the same names as other modules.
        del sys.path[0]
    import torch

    print("elasticrs", *count(torch, sys.argv[1]))
