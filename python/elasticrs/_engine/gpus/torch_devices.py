"""Counts torch devices. Processes without torch run this file as a program, which imports torch."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def count(torch: Any, word: str) -> tuple[str, int]:
    """Return the kind and the number of devices of ``word``, as in :func:`.worker_count`.
    The kind is ``cpu`` if ``auto`` finds no accelerator, and ``unknown`` if torch has no such device type.
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
        # The modules in this folder would hide top-level modules with the same names.
        del sys.path[0]
    import torch

    print("elasticrs", *count(torch, sys.argv[1]))
