"""Finds circular dependencies between the files of a crate. Prints each one, and exits with 1 if there are
any.

A module may use what is in it, and be used by it: only circles between others count.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

CRATES = Path(__file__).resolve().parent.parent / "crates"

Module = tuple[str, ...]
"""Its path within the crate."""


def modules(source: Path) -> dict[Module, Path]:
    """Return the files of a library's modules, keyed by module path."""
    found = {}
    for file in source.rglob("*.rs"):
        path = file.relative_to(source).with_suffix("").parts
        if path != ("main",):
            found[path[:-1] if path[-1] in ("lib", "mod") else path] = file
    return found


def paths(text: str) -> Iterator[list[str]]:
    """Yield the paths that a file refers to. Paths in a nested `use` are yielded separately."""
    for tree in re.findall(r"\buse\s+([^;]+);", text):
        yield from _leaves("".join(tree.split()))
    for path in re.findall(r"\b(?:crate|super)(?:::\w+)+", re.sub(r"\buse\s+[^;]+;", "", text)):
        yield path.split("::")


def _leaves(tree: str) -> Iterator[list[str]]:
    nested = re.fullmatch(r"((?:\w+::)*)\{(.*)\}", tree)
    if nested is None:
        yield tree.split("::")
        return
    depth, branch = 0, ""
    for character in nested[2] + ",":
        if character == "," and depth == 0:
            yield from ([*nested[1].split("::")[:-1], *leaf] for leaf in _leaves(branch) if branch)
            branch = ""
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        branch += character


def uses(source: Path) -> dict[Module, set[Module]]:
    """Return the modules that each module uses, except for its ancestors and descendants."""
    known = modules(source)
    found: dict[Module, set[Module]] = {module: set() for module in known}
    for module, file in known.items():
        text = re.sub(r"//[^\n]*", "", file.read_text(encoding="utf-8")).split("#[cfg(test)]\nmod ")[0]
        for path in paths(text):
            if path[0] not in ("crate", "super"):
                continue
            ups = next((number for number, name in enumerate(path) if name != "super"), len(path))
            target = tuple(path[1:]) if path[0] == "crate" else (*module[: len(module) - ups], *path[ups:])
            while target not in known:
                target = target[:-1]
            if target != module[: len(target)] and module != target[: len(module)]:
                found[module].add(target)
    return found


def circles(edges: dict[Module, set[Module]]) -> list[list[Module]]:
    """Return groups of modules in which each module depends on every other, directly or indirectly."""
    reach = {module: set(targets) for module, targets in edges.items()}
    for middle, beyond in reach.items():
        for targets in reach.values():
            if middle in targets:
                targets.update(beyond)
    groups = {frozenset({m for m in reach[module] if module in reach[m]}) for module in reach}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def main() -> int:
    """Look at all crates."""
    found = [
        f"{source.parent.name}: {', '.join('::'.join(module) or 'lib' for module in circle)} use each other"
        for source in sorted(CRATES.glob("*/src"))
        for circle in circles(uses(source))
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
