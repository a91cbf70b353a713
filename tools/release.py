"""Build the sdist and the x86-64 and arm64 wheels of a release into ``dist/``, and check them.

- zig links against glibc 2.17, so a wheel installs on every distribution with a glibc from 2012 or later.
  The nursery inside is linked with musl, and needs no C library.
- There are two wheels for each architecture: one for every Python from 3.10 on, and one for Python from 3.15
  on that needs no global interpreter lock.
- All wheels are made from nothing but the sdist. Those for this machine's architecture are installed into
  an environment of each Python that is here, and launch jobs. The others are only inspected.
- All files are uploaded to a package index on this machine, from which each Python installs them by name.
- Two builds of one commit with the same compilers give the same bytes: file times are the time of the commit
  (``SOURCE_DATE_EPOCH``), and no path of the machine is in the results. ``tools/rebuild.py`` proves it.

Needs a Python, Rust with the targets below, and a package index for zig and the tools.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tools import linked, wheel, wheel_checks

ARCHITECTURES = ("x86_64", "aarch64")
# Pin the versions, because others may produce different bytes.
BUILD_TOOLS = {"maturin": "1.16.0", "ziglang": "0.17.1"}
CHECKERS = ("auditwheel", "abi3audit", "cyclonedx-python-lib[json-validation]")


class Flavour(NamedTuple):
    """A kind of wheel, defined by the Python versions that it supports."""

    tag: str
    """Part of the wheel's name."""
    pythons: tuple[str, ...]
    """Those on which it is tried."""
    arguments: tuple[str, ...] = ()
    """Arguments of maturin."""


FLAVOURS = (
    Flavour("cp310-abi3", wheel.VERSIONS),
    Flavour(
        "cp315-abi3.abi3t",
        ("3.15", "3.15t"),
        ("--features", "free-threaded", "--interpreter", "python3.15t"),
    ),
)


def require_targets() -> None:
    """Exit with a one-line message if rustc lacks a target."""
    targets = [f"{name}-unknown-linux-{libc}" for name in ARCHITECTURES for libc in ("gnu", "musl")]
    missing = [
        target
        for target in targets
        if not Path(wheel.run("rustc", "--print=target-libdir", "--target", target).strip()).is_dir()
    ]
    if missing:
        names = " ".join(missing)
        sys.exit(f"release: the Rust targets {names} are missing: 'rustup target add {names}'")


def install(folder: Path, *requirements: str) -> Path:
    """Install packages into a new virtual environment in ``folder``, and return its Python."""
    python = wheel.environment(sys.executable, folder)
    command: tuple[str | Path, ...] = (python, "-m", "pip", "install", "--quiet", *requirements)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        sys.exit(f"release: pip could not install {', '.join(requirements)}: {reason}")
    return python


def remapped(sources: Path, found: dict[str, Any]) -> str:
    """Return the rustc flags that keep this machine's paths out of the wheel, in cargo's encoding."""
    folders = {
        Path(package["manifest_path"]).parent.parent
        for package in found["packages"]
        if package["source"] is not None
    }
    # If the sources of the standard library are installed, rustc writes their path into the output.
    (commit,) = re.findall(r"^commit-hash: (.+)$", wheel.run("rustc", "-vV"), re.MULTILINE)
    library = Path(wheel.run("rustc", "--print=sysroot").strip(), "lib/rustlib/src/rust")
    # If several prefixes match, rustc uses the last one.
    renamed = {
        **dict.fromkeys(sorted(folders), wheel_checks.CRATES),
        library: f"/rustc/{commit}",
        wheel.ROOT / "target": "target",
        sources: ".",
    }
    return "\x1f".join(f"--remap-path-prefix={old}={new}" for old, new in renamed.items())


def version() -> str:
    """Return the version of the project."""
    (found,) = re.findall(r'^version = "(.+)"$', (wheel.ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    return str(found)


def build(python: Path) -> None:
    """Build the sdist, and the wheels from it, into ``dist/``. Write their checksums.

    ``python`` is the Python of an environment with the build tools.
    """
    committed = wheel.run("git", "log", "-1", "--format=%ct").strip()
    epoch = os.environ.get("SOURCE_DATE_EPOCH", committed)
    # maturin uses the zig of the first Python in PATH.
    variables = {"SOURCE_DATE_EPOCH": epoch, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    maturin = python.parent / "maturin"
    folder = wheel.ROOT / "target" / "from-sdist"
    shutil.rmtree(folder, ignore_errors=True)
    sources = wheel.unpacked_sdist(maturin, folder, variables)
    # Update the file times, because cargo does not rebuild sources that are older than its last build.
    for path in sources.rglob("*"):
        path.touch()
    ziglang = Path(wheel.run(python, "-c", "import ziglang; print(ziglang.__path__[0])").strip())
    toolchain = linked.toolchain(ziglang, BUILD_TOOLS["ziglang"])
    tools = {**BUILD_TOOLS, "rustc": wheel.run("rustc", "--version").split()[1]}
    for architecture in ARCHITECTURES:
        target = f"{architecture}-unknown-linux-gnu"
        found = linked.metadata(sources, target)
        components = [*linked.crates(found), *toolchain]
        bill = folder / "elasticrs.cdx.json"
        document = linked.bill_of_materials(version(), components, tools, int(epoch))
        bill.write_text(json.dumps(document, indent=1), encoding="utf-8")
        linked.write_licences(sources, components)
        flags = {"CARGO_ENCODED_RUSTFLAGS": remapped(sources, found)}
        for flavour in FLAVOURS:
            options = ("--release", "--locked", "--quiet", "--zig", "--target", target, *flavour.arguments)
            platform_options = ("--compatibility", wheel_checks.PLATFORM, "--compression-level", "9")
            places: tuple[str | Path, ...] = ("--sbom-include", bill, "--out", wheel.DIST)
            command = (maturin, "build", *options, *platform_options, *places)
            wheel.run(*command, cwd=sources, variables=variables | flags)
    (wheel.DIST / "SHA256SUMS").write_text(sums(), encoding="utf-8")


def sums() -> str:
    """Return the checksums of the sdist and the wheels in ``dist/``, in the format of ``sha256sum``."""
    files = wheel.built()
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def check(scratch: Path, require_all: bool) -> None:
    """Check the files in ``dist/``, and launch jobs with the wheels that can run on this machine.

    With ``require_all``, end this script if there is no Python for one of these wheels.
    """
    if (wheel.DIST / "SHA256SUMS").read_text(encoding="utf-8") != sums():
        sys.exit("release: the files in dist/ do not have the checksums in dist/SHA256SUMS")
    python = install(scratch / "checkers", *CHECKERS)
    for architecture in ARCHITECTURES:
        for flavour in FLAVOURS:
            (built,) = wheel.DIST.glob(f"*-{flavour.tag}-*_{architecture}.whl")
            wheel_checks.check(built, architecture, python)
            versions = {}
            if architecture == platform.machine():
                versions = wheel.install_everywhere(built, scratch / flavour.tag, flavour.pythons)
                if require_all and not versions:
                    sys.exit(f"release: {built.name} was not run: there is no Python {flavour.pythons}")
            launched = f"launches with Python {', '.join(versions)}" if versions else "inspected, but not run"
            print(f"release: {built.name}, {built.stat().st_size / 1e6:.2f} MB, {launched}")
    by_name = wheel.install_by_name(wheel.built(), scratch)
    print(f"release: uploaded to a package index here; by name, it launches with Python {', '.join(by_name)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", metavar="vVERSION", help="refuse to build another version")
    parser.add_argument("--only", choices=("build", "check"), help="leave out the other step")
    parser.add_argument("--all", action="store_true", help="require a Python for each wheel of this machine")
    arguments = parser.parse_args()
    if arguments.tag and arguments.tag != f"v{version()}":
        sys.exit(f"release: the tag {arguments.tag} does not match the version {version()} in Cargo.toml")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if arguments.only != "check":
            require_targets()
            wheel.remove_old()
            tools = [f"{tool}=={number}" for tool, number in BUILD_TOOLS.items()]
            try:
                build(install(scratch / "tools", *tools))
            except linked.MissingLicenceError as error:
                sys.exit(f"release: {error}")
            if "\n[project.urls]\n" not in (wheel.ROOT / "pyproject.toml").read_text("utf-8"):
                print("release: the files have no address of the repository; make bump REPOSITORY=… sets it")
        if arguments.only != "build":
            check(scratch, arguments.all)


if __name__ == "__main__":
    main()
