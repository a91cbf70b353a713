"""Choose the modules to import once, before the workers are forked (``--warm``).

This package only reads files. It starts no process and does not import the user's modules. It is loaded only
if ``--warm`` is not ``off`` or ``--on-failure`` is ``replace``::

    from elasticrs import warm

    entry = warm.entry_of_command(command)          # or entry_of_script, entry_of_function
    preload = warm.preload(value, entry)            # UsageError: a module that cannot exist

The interpreter from which the workers are forked executes ``preload.steps`` in order. Each step has one of
three forms:

- ``a.b``: import the module as ``import a.b`` does.
- ``a.b:c``: import it as ``from a.b import c`` does, with ``__import__("a.b", fromlist=["c"])``. This imports
  ``c`` if it is a module, and everything that ``a.b`` loads lazily for its attribute ``c``. A missing ``c``
  causes no error here, because the script itself raises the error.
- ``NAME=value``: set an environment variable, because the script sets it before its next import. Workers
  start without the variable and set it themselves.

``preload.modules`` contains the steps of the first two forms.

``preload.is_explicit`` is true if the user has named the modules. In this case, a module that is not found or
that raises an exception is reported in full. If it is false, the modules come from the source of the script,
which may not import all of them when it runs (because of ``if``, ``try``, or a path that it adds first). In
this case, a module that is not found is skipped silently.

``preload.folders`` are the folders that come first on the workers' path. They contain the user's own modules,
such as a ``profile.py`` beside the script. In a worker that starts cold, every import of ``profile`` loads
the user's module. But a preloaded ``torch._dynamo`` imports the standard library's ``profile``, and the
script would then get the standard library's module, too. So a module is left out if its import has loaded a
module whose name also exists in these folders.

``preload.remarks`` are lines for the user, to be printed after ``warm: ``. If there are no modules, the
workers start cold.
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
