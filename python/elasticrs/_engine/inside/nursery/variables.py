"""Manages the environment variables of a warm nursery (the process that forks workers) during the imports.
Loaded by ``nursery.py``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, NoReturn

_ARROW = "JE_ARROW_MALLOC_CONF"
_QUIET = {"OPENBLAS_NUM_THREADS": "1", _ARROW: "background_thread:false"}
"""Variables that keep libraries from starting threads at import. They are set only in the C environment, so
that Python modules read the same values as in a worker.
"""

_OF_ATTEMPTS = frozenset(
    b"RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    b"MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT".split()
)
"""Variables whose values differ between attempts or workers. The nursery does not have them, so an import
that reads one cannot be preloaded.
"""


class Variables(dict):  # type: ignore[type-arg]
    """Dictionary that replaces the data of ``os.environ`` during the imports. Records each read of a variable
    that only workers have.

    Args:
        hidden: variables with a value that only C code sees, in addition to :data:`_QUIET`.
        rank_zero: names of modules that may read the rank.

    Attributes:
        asked: worker variables that a module has tried to read.
        assigned: variables that the script has set so far, and their values.
    """

    def __init__(self, hidden: dict[str, str], rank_zero: Collection[str]) -> None:
        self._hidden = {**_QUIET, **hidden}
        self._rank_zero = rank_zero
        self.assigned: dict[str, str] = {}
        self._before: dict[str, bytes | None] = {}
        self._environments: list[Any] = [os.environ, os.environb]
        for name in _OF_ATTEMPTS:
            os.environb.pop(name, None)
        self._real = self._environments[0]._data
        super().__init__(self._real)
        self.asked: list[str] = []
        self._use(self)

    def __missing__(self, name: bytes) -> NoReturn:
        if name in _OF_ATTEMPTS:
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "<module>":
                frame = frame.f_back
            if frame is None or frame.f_globals.get("__name__") not in self._rank_zero:
                self.asked.append(name.decode())
        raise KeyError(name)

    def hide(self) -> None:
        """Set the environment variables that only C code may see, such as the thread limit of OpenBLAS. Call
        this after each assignment to ``os.environ``, because an assignment may overwrite such a variable.
        """
        for name, value in self._hidden.items():
            os.putenv(name, value)

    def assign(self, name: str, value: str) -> None:
        """Set an environment variable to a value that the user's script assigns between its imports."""
        # Read the old value with `self.get`. A lookup in `os.environ` would call `__missing__`, which may
        # wrongly record that an imported module reads the variable.
        self._before.setdefault(name, self.get(os.fsencode(name)))
        self.assigned[name] = os.environ[name] = value
        # If the script configures Arrow's allocator, remove the preset `JE_ARROW_MALLOC_CONF`.
        #
        # Keep the preset thread count of OpenBLAS, because workers set their own thread count after the fork.
        if name == _ARROW:
            self._hidden.pop(name, None)
        self.hide()

    def changed(self) -> str | None:
        """Return the name of a variable that an import has changed after the script had set it. Return
        ``None`` if there is no such variable.

        Such an import cannot be preloaded, because the script in the worker would overwrite the changed
        value.
        """
        now = {name: self.get(os.fsencode(name)) for name in self.assigned}
        changed = [name for name, value in self.assigned.items() if now[name] != os.fsencode(value)]
        return changed[0] if changed else None

    def end(self) -> None:
        """Restore the environment variables for the start of the script: undo the assignments of the preload
        steps, and stop recording which variables are read.
        """
        for name, value in self._before.items():
            del os.environ[name]
            os.environb.update({} if value is None else {os.fsencode(name): value})
        self._real.clear()
        self._real.update(self)
        self._use(self._real)
        for name in self._hidden:
            os.unsetenv(name)
            if name in os.environ:
                os.putenv(name, os.environ[name])

    def _use(self, data: dict[bytes, bytes]) -> None:
        for environ in self._environments:
            environ._data = data
