"""Torch's own rendezvous modules, under the names that they have in elasticrs.

The rendezvous of elasticrs does not use them. A program that imports such a name gets torch's module, which
is imported at that moment.
"""

from __future__ import annotations

import sys
from importlib import import_module


def replace_with_torchs(name: str) -> None:
    """Replace a module that is being imported with torch's module of the same name.

    Args:
        name: full name of the elasticrs module.

    Raises:
        ImportError: torch is not installed.
    """
    sys.modules[name] = import_module(f"torch.distributed.elastic.{name.partition('.')[2]}")
