"""Install the packages listed in pyproject.toml into the virtual environment that runs this script, unless
they were installed earlier.

Without an argument: the tools and torch. With one: the group of that name, for tests that need more.
A stamp holds the list that was installed, so that a change elsewhere in pyproject.toml costs nothing.
"""

import compileall
import importlib.util
import json
import platform
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    # pip's copy is the only TOML parser that is always available before anything has been installed.
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
ON_DEMAND = {"frameworks"}
"""Groups that nothing but some tests needs."""


def requirements(pyproject: dict[str, Any], group: str | None) -> list[str]:
    """Return the requirements for building, running and development, including torch. With ``group``, return
    only those of that group.
    """
    extras = pyproject["project"]["optional-dependencies"]
    if group is not None:
        # Keep the installed version of torch, because that version is tested.
        return [*sorted(extras[group]), f"torch=={version('torch')}"]
    always = [each for name, each in extras.items() if name not in ON_DEMAND]
    lists = (pyproject["build-system"]["requires"], pyproject["project"]["dependencies"], *always)
    return sorted({requirement for each in lists for requirement in each})


def install(what: str, wanted: list[str]) -> None:
    """Download and install all packages with one command, so that pip sees all constraints together."""
    print(f"setup: installing {what}; this takes minutes, and is done once", flush=True)
    if importlib.util.find_spec("torch") is None and platform.machine() == "x86_64":
        print(
            "setup: torch comes with CUDA, about 3.1 GB; docs/development.md says how to use a CPU build",
            flush=True,
        )
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *wanted]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        for line in pip.stdout or ():
            # Print the slow steps before they start: large downloads with their sizes, builds, and the
            # installation.
            if "MB)" in line or "GB)" in line or line.startswith(("Building", "Installing")):
                print(f"setup: {line.strip()[:110]}", flush=True)
    if pip.returncode:
        sys.exit("setup: pip has failed")
    # Compile all modules now, because start-up time is measured and must not depend on
    # PYTHONDONTWRITEBYTECODE. Ignore the result, because some packages contain templates that are not valid
    # Python.
    compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)


def main() -> None:
    group = sys.argv[1] if len(sys.argv) > 1 else None
    stamp = Path(sys.prefix) / f"{group or 'setup'}.stamp"
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")), group)
    if not stamp.exists() or json.loads(stamp.read_text(encoding="utf-8")) != wanted:
        install(group or "the tools and torch", wanted)
        stamp.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    stamp.touch()


if __name__ == "__main__":
    main()
