"""Values of all options of a command line."""

from __future__ import annotations

from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Namespace(SimpleNamespace):
    """Values of all options, similar to ``argparse.Namespace``. Each attribute is named after its option,
    with underscores. After parsing, ``given`` contains the names of the options set on the command line.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
