"""Make torch's own rendezvous modules available under the names of elasticrs.

Elasticrs itself does not use these modules. If a program imports one of them, torch's module is imported and
takes its place.
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
