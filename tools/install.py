"""Install what pyproject.toml lists into the virtual environment that runs this script, once.

The stamp holds the lists that were installed, so that a change elsewhere in pyproject.toml costs nothing.
"""

import compileall
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    # The only TOML parser that is sure to be there before anything has been installed.
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
STAMP = Path(sys.prefix) / "setup.stamp"


def requirements(pyproject: dict[str, Any]) -> list[str]:
    """Everything to install: to build, to run, to develop, and torch."""
    extras = pyproject["project"]["optional-dependencies"]
    lists = (pyproject["build-system"]["requires"], pyproject["project"]["dependencies"], *extras.values())
    return sorted({requirement for each in lists for requirement in each})


def install(wanted: list[str]) -> None:
    """Fetch and install, in one go, so that pip sees all constraints together."""
    print("setup: installing the tools and torch; this takes a minute or more, and is done once", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    # Start-up time is measured, and must not depend on PYTHONDONTWRITEBYTECODE. Some packages carry templates
    # that are no valid Python, so the result says nothing.
    compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)


def main() -> None:
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    if not STAMP.exists() or json.loads(STAMP.read_text(encoding="utf-8")) != wanted:
        install(wanted)
        STAMP.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    STAMP.touch()


if __name__ == "__main__":
    main()
