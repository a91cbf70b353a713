"""Checks rules that no linter covers. Prints each violation as ``path:line: rule``, and exits with 1 if there
is one.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 900
SOURCES = {".py", ".rs", ".sh", ".toml", ".yml"}  # no .pyi: the extension has a single, long stub

UNSAFE_HOMES = (
    "crates/elasticrs-sys/src/",  # thin wrappers of system calls
    "crates/elasticrs-runtime/src/readiness.rs",  # one call of tokio, on which elasticrs-sys may not depend
    "crates/elasticrs-python/src/memory.rs",  # one call with addresses from Python, which guarantees them
    "crates/elasticrs-fake-nvml/src/",  # a library with a C interface, for tests
    "crates/elasticrs-testkit/src/",  # a program whose purpose is to fork, crash and misbehave; never shipped
)
"""Where `unsafe` code may be."""


CRATE_LAYERS = {
    "elasticrs-sys": set(),
    "elasticrs-nursery": {"elasticrs-sys"},
    "elasticrs-runtime": {"elasticrs-sys", "tokio"},
    "elasticrs-core": {"elasticrs-nursery", "elasticrs-runtime", "elasticrs-sys", "tokio"},
    "elasticrs-health": {"elasticrs-runtime", "elasticrs-sys", "tokio"},
    "elasticrs-store": {"elasticrs-runtime", "elasticrs-sys", "tokio", "tokio-rustls"},
}
"""The crates of this workspace and of tokio that a crate may use. The nursery is built without tokio."""


CORE_DOORS = (
    *("_engine/nodes/transport/coordination", "_engine/workers/plan", "_engine/workers/process"),
    *("_engine/supervise/observe/health_check_server", "_engine/process/signals"),
    *("_engine/supervise/run/tracker", "_engine/supervise/run/workers"),
    *("_engine/workers/functions/keeper", "_engine/workers/functions/supervised_group"),
    *("_engine/failures/failure", "_engine/workers/event_log", "timer/file_based_local_timer"),
    "_engine/inside/keep/copier",
)
"""The modules of the package that may import the extension, but for type checkers."""


class LineRule(NamedTuple):
    """A pattern that no line may match."""

    name: str
    pattern: re.Pattern[str]
    where: str = ""
    """Only paths that match this regular expression."""


# The patterns are written so that they do not match this file.
LINE_RULES = (
    LineRule("path of a machine", re.compile(r"(?<![\w.:/])/(?:home|root|work|Users)/\w")),
    LineRule("unfinished", re.compile(r"\b(?:TO[D]O|FIX[M]E|X{3}|HAC[K])\b|\b(?:todo|unimplemented)!")),
    LineRule("name of a package host", re.compile(r"(?:pypi|crates)[.](?:org|io)\b|download[.]pytorch")),
    LineRule("swallowed error", re.compile(r"except[^:]*:\s*pass\b"), r"\.py$"),
    LineRule(
        "an odd turn of phrase",
        re.compile(
            r"\b(?:for e[v]er|who[e]ver|some[b]ody|every[b]ody|signs? of l[i]fe|for w[a]nt of|of our o[w]n)\b"
            r"|\bwhat is l[e]ft\b",
            re.IGNORECASE,
        ),
        r"^(?:python|crates/[^/]+/src)/",
    ),
    LineRule(
        "a test that sleeps",
        re.compile(r"\b(?:time|thread)(?:[.]|::)sleep\("),
        r"^(?:tests|crates/[^/]+/tests)/",
    ),
    # The stores are module trees that do not know each other; the two clients share `session`.
    LineRule(
        "another store",
        re.compile(r"\bcrate::(?:etcd|worker)\b"),
        r"^crates/elasticrs-store/src/(?:coordination|session)/",
    ),
    LineRule(
        "another store",
        re.compile(r"\bcrate::(?:coordination|worker)\b"),
        r"^crates/elasticrs-store/src/(?:etcd|session)/",
    ),
    LineRule(
        "another store",
        re.compile(r"\bcrate::(?:coordination|etcd|session)\b"),
        r"^crates/elasticrs-store/src/worker/",
    ),
)
# Package managers generate these files, which may contain names of package hosts.
GENERATED = {"Cargo.lock"}


def tracked() -> list[str]:
    """Return the files under version control and the untracked files that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in out.split("\0") if name and (ROOT / name).is_file()} - GENERATED)


def breaches_of_text(name: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield violations of the line rules and of the maximum file length."""
    for number, line in enumerate(lines, 1):
        for rule in LINE_RULES:
            if re.search(rule.where, name) and rule.pattern.search(line):
                yield number, rule.name
    if Path(name).suffix in SOURCES and len(lines) > MAX_LINES:
        yield len(lines), f"more than {MAX_LINES} lines"


# rustc's `missing_docs` cannot exempt fields and variants. Most of them need no doc comment.
PUBLIC_ITEM = re.compile(
    r"\s*pub (?:const |unsafe |async )*(?:fn|struct|enum|union|trait|type|const|static) ?(\w+)"
)
SEAM = "crates/elasticrs-python/"
"""The seam between Rust and Python: its names are documented in ``_core.pyi``."""


def breaches_of_docs(name: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield public items and files that have no doc comment."""
    if not re.match(r"crates/[^/]+/src/(?!bin/)", name) or name.endswith(("tests.rs", "/main.rs")):
        return
    if not lines[0].startswith("//!"):
        yield 1, "a file without a doc comment"
    for index, line in enumerate(lines):
        item = PUBLIC_ITEM.match(line)
        if item and not name.startswith(SEAM) and not _is_documented(lines[:index]):
            yield index + 1, f"`{item[1]}` without a doc comment"


def _is_documented(before: list[str]) -> bool:
    """Return true if an item has a doc comment above its attributes."""
    for line in reversed(before):
        if line.lstrip().startswith("///"):
            return True
        if not line.strip() or line.rstrip().endswith((";", "{", "}")):
            return False
    return False


def breaches_of_rust(name: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield `unsafe` code and uses of PyO3 in files where they are not allowed."""
    for number, line in enumerate(lines, 1):
        code = line.split("//", 1)[0]
        if re.search(r"\bunsafe\b", code) and not name.startswith(UNSAFE_HOMES):
            yield number, f"unsafe outside {UNSAFE_HOMES[0]}"
        if re.search(r"\bpyo3\b", code) and not name.startswith(SEAM):
            yield number, "pyo3 outside the seam"


def breaches_of_layers(name: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield dependencies of a crate on crates that are not in a lower layer."""
    found = re.fullmatch(r"crates/([^/]+)/Cargo\.toml", name)
    if found is None or found[1] not in CRATE_LAYERS:
        return
    section = ""
    for number, line in enumerate(lines, 1):
        section = line if line.startswith("[") else section
        used = re.match(r"(?:elasticrs|tokio)\b[\w-]*", line)
        if section == "[dependencies]" and used and used[0] not in CRATE_LAYERS[found[1]]:
            yield number, f"{found[1]} may not depend on {used[0]}; see CRATE_LAYERS"


def breaches_of_python(name: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield imports of the extension in modules that may not import it."""
    home = "python/elasticrs/"
    if not name.startswith(home) or name[len(home) : -len(".py")] in CORE_DOORS:
        return
    for number in _imports_of_core(ast.parse("\n".join(lines))):
        yield number, "elasticrs._core is imported here; see CORE_DOORS"


def _imports_of_core(tree: ast.AST) -> Iterator[int]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (
            node.module == "elasticrs._core"
            or (node.module == "elasticrs" and any(alias.name == "_core" for alias in node.names))
        ):
            yield node.lineno
        yield from _imports_of_core(node)


def main() -> int:
    found = []
    for name in tracked():
        if re.fullmatch(r"docs/pictures/[\w-]+\.png", name):
            continue
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            found.append(f"{name}:1: not a text file")
            continue
        rules = [breaches_of_text(name, lines)]
        if name.endswith(".rs"):
            rules += [breaches_of_rust(name, lines), breaches_of_docs(name, lines)]
        if name.endswith("/Cargo.toml"):
            rules.append(breaches_of_layers(name, lines))
        if name.endswith(".py"):
            rules.append(breaches_of_python(name, lines))
        found.extend(f"{name}:{number}: {breach}" for rule in rules for number, breach in rule)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
