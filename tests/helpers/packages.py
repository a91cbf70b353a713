"""Packages of one module, as an installer leaves them."""

import os
from pathlib import Path


def install(folder: Path, name: str, source: str, group: str, **entries: str) -> dict[str, str]:
    """Install a package, and return the environment in which it is found.

    Args:
        folder: where packages are installed.
        name: name of the package and of its module.
        source: text of the module.
        group: group of its entry points.
        entries: name of each entry point, and what it leads to in the module.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = "".join(f"{entry} = {name}:{target}\n" for entry, target in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
