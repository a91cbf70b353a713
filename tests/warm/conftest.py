"""Modules for warm starts."""

import pytest


@pytest.fixture
def library(tmp_path):
    """Write modules to a folder beside that of the script. Return the environment in which they are found."""

    def write(**modules):
        folder = tmp_path / "library"
        folder.mkdir(exist_ok=True)
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return {"PYTHONPATH": str(folder)}

    return write
