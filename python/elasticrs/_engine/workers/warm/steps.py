"""Find the top-level statements of a source file that can affect its imports, without executing it.

A module can be preloaded only if the nursery, the process that preloads it, can repeat the effects of the
statements before the import:

- :class:`Import`: an import, which can be preloaded;
- :class:`Variable`: an assignment to an item of ``os.environ``, which the nursery can repeat;
- :class:`Folder`: a folder that is added to ``sys.path``. Its modules are not preloaded;
- :class:`Unknown`: a statement that may affect imports, such as a call of any function that is not listed in
  :data:`_HARMLESS`.

All other statements are skipped. Function bodies are skipped as well, because their calls are unknown.
"""

from __future__ import annotations

import _ast
import os
import warnings

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    Step: TypeAlias = "Import | Variable | Folder | Unknown"

_FUNCTIONS = (_ast.FunctionDef, _ast.AsyncFunctionDef)
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_HEADS = ("test", "iter", "subject", "guard", "type", "value", "exc", "msg")

_CONTAINER = "{}"
"""Placeholder for a dict, list or set that the same source file creates."""
_TEXT = "str()"
_ENVIRON = "os.environ"

_HARMLESS = frozenset((
    "abc.abstractmethod", "bool", "bytes", "classmethod", "collections.OrderedDict",
    "collections.defaultdict", "collections.deque", "collections.namedtuple", "contextlib.contextmanager",
    "contextlib.nullcontext", "contextlib.suppress", "dataclasses.dataclass", "dataclasses.field",
    "datetime.datetime.now", "dict", "enum.auto", "enumerate", "exit", "float", "frozenset",
    "functools.cache", "functools.lru_cache", "functools.partial", "functools.total_ordering",
    "functools.wraps", "getattr", "hasattr", "importlib.util.find_spec", "int", "isinstance", "issubclass",
    "len", "list", "logging.getLogger", "logging.getLogger().debug", "logging.getLogger().error",
    "logging.getLogger().info", "logging.getLogger().warning", "object", "os.cpu_count", "os.environ.get",
    "os.getcwd", "os.getenv", "os.getpid", "print", "property", "quit", "range", "re.compile", "repr",
    "reversed", "round", "set", "staticmethod", "str", "sum", "super", "sys.exit", "time.localtime",
    "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns", "time.process_time",
    "time.strftime", "time.time", "time.time_ns", "tuple", "type", "warnings.warn", "zip",
))  # fmt: skip
"""Functions whose calls cannot affect a later import."""
_HARMLESS_ROOTS = ("os.path.", "pathlib.Path", "typing.", "typing_extensions.", f"{_TEXT}.", f"{_CONTAINER}.")
_PATH_FUNCTIONS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        os.path.abspath, os.path.dirname, os.path.expanduser, os.path.join, os.path.normpath, os.path.realpath
    )
}  # fmt: skip
_CONTEXTS = ("contextlib.nullcontext()", "contextlib.suppress()")
"""Context managers that cannot affect an import inside their block."""


class Import(Value):
    """Import of ``a.b``, or of ``c`` from it (``a.b:c``). Unless ``is_certain``, it may be skipped."""

    name: str
    is_certain: bool = True


class Variable(Value):
    name: str
    value: str
    line: int
    text: str


class Folder(Value):
    path: str


class Unknown(Value):
    line: int
    text: str


def steps(source: bytes, package: str = "", *, file: str = "", is_main: bool = True) -> Iterator[Step]:
    """Yield the statements that can affect imports, in execution order. Without ``package``, skip relative
    imports. Raise ``SyntaxError``, ``ValueError``, ``RecursionError`` or ``MemoryError`` if parsing fails.
    """
    with warnings.catch_warnings():
        # Suppress the parser's warnings, because the worker prints them when it compiles the script.
        warnings.simplefilter("ignore")
        tree = compile(source, "<script>", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    return _Reader(source, package, file, is_main).read(tree)


class _Reader:
    def __init__(self, source: bytes, package: str, file: str, is_main: bool) -> None:
        self._lines = source.splitlines()
        self._package = package
        self._is_main = is_main
        self._names: dict[str, str | None] = {}
        """Dotted path of the object that each name refers to; ``None`` if it is unknown."""
        self._texts = {"__file__": os.path.abspath(file)}
        """Values of the names that refer to a known string or path."""
        self._has_lost = False
        """True after the first unknown statement. After that statement, only imports are reported."""

    def read(self, tree: ast.AST) -> Iterator[Step]:
        # Use a stack instead of recursion, because deeply nested code could exceed the recursion limit.
        left: list[tuple[ast.AST, bool]] = [(tree, True)]
        while left:
            node, is_certain = left.pop()
            yield from self._steps(node, is_certain)
            left += reversed(self._blocks(node, is_certain))

    def _steps(self, node: ast.AST, is_certain: bool) -> Iterator[Step]:
        if isinstance(node, (_ast.Import, _ast.ImportFrom)):
            for name in self._imported(node):
                yield Import(name, is_certain)
        elif not self._has_lost:
            known: list[Step] = [*self._folders(node), *(self._variables(node) if is_certain else ())]
            yield from known
            if not known and not self._is_harmless(node):
                self._has_lost = True
                yield Unknown(*self._place(node))

    def _place(self, node: ast.AST) -> tuple[int, str]:
        line: int = getattr(node, "lineno", 0)
        text = self._lines[line - 1] if 0 < line <= len(self._lines) else b""
        return line, text.decode("utf-8", "replace").strip()

    def _blocks(self, node: ast.AST, is_certain: bool) -> list[tuple[ast.AST, bool]]:
        """Return the statements in a node's blocks that may run, each with true if it is certain to run."""
        if isinstance(node, (*_FUNCTIONS, _ast.ClassDef)):
            return []
        names: Sequence[str] = _BLOCKS
        if isinstance(node, _ast.If):
            taken = self._branch(node.test)
            names = _BLOCKS if taken is None else (taken,)
            is_certain = is_certain and taken is not None
        elif not isinstance(node, _ast.Module):
            is_certain = False
        blocks = [getattr(node, name, None) for name in names]
        return [(inner, is_certain) for block in blocks if isinstance(block, list) for inner in block]

    def _branch(self, test: ast.expr) -> str | None:
        if isinstance(test, _ast.UnaryOp) and isinstance(test.op, _ast.Not):
            taken = self._branch(test.operand)
            return {"body": "orelse", "orelse": "body", None: None}[taken]
        match test:
            case _ast.Name("TYPE_CHECKING") | _ast.Attribute(attr="TYPE_CHECKING"):
                return "orelse"
            case _ast.Compare(_ast.Name("__name__"), [_ast.Eq()], [_ast.Constant("__main__")]):
                return "body" if self._is_main else "orelse"
        return None

    def _imported(self, node: ast.Import | ast.ImportFrom) -> dict[str, None]:
        if isinstance(node, _ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self._names[alias.asname or top] = alias.name if alias.asname else top
            return dict.fromkeys(alias.name for alias in node.names)
        module = _absolute(node, self._package)
        for alias in node.names:
            self._names[alias.asname or alias.name] = f"{module}.{alias.name}"
        return dict.fromkeys([module, *(f"{module}:{alias.name}" for alias in node.names)] if module else ())

    def _variables(self, node: ast.AST) -> list[Variable]:
        match node:
            case _ast.Assign(targets, _ast.Constant(str(value))) if "\0" not in value:
                names = [self._variable(target) for target in targets]
                return [Variable(name, value, *self._place(node)) for name in names if all(names)]
        return []

    def _variable(self, target: ast.expr) -> str:
        match target:
            case _ast.Subscript(place, _ast.Constant(str(name))) if self._path(place) == _ENVIRON:
                return "" if {"=", "\0"} & {*name} else name
        return ""

    def _folders(self, node: ast.AST) -> list[Folder]:
        match node:
            case _ast.Expr(_ast.Call(function, [place], [])) if self._path(function) == "sys.path.append":
                found = self._text(place)
            case _ast.Expr(_ast.Call(function, [_ast.Constant(int()), place], [])) if (
                self._path(function) == "sys.path.insert"
            ):
                found = self._text(place)
            case _:
                return []
        return [] if found is None else [Folder(os.path.abspath(found))]

    def _text(self, node: ast.expr) -> str | None:
        """Return the text of an expression of constant strings and ``__file__``; ``None`` for any other."""
        match node:
            case _ast.Constant(str(text)):
                return text
            case _ast.Name(name):
                return self._texts.get(name)
            case _ast.BinOp(left, _ast.Div(), right):
                return self._called("join", [left, right])
            case _ast.Attribute(place, "parent"):
                return self._called("dirname", [place])
            case _ast.Subscript(_ast.Attribute(place, "parents"), _ast.Constant(int(count))) if count >= 0:
                found = self._text(place)
                for _ in range(0 if found is None else count + 1):
                    found = os.path.dirname(found or "")
                return found
            case _ast.Call(_ast.Attribute(place, "resolve" | "absolute" | "expanduser" as name), [], []) if (
                self._path(place) or ""
            ).startswith("pathlib.Path"):
                return self._called({"resolve": "realpath", "absolute": "abspath"}.get(name, name), [place])
            case _ast.Call(function, arguments, []):
                path = self._path(function) or ""
                if path in ("str", "os.fspath", "pathlib.Path") and len(arguments) == 1:
                    return self._text(arguments[0])
                if path == "os.getcwd" and not arguments:
                    return os.getcwd()
                if path.startswith("os.path."):
                    return self._called(path.removeprefix("os.path."), arguments)
        return None

    def _called(self, name: str, arguments: Sequence[ast.expr]) -> str | None:
        texts = [text for argument in arguments if (text := self._text(argument)) is not None]
        function = _PATH_FUNCTIONS.get(name)
        if function is None or not texts or len(texts) != len(arguments):
            return None
        return function(*texts) if name == "join" or len(texts) == 1 else None

    def _is_harmless(self, node: ast.AST) -> bool:
        """Return true if a statement, without the statements in its blocks, cannot affect imports."""
        if isinstance(node, _FUNCTIONS):
            self._names[node.name] = None
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return self._decorate_harmlessly(node.decorator_list) and self._are_harmless(defaults)
        if isinstance(node, _ast.ClassDef):
            return self._is_harmless_class(node)
        if isinstance(node, (_ast.With, _ast.AsyncWith)):
            return all(self._path(item.context_expr) in _CONTEXTS for item in node.items)
        if isinstance(node, (_ast.Assign, _ast.AnnAssign, _ast.AugAssign)):
            return self._is_harmless_assignment(node)
        if isinstance(node, _ast.Delete):
            return all(self._binds(target) for target in node.targets)
        if isinstance(node, _ast.Raise):
            return True  # A raised exception ends the script, so no import follows.
        if isinstance(node, (_ast.For, _ast.AsyncFor)) and not self._binds(node.target):
            return False
        heads = [getattr(node, name, None) for name in _HEADS]
        return self._are_harmless([head for head in heads if isinstance(head, _ast.AST)])

    def _is_harmless_class(self, node: ast.ClassDef) -> bool:
        before = self._names.copy()
        inner = (*_FUNCTIONS, _ast.ClassDef, _ast.Assign, _ast.AnnAssign, _ast.Expr, _ast.Pass)
        is_harmless = (
            self._decorate_harmlessly(node.decorator_list)
            and self._are_harmless([*node.bases, *node.keywords])
            and all(isinstance(each, inner) and self._is_harmless(each) for each in node.body)
        )
        self._names = {**before, node.name: None}
        return is_harmless

    def _decorate_harmlessly(self, decorators: Sequence[ast.expr]) -> bool:
        functions = [each.func if isinstance(each, _ast.Call) else each for each in decorators]
        return self._are_harmless(decorators) and all(map(self._is_harmless_function, functions))

    def _is_harmless_function(self, function: ast.expr) -> bool:
        if isinstance(function, _ast.Attribute) and function.attr in ("setter", "deleter"):
            return True
        path = self._path(function) or ""
        return path in _HARMLESS or path.startswith(_HARMLESS_ROOTS)

    def _is_harmless_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
        if node.value is None:
            return True
        if not self._are_harmless([node.value]):
            return False
        if isinstance(node, _ast.AugAssign):
            # Check which object the name refers to: `paths = sys.path; paths += ["…"]` changes `sys.path`.
            known = self._path(node.target) if isinstance(node.target, _ast.Name) else ""
            return known in (None, _CONTAINER, _TEXT)
        path, text = self._path(node.value), self._text(node.value)
        targets = node.targets if isinstance(node, _ast.Assign) else [node.target]
        return all(self._binds(target, path, text) for target in targets)

    def _binds(self, target: ast.expr, path: str | None = None, text: str | None = None) -> bool:
        """Record which variables an assignment sets. Return false if it could affect later imports."""
        match target:
            case _ast.Name(name):
                self._names[name] = path
                self._texts.pop(name, None)
                self._texts.update({} if text is None else {name: text})
                return True
            case _ast.Tuple(inner) | _ast.List(inner):
                return all(self._binds(each) for each in inner)
            case _ast.Starred(inner):
                return self._binds(inner)
            case _ast.Subscript(place, key):
                return self._path(place) == _CONTAINER and self._are_harmless([key])
        return False

    def _are_harmless(self, expressions: Sequence[ast.AST]) -> bool:
        left = [*expressions]
        while left:
            node = left.pop()
            if isinstance(node, _ast.Lambda):
                left += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
                continue
            if isinstance(node, _ast.NamedExpr):
                self._binds(node.target)
            if isinstance(node, _ast.Call) and not self._is_harmless_function(node.func):
                return False
            for name in node._fields:
                found = getattr(node, name)
                inner = found if isinstance(found, list) else [found]
                left += [each for each in inner if isinstance(each, _ast.AST)]
        return True

    def _path(self, node: ast.expr) -> str | None:
        match node:
            case _ast.Name(name):
                return self._names.get(name, name)
            case _ast.Attribute(place, name):
                path = self._path(place)
                return None if path is None else f"{path}.{name}"
            case _ast.Call(function):
                path = self._path(function)
                return None if path is None else f"{path}()"
            case _ast.BinOp(left):
                return self._path(left)
            case _ast.Constant(str()) | _ast.JoinedStr():
                return _TEXT
            case _ast.Dict() | _ast.List() | _ast.Set():
                return _CONTAINER
        return None


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")
    if node.level == 0 or not package or node.level > len(parents):
        return "" if node.level else node.module or ""
    parts = parents[: len(parents) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)
