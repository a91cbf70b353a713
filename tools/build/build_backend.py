"""Build backend that runs maturin after checking for Rust and a C compiler.

Without the check, maturin would download a Rust toolchain of several hundred megabytes. A compiler that is
too old or missing would be reported in many lines.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# Suppress maturin's warning about a missing build backend, because this file is the build backend.
os.environ["MATURIN_NO_MISSING_BUILD_BACKEND_WARNING"] = "1"

ROOT = Path(__file__).resolve().parents[2]


def _version(text: str) -> tuple[int, int]:
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None:
        raise SystemExit(f"elasticrs: no version in {text!r}")
    return int(found[1]), int(found[2])


def _missing() -> str | None:
    """Return what is missing for a build from source; ``None`` if nothing is missing."""
    manifest = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^rust-version = "(.+)"$', manifest, re.MULTILINE)
    if shutil.which("cargo") is None:
        return f"Rust {oldest} or newer, and there is no cargo in PATH"
    cargo = subprocess.run(("cargo", "--version"), capture_output=True, text=True, check=False)
    if cargo.returncode != 0:
        return f"Rust {oldest} or newer, and 'cargo --version' fails: {cargo.stderr.strip()}"
    if _version(cargo.stdout) < _version(oldest):
        return f"Rust {oldest} or newer, and the cargo in PATH is {cargo.stdout.strip()}"
    compiler = shlex.split(os.environ.get("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"a C compiler, and there is no '{compiler}' in PATH"
    return None


def _require_compilers() -> None:
    """Stop the build with a one-line message if something is missing."""
    if missing := _missing():
        raise SystemExit(f"elasticrs: a build from source needs {missing}; the wheels need no compiler")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return the packages that the build of a wheel needs."""
    _require_compilers()
    return list(maturin.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return the packages that an editable installation needs."""
    _require_compilers()
    return list(maturin.get_requires_for_build_editable(config_settings))


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Return the packages that the build of an sdist needs."""
    _require_compilers()
    return list(maturin.get_requires_for_build_sdist(config_settings))
