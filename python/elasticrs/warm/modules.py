"""Which modules are imported once for all workers: those that the user names, or that the code imports.

A source is parsed, never run. What it imports at its top level counts, also inside of ``if``, ``try``,
``with`` and loops, but not in functions and classes, nor for type checkers. The user's own modules, which are
not preloaded, are parsed as well, since each worker will import what they import. To it comes what torch
imports at the first step only; see :data:`LAZY`.
"""

from __future__ import annotations

import _ast
import os
import stat
import warnings
from contextlib import suppress

from elasticrs._value import Value
from elasticrs.config import UsageError
from elasticrs.warm.entry import found_spec, is_beside, own_sources

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Sequence

    from elasticrs.warm.entry import Entry

LAZY: tuple[tuple[tuple[bytes, ...], str], ...] = (
    # The first optimizer, DDP, checkpointed or sharded module of a process imports some 900 modules: each
    # asks to be left alone by the compiler.
    (
        (
            b"optim",
            b"DistributedDataParallel",
            b"fully_shard",
            b"FullyShardedDataParallel",
            b"utils.checkpoint",
        ),
        "torch._dynamo",
    ),
    # Some 400 more, without its code generators.
    ((b"torch.compile", b"torch_compile"), "torch._inductor.compile_fx"),
)
"""What torch imports only when it is used: words of a source, and the module to import for them.

Starting a process group, collectives, a data loader and schedulers import nothing more. A script without
these words does without the modules: they take 80 MB, and triton among them prints to stderr at exit."""

_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_CANNOT_PARSE = (SyntaxError, ValueError, RecursionError, MemoryError)
_NEVER = ("__future__", "__main__")
_ENOUGH = 1 << 19
"""Bytes of sources, of which a millisecond parses some 5000: the launch waits for it."""


class Preload(Value):
    """What is imported before the workers are forked; see :mod:`elasticrs.warm` for the forms of the names.

    Args:
        modules: in the order in which they are imported; none: workers start cold.
        is_explicit: the user has named them.
        remarks: lines for the user.
        folders: no module that lies in one of these may come into ``sys.modules``; see :mod:`elasticrs.warm`.
    """

    modules: tuple[str, ...] = ()
    is_explicit: bool = False
    remarks: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def preload(value: str, entry: Entry) -> Preload:
    """Choose the modules.

    Args:
        value: ``auto``, or names of modules separated by commas.
        entry: what the workers run.

    Raises:
        UsageError: a module that does not exist, as far as this interpreter is the workers'; the text says
            what is wrong with ``value``.
    """
    if entry.why_cold is not None:
        return Preload(remarks=(f"no effect: {entry.why_cold}",))
    if value == "auto":
        return _of_source(entry)
    return _of_list([name.strip() for name in value.split(",")], entry)


def _of_list(names: Sequence[str], entry: Entry) -> Preload:
    chosen, left_out = [], []
    for name in dict.fromkeys(names):
        top = name.partition(".")[0]
        if is_beside(top, entry.folders):
            left_out.append(f"{name} was left out: it lies beside {entry.name}, and is always read anew")
        elif entry.interpreter is None and found_spec(top) is None:
            raise UsageError(f"there is no module {top!r}")
        else:
            chosen.append(name)
    return Preload(tuple(chosen), is_explicit=True, remarks=tuple(left_out), folders=entry.folders)


def _of_source(entry: Entry) -> Preload:
    if entry.path is None:
        return _cold(f"there is no file of {entry.name} that could be read")
    try:
        chosen, sources = _read_all(entry.path, entry)
    except OSError as error:
        return _cold(f"{entry.path} cannot be read: {error.strerror}")
    except _CANNOT_PARSE as error:
        return _cold(f"{entry.path} cannot be parsed: {_reason(error)}")
    if not chosen:
        return _cold(f"{entry.path} imports nothing but its own modules")
    if any(_top(name) == "torch" for name in chosen):
        chosen |= dict.fromkeys(name for source in sources for name in lazily_imported(source))
    return Preload(tuple(chosen), folders=entry.folders)


def _read_all(path: str, entry: Entry) -> tuple[dict[str, None], list[bytes]]:
    """What an entry imports, itself and by way of the user's own modules, in that order; and all sources."""
    chosen: dict[str, None] = {}
    sources: dict[str, bytes] = {}
    is_own = dict.fromkeys(_NEVER, True)

    def read(file: str, package: str) -> None:
        sources[file] = b""
        sources[file] = source = _read(file)
        for name in imports(source, package):
            top = _top(name)
            if top not in is_own:
                is_own[top] = is_beside(top, entry.folders)
            if is_own[top]:
                read_own(name)
            else:
                chosen[name] = None

    def read_own(name: str) -> None:
        for file, package in own_sources(name, entry.folders):
            if file not in sources and sum(map(len, sources.values())) < _ENOUGH:
                # The worker will tell what is wrong with it.
                with suppress(OSError, *_CANNOT_PARSE):
                    read(file, package)

    read_own(entry.package)
    read(path, entry.package)
    return chosen, list(sources.values())


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    return str(error) or type(error).__name__


def _cold(why: str) -> Preload:
    return Preload(remarks=(f"nothing is preloaded: {why}",))


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _read(path: str) -> bytes:
    # A pipe (`<(…)` of a shell) can be read once, which is for the worker to do.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a file")
    with open(path, "rb") as file:
        return file.read()


def imports(source: bytes, package: str = "") -> list[str]:
    """What a source imports at its top level, each once, in order; see :mod:`elasticrs.warm` for the forms.

    Args:
        source: as it is in the file: the parser sees to the encoding.
        package: to which it belongs; relative imports are left out without one.

    Raises:
        SyntaxError: or another of :data:`_CANNOT_PARSE`.
    """
    with warnings.catch_warnings():
        # The worker shows those of its script.
        warnings.simplefilter("ignore")
        tree = compile(source, "<script>", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    found: dict[str, None] = {}
    for node in _statements(tree):
        if isinstance(node, _ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, _ast.ImportFrom) and (module := _absolute(node, package)):
            found[module] = None
            found.update(dict.fromkeys(f"{module}:{alias.name}" for alias in node.names))
    return list(found)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module of a ``from … import …``; empty for a relative one that leads nowhere."""
    parents = package.split(".")
    if node.level == 0 or not package or node.level > len(parents):
        return "" if node.level else node.module or ""
    parts = parents[: len(parents) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements that run when the module does, in order; no recursion, as code may be nested deeply."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, (_ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef)):
            continue
        yield node
        blocks: Sequence[str] = _BLOCKS
        if isinstance(node, _ast.If) and (skipped := _for_type_checkers(node.test)) is not None:
            blocks = [block for block in _BLOCKS if block != skipped]
        for block in reversed(blocks):
            inner = getattr(node, block, ())
            if isinstance(inner, list):
                left.extend(reversed(inner))


def _for_type_checkers(test: ast.expr) -> str | None:
    """The branch of an ``if`` that only type checkers take: ``body``, ``orelse``, or ``None``."""
    if isinstance(test, _ast.UnaryOp) and isinstance(test.op, _ast.Not):
        return "orelse" if _for_type_checkers(test.operand) == "body" else None
    name = test.id if isinstance(test, _ast.Name) else getattr(test, "attr", None)
    return "body" if name == "TYPE_CHECKING" else None


def mentions(entry: Entry, words: Sequence[bytes]) -> bool:
    """Return true if one of the user's own sources has one of these words, or none of them can be read.

    Args:
        entry: what the workers run.
        words: wherever they are.
    """
    if entry.path is None:
        return False
    try:
        # As a rule it is the script itself, and nothing has to be parsed.
        if _has(_read(entry.path), words):
            return True
        _, sources = _read_all(entry.path, entry)
    except (OSError, *_CANNOT_PARSE):
        # The worker will tell.
        return True
    return any(_has(source, words) for source in sources)


def _has(source: bytes, words: Sequence[bytes]) -> bool:
    return any(word in source for word in words)


def lazily_imported(source: bytes) -> list[str]:
    """What torch will import later than its user does; see :data:`LAZY`.

    Args:
        source: of which words count, wherever they are.
    """
    return [name for words, name in LAZY if _has(source, words)]
