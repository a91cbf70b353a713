"""Which modules are imported once for all workers: those that the user names, or that the code imports.

A source is parsed, never run. What it imports at its top level counts, also inside of ``if``, ``try``,
``with`` and loops, but not in functions and classes, nor for type checkers. To it comes what torch imports at
the first step only; see :data:`LAZY`.
"""

from __future__ import annotations

import _ast
import os
import stat
import warnings

from elasticrs._value import Value
from elasticrs.config import UsageError
from elasticrs.warm.entry import found_spec, is_beside

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
        source = _read(entry.path)
        names = [name for name in imports(source) if name.partition(".")[0] not in _NEVER]
    except OSError as error:
        return _cold(f"{entry.path} cannot be read: {error.strerror}")
    except _CANNOT_PARSE as error:
        return _cold(f"{entry.path} cannot be parsed: {error}")
    own = {top for top in {_top(name) for name in names} if is_beside(top, entry.folders)}
    chosen = [name for name in names if _top(name) not in own]
    if not chosen:
        return _cold(f"{entry.path} imports nothing but its own modules")
    if any(_top(name) == "torch" for name in chosen):
        chosen += [name for name in lazily_imported(source) if name not in chosen]
    return Preload(tuple(chosen), folders=entry.folders)


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


def imports(source: bytes) -> list[str]:
    """What a source imports at its top level, each once, in order; see :mod:`elasticrs.warm` for the forms.

    Relative imports are left out.

    Args:
        source: as it is in the file: the parser sees to the encoding.

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
        elif isinstance(node, _ast.ImportFrom) and node.level == 0 and node.module:
            found[node.module] = None
            found.update(dict.fromkeys(f"{node.module}:{alias.name}" for alias in node.names))
    return list(found)


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


def lazily_imported(source: bytes) -> list[str]:
    """What torch will import later than its user does; see :data:`LAZY`.

    Args:
        source: of which words count, wherever they are.
    """
    return [name for words, name in LAZY if any(word in source for word in words)]
