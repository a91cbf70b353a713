"""Golden files: the text that users read, with its variable parts replaced by names.

Only the tests that use the fixture ``golden`` compare whole sentences. All other tests assert facts, so that
rewording a message changes one golden file and no test. ``pytest --update-golden`` rewrites the files.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "golden"

VARIABLE = {
    re.escape(os.uname().nodename): "HOST",
    r"\d{4}-\d\d-\d\d[_ ]\d\d:\d\d:\d\d(\.\d+)?": "TIME",
}
"""Patterns of the parts that differ between runs, and what the golden files contain in their place."""

Golden = Callable[..., None]


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """Compares texts with a golden file, or writes the file with ``--update-golden``.

    Arguments of the fixture's value: ``name`` of the file without its suffix; ``texts``, the texts by title;
    ``variable``, more patterns and their replacements. Raises :class:`AssertionError` if a text differs.
    """

    def compare(name: str, texts: Mapping[str, str], variable: Mapping[str, str] | None = None) -> None:
        document = "".join(f"# {title}\n{text.strip()}\n\n" for title, text in texts.items())
        patterns = {re.escape(str(tmp_path)): "TMP", **VARIABLE, **(variable or {})}
        for pattern, replacement in patterns.items():
            document = re.sub(pattern, replacement, document)
        path = FOLDER / f"{name}.txt"
        if request.config.getoption("update_golden"):
            path.write_text(document, encoding="utf-8")
        assert document == path.read_text(encoding="utf-8"), f"{path} differs; see --update-golden"

    return compare
