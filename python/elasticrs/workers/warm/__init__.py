"""What ``--warm`` means for a job: which modules are imported once, before the workers are forked.

This package decides and reads; it starts nothing and imports nothing of the user's. It is loaded only where
``--warm`` is not ``off``, or ``--on-failure`` is ``replace``::

    from elasticrs import warm

    entry = warm.entry_of_command(command)          # or entry_of_script, entry_of_function
    preload = warm.preload(value, entry)            # UsageError: a module that cannot exist

``preload.steps`` are taken in their order by the interpreter that the workers are forked from. Each has one
of three forms:

- ``a.b``: import it as ``import a.b`` does;
- ``a.b:c``: import it as ``from a.b import c`` does, thus ``__import__("a.b", fromlist=["c"])``. That imports
  ``c`` where only a module has the name, and loads what ``a.b`` loads when it is asked for ``c``. It raises
  nothing where ``c`` is missing: the script itself will;
- ``NAME=value``: set an environment variable, as the script does before its next import. Workers start
  without it, and set it themselves.

``preload.modules`` are the steps of the first two forms.

``preload.is_explicit`` is true if the user has named the modules: then one that is not found, or raises, is
told in full. Otherwise the script's source has, which may well not import it when it runs (``if``, ``try``, a
path that it adds first): then one that is not found is passed over in silence.

``preload.folders`` come first on the workers' path, and hold the user's own modules, such as ``profile.py``
beside the script. What is preloaded must not import one of the same name from elsewhere, as ``torch._dynamo``
imports the library's ``profile``: in a worker that starts cold, it and the script get the user's. So a module
is left out that has brought in the name of one in these folders.

``preload.remarks`` are for the user, a line each, to be shown after ``warm: ``. Without modules the workers
start cold.
"""

from __future__ import annotations

from elasticrs.job.preload import Preload
from elasticrs.workers.warm.entry import Entry, entry_of_command, entry_of_function, entry_of_script
from elasticrs.workers.warm.modules import preload

__all__ = [
    "Entry",
    "Preload",
    "entry_of_command",
    "entry_of_function",
    "entry_of_script",
    "preload",
]
