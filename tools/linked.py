"""Find the software that is linked into a wheel, and write its licence texts and its bill of materials.

The crates come from ``cargo metadata``. The standard library, musl, libunwind and the compiler's routines
come with Rust and zig.
"""

import json
import re
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tools import wheel

BINDINGS = "elasticrs-python"
LICENCE_FILE = re.compile(r"(?:LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|UNLICENSE)", re.IGNORECASE)
RULE = "-" * 80


class MissingLicenceError(Exception):
    """A linked crate has no licence expression or no licence text."""


class Component(NamedTuple):
    """A piece of software that is linked into the wheel."""

    name: str
    version: str
    licence: str
    """SPDX expression."""
    texts: tuple[Path, ...]
    """Files with the licence's text."""
    depends_on: tuple[str, ...] = ()
    """References of the components that it uses."""
    purl_type: str = "generic"

    @property
    def ref(self) -> str:
        """The package URL."""
        return f"pkg:{self.purl_type}/{self.name}@{self.version}"


def metadata(sources: Path, target: str) -> dict[str, Any]:
    """Return cargo's metadata on a workspace's packages and their dependencies for a target."""
    command = ("cargo", "metadata", "--format-version=1", "--locked", "--filter-platform", target)
    found: dict[str, Any] = json.loads(wheel.run(*command, cwd=sources))
    return found


def _linked_ids(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return the packages that are linked into the extension, each with its linked dependencies.

    Procedural macros and build dependencies run in the compiler and are not linked in.
    """
    packages = {package["id"]: package for package in found["packages"]}
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    linked: dict[str, list[str]] = {}
    pending = [package["id"] for package in found["packages"] if package["name"] == BINDINGS]
    while pending:
        current = pending.pop()
        if current in linked:
            continue
        linked[current] = [
            dependency["pkg"]
            for dependency in nodes[current]["deps"]
            if any(kind["kind"] is None for kind in dependency["dep_kinds"])
            and not any("proc-macro" in target["kind"] for target in packages[dependency["pkg"]]["targets"])
        ]
        pending += linked[current]
    return linked


def crates(found: dict[str, Any]) -> Iterator[Component]:
    """Yield the linked crates, the project's crates first.

    Raises :class:`MissingLicenceError` if a crate of another project does not contain its licence.
    """
    linked = _linked_ids(found)
    packages = {package["id"]: package for package in found["packages"]}

    def ref(identity: str) -> str:
        return f"pkg:cargo/{packages[identity]['name']}@{packages[identity]['version']}"

    for identity in sorted(linked, key=lambda each: (packages[each]["source"] is not None, ref(each))):
        package = packages[identity]
        folder = Path(package["manifest_path"]).parent
        texts = tuple(sorted(path for path in folder.iterdir() if LICENCE_FILE.match(path.name)))
        if package["source"] is not None and not (texts and package["license"]):
            raise MissingLicenceError(
                f"the crate {package['name']} has no licence text or no licence expression"
            )
        # In old licence expressions, a slash means OR.
        licence = re.sub(r"\s*/\s*", " OR ", package["license"])
        depends_on = tuple(sorted(map(ref, linked[identity])))
        yield Component(package["name"], package["version"], licence, texts, depends_on, "cargo")


def toolchain(ziglang: Path, zig_version: str) -> list[Component]:
    """Return the components that Rust and zig link into the wheel. ``ziglang`` is the folder of the installed
    Python package.
    """
    version = re.search(r"^release: (.+)$", wheel.run("rustc", "-vV"), re.MULTILINE)
    assert version is not None, "rustc reports its version"
    documents = Path(wheel.run("rustc", "--print=sysroot").strip(), "share/doc/rust")
    library = documents / "COPYRIGHT-library.html"
    return [
        Component("rust-standard-library", version[1], "MIT OR Apache-2.0", (library,)),
        Component("musl", f"rust-{version[1]}", "MIT", (ziglang / "lib/libc/musl/COPYRIGHT",)),
        Component(
            "llvm-libunwind",
            f"zig-{zig_version}",
            "Apache-2.0 WITH LLVM-exception",
            (ziglang / "lib/libunwind/LICENSE.TXT",),
        ),
        Component("zig-compiler-rt", zig_version, "MIT", (ziglang / "LICENSE",)),
    ]


def page_name(component: Component) -> str:
    """Return the file name for a component's licences in HTML."""
    return f"LICENSE-{component.name}.html"


def licence_texts(components: list[Component]) -> str:
    """Return one document with the licences of all components. A text that several components share appears
    once.

    Pages of HTML are not part of the document, which refers to them by :func:`page_name`.
    """
    texts: dict[str, int] = {}
    index = []
    for component in components:
        places = [
            page_name(component)
            if path.suffix == ".html"
            else f"text {texts.setdefault(path.read_text(encoding='utf-8').strip(), len(texts) + 1)}"
            for path in component.texts
        ]
        index.append(f"{component.name} {component.version}: {component.licence} ({', '.join(places)})")
    head = "This wheel contains the following software of other projects. The numbered texts follow the list."
    bodies = [f"{RULE}\nText {number}\n\n{text}" for text, number in texts.items()]
    return "\n\n".join((head, "\n".join(index), *bodies)) + "\n"


def write_licences(folder: Path, components: list[Component]) -> None:
    """Write the licences of the components into files whose names match the project's ``license-files``."""
    (folder / "LICENSE-third-party.txt").write_text(licence_texts(components), encoding="utf-8")
    for component in components:
        for path in component.texts:
            if path.suffix == ".html":
                shutil.copyfile(path, folder / page_name(component))


def bill_of_materials(
    version: str, components: list[Component], tools: dict[str, str], epoch: int
) -> dict[str, Any]:
    """Return the bill of materials of a wheel in CycloneDX 1.6 format.

    ``tools`` are the versions of the programs that built the wheel, and ``epoch`` is the time of the commit,
    in seconds since 1970.
    """
    own = f"pkg:pypi/elasticrs@{version}"
    top = [
        component.ref
        for component in components
        if component.name == BINDINGS or component.purl_type != "cargo"
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).isoformat(),
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": number}
                    for name, number in sorted(tools.items())
                ]
            },
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "elasticrs",
                "version": version,
                "purl": own,
                "licenses": [{"expression": "BSD-3-Clause"}],
            },
        },
        "components": [
            {
                "type": "library",
                "bom-ref": component.ref,
                "name": component.name,
                "version": component.version,
                "purl": component.ref,
                "licenses": [{"expression": component.licence}],
            }
            for component in components
        ],
        "dependencies": [
            {"ref": own, "dependsOn": sorted(top)},
            *({"ref": each.ref, "dependsOn": list(each.depends_on)} for each in components),
        ],
    }
