"""Golden files: the text that users read, with its variable parts replaced by names.

Only the tests that use the fixture ``golden`` compare whole sentences. All other tests assert facts, so that
rewording a message changes one golden file and no test. ``pytest --update-golden`` rewrites the files. In the
files of commands, add a case by adding its title.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "golden"

VARIABLE = {
    rf"\b{re.escape(os.uname().nodename)}\b": "HOST",
    r"\d{4}-\d\d-\d\d[_ ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?": "TIME",
    r"(?m)^([=-])\1{30,}$": r"\1\1\1",
}
"""Patterns of the parts that differ between runs, and what the golden files contain in their place."""


class Golden:
    def __init__(self, tmp_path: Path, *, updates: bool) -> None:
        self._variable = {re.escape(str(tmp_path)): "TMP", **VARIABLE}
        self._updates = updates

    def titles(self, name: str) -> list[str]:
        """Return the titles of the texts in this file."""
        return [title.strip() for title in re.findall(r"(?m)^#(.*)$", _path(name).read_text("utf-8"))]

    def __call__(self, name: str, texts: Mapping[str, str], more: Mapping[str, str] | None = None) -> None:
        """Compare texts with a golden file.

        Args:
            name: name of the file without its suffix.
            texts: the texts by title.
            more: additional patterns of variable parts, and their replacements.

        Raises:
            AssertionError: a text differs.
        """
        document = "".join(f"# {title}\n{text.strip()}\n\n" for title, text in texts.items())
        for pattern, replacement in {**self._variable, **(more or {})}.items():
            document = re.sub(pattern, replacement, document)
        path = _path(name)
        if self._updates:
            path.write_text(document, encoding="utf-8")
        assert document == path.read_text(encoding="utf-8"), f"{path} differs; see --update-golden"


def _path(name: str) -> Path:
    return FOLDER / f"{name}.txt"


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return Golden(tmp_path, updates=request.config.getoption("update_golden"))
