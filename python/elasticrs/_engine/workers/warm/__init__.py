"""Choose the modules to import once, before the workers are forked (``--warm``).

This package only reads files, and does not import the user's modules. The nursery executes ``preload.steps``
in order. Each step has one of three forms:

- ``a.b``: import the module as ``import a.b`` does.
- ``a.b:c``: import it as ``from a.b import c`` does, with all that ``a.b`` loads lazily for ``c``. A missing
  ``c`` causes no error here, because the script itself raises the error.
- ``NAME=value``: set an environment variable, because the script sets it before its next import.

If ``preload.is_explicit``, the user has named the modules, and a missing module is reported. Otherwise, it is
skipped silently, because the script may not import it (because of ``if``, ``try``, or a path that it adds).

``preload.folders`` contain the user's own modules, such as a ``profile.py`` beside the script. But
``torch._dynamo`` imports the standard library's ``profile``, and the script would then get that module, too.
So a module is left out if its import has loaded a module whose name also exists in these folders.
"""

from __future__ import annotations

from elasticrs._engine.job.config import Preload
from elasticrs._engine.workers.warm.modules import (
    Entry,
    entry_of_command,
    entry_of_function,
    entry_of_script,
    preload,
)

__all__ = [
    "Entry",
    "Preload",
    "entry_of_command",
    "entry_of_function",
    "entry_of_script",
    "preload",
]
