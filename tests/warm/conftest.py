"""Modules for warm starts."""

import pytest


@pytest.fixture
def library(tmp_path):
    """Return a function that writes modules to a folder and returns the environment in which they are
    importable.
    """

    def write(**modules):
        folder = tmp_path / "library"
        folder.mkdir(exist_ok=True)
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return {"PYTHONPATH": str(folder)}

    return write
