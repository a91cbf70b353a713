"""The environment of a warm nursery while it imports; see ``nursery.py``, which loads this."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, NoReturn

_ARROW = "JE_ARROW_MALLOC_CONF"
_QUIET = {"OPENBLAS_NUM_THREADS": "1", _ARROW: "background_thread:false"}
"""Keeps libraries from starting threads when they are imported. Set for C only, so that a Python module that
reads one of these variables finds the value that it would find in a worker.
"""

_OF_ATTEMPTS = frozenset(
    b"RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    b"MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT".split()
)
"""What no import may ask for: workers have it, and attempts differ in it."""


class Variables(dict):  # type: ignore[type-arg]
    """The environment while modules are imported: notes what they ask for too early.

    Args:
        hidden: values that C keeps while Python sees others, besides those of :data:`_QUIET`.
        rank_zero: modules that may ask for the rank.

    Attributes:
        asked: variables of attempts that a module has asked for.
        assigned: variables that the script sets before its next import, and their values.
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
        """Set the hidden values again, since an assignment to ``os.environ`` reaches C as well."""
        for name, value in self._hidden.items():
            os.putenv(name, value)

    def assign(self, name: str, value: str) -> None:
        """Set a variable, as the script does."""
        # Do not read `os.environ`, because that would count as a read by a module.
        self._before.setdefault(name, self.get(os.fsencode(name)))
        self.assigned[name] = os.environ[name] = value
        # Let the value reach Arrow now, because workers can set the thread count later only for OpenBLAS.
        if name == _ARROW:
            self._hidden.pop(name, None)
        self.hide()

    def changed(self) -> str | None:
        """Return a variable that an import has changed after the script has set it. The script would set it
        again in the worker, after the import.
        """
        now = {name: self.get(os.fsencode(name)) for name in self.assigned}
        changed = [name for name, value in self.assigned.items() if now[name] != os.fsencode(value)]
        return changed[0] if changed else None

    def end(self) -> None:
        """Make the environment what it is before the first line of the script."""
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
