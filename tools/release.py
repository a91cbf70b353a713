"""Build the sdist and the wheels of a release, for x86-64 and arm64, into ``dist/``, and check them.

- zig links against glibc 2.17, so a wheel installs on every distribution with a glibc from 2012 or later.
  The nursery inside is linked with musl, and needs no C library.
- Both wheels are made from nothing but the sdist. The one for this machine's architecture is installed into
  an environment of each Python that is here, and launches jobs. The other one is only inspected.
- File times are the time of the commit (``SOURCE_DATE_EPOCH``), and the folder of the build is fixed, so that
  two builds of one commit can be compared by their checksums.

Needs a Python, Rust with the targets below, and a package index for zig and the tools.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools import wheel

# Architecture in the names of targets and wheels, and its number in ELF headers.
ARCHITECTURES = {"x86_64": 62, "aarch64": 183}
TOOLS = ("ziglang", "twine", "auditwheel", "abi3audit")
# Oldest supported glibc.
PLATFORM = "manylinux_2_17"
# Size limit for a wheel, in bytes.
LARGEST = 4_000_000
ELF_64_LITTLE = b"\x7fELF\x02\x01\x01"
PT_INTERP = 3


def require_targets() -> None:
    """End this script with one line if rustc lacks a target."""
    targets = [f"{name}-unknown-linux-{libc}" for name in ARCHITECTURES for libc in ("gnu", "musl")]
    missing = [
        target
        for target in targets
        if not Path(wheel.run("rustc", "--print=target-libdir", "--target", target).strip()).is_dir()
    ]
    if missing:
        names = " ".join(missing)
        sys.exit(f"release: the Rust targets {names} are missing: 'rustup target add {names}'")


def install_tools(scratch: Path) -> Path:
    """Install zig, maturin and the checkers into an environment, and return its folder of programs."""
    python = wheel.environment(sys.executable, scratch / "tools")
    command = (python, "-m", "pip", "install", "--quiet", wheel.requirement(), *TOOLS)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        sys.exit(f"release: pip could not install {', '.join(TOOLS)}: {reason}")
    return python.parent


def build(programs: Path) -> None:
    """Build the sdist, and the wheels from it, into ``dist/``."""
    committed = wheel.run("git", "log", "-1", "--format=%ct").strip()
    variables = {
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", committed),
        # maturin runs the zig of the first Python in PATH.
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    maturin = programs / "maturin"
    # The bill of materials in the wheel contains this path.
    folder = wheel.ROOT / "target" / "from-sdist"
    shutil.rmtree(folder, ignore_errors=True)
    unpacked = wheel.unpacked_sdist(maturin, folder, variables)
    # Cargo would take sources that are older than its last build for unchanged.
    for path in unpacked.rglob("*"):
        path.touch()
    for architecture in ARCHITECTURES:
        target = f"{architecture}-unknown-linux-gnu"
        command = (maturin, "build", "--release", "--locked", "--quiet", "--zig", "--target", target)
        wheel.run(
            *command, "--compatibility", PLATFORM, "--out", wheel.DIST, cwd=unpacked, variables=variables
        )


def embedded_programs(image: bytes) -> list[tuple[int, bool]]:
    """Return the ELF files in an image, itself included: architecture, and true if it needs a loader."""
    found = []
    at = image.find(ELF_64_LITTLE)
    while at >= 0:
        header = image[at : at + 64]
        table = at + int.from_bytes(header[32:40], "little")
        size = int.from_bytes(header[54:56], "little")
        starts = range(table, table + size * int.from_bytes(header[56:58], "little"), size)
        kinds = {int.from_bytes(image[start : start + 4], "little") for start in starts}
        found.append((int.from_bytes(header[18:20], "little"), PT_INTERP in kinds))
        at = image.find(ELF_64_LITTLE, at + len(header))
    return found


def check_wheel(built: Path, machine: int, programs: Path) -> None:
    """End this script if the wheel is too large, or is for another architecture, Python or glibc."""
    wheel.reject_stray_files(built)
    if built.stat().st_size > LARGEST:
        sys.exit(f"release: {built.name} has {built.stat().st_size} bytes, more than {LARGEST}")
    with zipfile.ZipFile(built) as archive:
        found = embedded_programs(archive.read("elasticrs/_core.abi3.so"))
    if found != [(machine, False), (machine, False)]:
        sys.exit(f"release: {built.name} must hold an extension and a static nursery for {machine}: {found}")
    shown = wheel.run(programs / "auditwheel", "show", built)
    if f'"{PLATFORM}_' not in shown:
        sys.exit(f"release: {built.name} needs a newer glibc than {PLATFORM}: {shown}")
    wheel.run(programs / "abi3audit", "--strict", built)


def main() -> None:
    require_targets()
    wheel.remove_old()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        programs = install_tools(scratch)
        build(programs)
        files = sorted((*wheel.DIST.glob("*.tar.gz"), *wheel.DIST.glob("*.whl")))
        wheel.run(programs / "twine", "check", "--strict", *files)
        for architecture, machine in ARCHITECTURES.items():
            (built,) = wheel.DIST.glob(f"*_{architecture}.whl")
            check_wheel(built, machine, programs)
            launched = "inspected, but not run"
            if architecture == platform.machine():
                launched = f"launches with Python {', '.join(wheel.install_everywhere(built, scratch))}"
            print(f"release: {built.name}, {built.stat().st_size / 1e6:.2f} MB, {launched}")
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (wheel.DIST / "SHA256SUMS").write_text(sums, encoding="utf-8")


if __name__ == "__main__":
    main()
