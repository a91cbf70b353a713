"""Checks of a release wheel: size, platform, Python versions, embedded programs, paths and licences."""

import json
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from tools import wheel

# Machine numbers in ELF headers, by the architecture's name in wheel names.
MACHINES = {"x86_64": 62, "aarch64": 183}
# Oldest supported glibc.
PLATFORM = "manylinux_2_17"
# Size limit for a wheel, in bytes.
LARGEST = 4_000_000
ELF_64_LITTLE = b"\x7fELF\x02\x01\x01"
PT_INTERP = 3
# The extension's own symbol, through which Python 3.15 finds the module (PEP 793). abi3audit mistakes it for
# a symbol of Python.
MODULE_EXPORT = "PyModExport__core"
# Name that replaces the folder of all crate sources in the panic messages of dependencies.
CRATES = "cargo"
# Matches the name and version of a crate in a panic message. Strings in an image have no separators.
CRATE_PATH = re.compile(rf"{CRATES}/([\w-]+)-(\d+\.\d+\.\d+[\w.+-]*)/src/".encode())
# Program that reads a bill of materials from stdin, and prints violations of CycloneDX's schema.
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()) or "")
"""


class RejectedWheelError(Exception):
    """A release wheel lacks a required property."""


def embedded_programs(image: bytes) -> list[tuple[int, bool]]:
    """Return the ELF files in an image, including the image itself. Each item has the architecture, and true
    if the file needs a loader.
    """
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


def paths_of_this_machine(image: bytes, folders: list[Path]) -> list[str]:
    """Return the paths and registry host names of this machine that an image contains."""
    registries = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"), "registry", "src")
    hosts = [folder.name.rpartition("-")[0] for folder in registries.glob("*")]
    paths = [f"{folder}/" for folder in (*folders, registries)]
    return [text for text in (*paths, *hosts) if text.encode() in image]


def check_licences(members: dict[str, bytes], image: bytes) -> str:
    """Check the licences and the bill of materials of a wheel. Return the bill of materials.

    Raises :class:`RejectedWheelError` if a licence file that the metadata names is missing, if the licences
    lack a component of the bill of materials, or if the bill of materials lacks a crate that the extension
    names in a path.
    """
    (info,) = {name.partition("/")[0] for name in members if ".dist-info/" in name}
    named = message_from_bytes(members[f"{info}/METADATA"]).get_all("License-File") or []
    if absent := [name for name in named if f"{info}/licenses/{name}" not in members]:
        raise RejectedWheelError(f"its metadata names licence files that it lacks: {', '.join(absent)}")
    if "LICENSE-third-party.txt" not in named:
        raise RejectedWheelError("its metadata does not name the licences of what is linked in")
    licences = members[f"{info}/licenses/LICENSE-third-party.txt"].decode()
    bill = members[f"{info}/sboms/elasticrs.cdx.json"].decode()
    components = {(each["name"], each["version"]) for each in json.loads(bill)["components"]}
    titles = [f"{name} {version}" for name, version in sorted(components)]
    if absent := [title for title in titles if f"\n{title}: " not in licences]:
        raise RejectedWheelError(f"the licences of {', '.join(absent)} are missing")
    seen = {(name.decode(), version.decode()) for name, version in CRATE_PATH.findall(image)}
    if not seen or seen - components:
        raise RejectedWheelError(f"the bill of materials lacks {sorted(seen - components) or 'all crates'}")
    return bill


def symbols_outside_of_the_stable_abi(built: Path, python: Path) -> list[str]:
    """Return the Python symbols that a wheel uses, but that are missing or unstable in its oldest supported
    Python.
    """
    # Ignore exit code 1. It means that abi3audit has found something, which may be the extension's own
    # symbol.
    done = subprocess.run(
        (python.parent / "abi3audit", "--report", built), capture_output=True, text=True, check=False
    )
    try:
        (audited,) = json.loads(done.stdout)["specs"][str(built)]["wheel"]
        result = audited["result"]
        return sorted({*result["non_abi3_symbols"], *result["future_abi3_objects"]} - {MODULE_EXPORT})
    except (ValueError, KeyError) as error:
        sys.exit(f"release: abi3audit printed no report ({error!r}): {done.stdout}{done.stderr}")


def check(built: Path, architecture: str, python: Path) -> None:
    """Exit with an error message if a release wheel must not be published.

    ``python`` is the Python of an environment with auditwheel, abi3audit and cyclonedx-python-lib.
    """
    wheel.check_files(built)
    with zipfile.ZipFile(built) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    image = members[wheel.extension(built)]
    machine = MACHINES[architecture]
    try:
        if built.stat().st_size > LARGEST:
            raise RejectedWheelError(f"it has {built.stat().st_size} bytes, more than {LARGEST}")
        if (found := embedded_programs(image)) != [(machine, False), (machine, False)]:
            raise RejectedWheelError(f"it must hold an extension and a static nursery for {machine}: {found}")
        if paths := paths_of_this_machine(image, [wheel.ROOT, Path.home(), python.parents[2]]):
            raise RejectedWheelError(f"its extension contains {', '.join(paths)}")
        bill = check_licences(members, image)
    except RejectedWheelError as error:
        sys.exit(f"release: {built.name}: {error}")
    if problem := wheel.run(python, "-c", VALIDATE, stdin=bill).strip():
        sys.exit(f"release: {built.name}: the bill of materials is not valid: {problem}")
    shown = wheel.run(python.parent / "auditwheel", "show", built)
    if f'"{PLATFORM}_' not in shown:
        sys.exit(f"release: {built.name} needs a newer glibc than {PLATFORM}: {shown}")
    if foreign := symbols_outside_of_the_stable_abi(built, python):
        sys.exit(f"release: {built.name} uses symbols outside of Python's stable ABI: {', '.join(foreign)}")
