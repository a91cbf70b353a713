"""Base classes for records. They replace dataclasses, because importing ``dataclasses`` takes 15 ms.

Annotations declare the fields; the module needs ``from __future__ import annotations``. Use :func:`fresh` for
a mutable default. Fields after ``_: KW_ONLY`` (imported for type checkers only) are keyword-only.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import Self, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_: object) -> Callable[[type], type]:
        """Do nothing at run time. The standard library's version needs Python 3.11 and a slow import."""
        return lambda made: made


class _Fresh:
    __slots__ = ("factory",)

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def fresh(*, factory: Callable[[], Any]) -> Any:
    """Return a default that is created anew for each object, such as an empty list."""
    return _Fresh(factory)


@dataclass_transform(kw_only_default=True)
def shared_fields(made: type[T]) -> type[T]:
    """Mark a mix-in with empty ``__slots__`` that declares fields with defaults, for records and dataclasses.
    In a record, they are keyword-only if the mix-in is not the first base class.
    """
    return made


def defaults_of(declaration: type) -> dict[str, Any]:
    return {name: getattr(declaration, name) for name in declaration.__annotations__}


class _Fields(type):
    def __new__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any]) -> _Fields:
        """Order a class's fields: its first base class's, its own, and its other bases' (keyword-only)."""
        above, inherited, by_name = (
            (bases[0]._names, bases[0]._defaults, bases[0]._by_name) if bases else ((), {}, ())
        )
        own: list[str] = []
        positional = None
        annotations: dict[str, str] = namespace.get("__annotations__", {})
        shared: dict[str, Any] = {}
        for base in bases[1:]:
            annotations = {**annotations, "_": "KW_ONLY", **base.__annotations__}
            shared |= defaults_of(base)
        for field, kind in annotations.items():
            if kind == "KW_ONLY":
                positional = len(own)
            elif not kind.startswith("ClassVar"):
                own.append(field)
        defaults = {field: namespace.pop(field) for field in own if field in namespace}
        names, all_defaults = (*above, *own), {**inherited, **shared, **defaults}
        keywords = frozenset(by_name).union(own[positional:] if positional is not None else ())
        return super().__new__(cls, name, bases, {
            **namespace,
            "__slots__": tuple(own),
            "_names": names,
            "_by_name": keywords,
            "_positional": tuple(name for name in names if name not in keywords),
            "_defaults": all_defaults,
        })  # fmt: skip


class _Made(metaclass=_Fields):
    _names: ClassVar[tuple[str, ...]]
    _by_name: ClassVar[frozenset[str]]
    _positional: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[dict[str, Any]]
    _secret: ClassVar[str] = ""
    """Name of the field whose value is not shown, if there is one."""

    def __init__(self, *args: Any, **given: Any) -> None:
        if given or len(args) != len(self._names) or self._by_name:
            args = self._complete(args, given)
        for name, value in zip(self._names, args, strict=True):
            setattr(self, name, value)

    def _complete(self, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
        kind, names, positional = type(self).__name__, self._names, self._positional
        if len(args) > len(positional):
            raise TypeError(f"{kind}: got {len(args)} values for {len(positional)} fields")
        values = {**dict(zip(positional, args, strict=False)), **given}
        if len(values) < len(args) + len(given) or not values.keys() <= set(names):
            wrong = [name for name in given if name not in names or name in positional[: len(args)]]
            raise TypeError(f"{kind}: unknown, or given twice: {', '.join(wrong)}")
        if missing := [name for name in names if name not in values and name not in self._defaults]:
            raise TypeError(f"{kind}: missing: {', '.join(missing)}")
        return tuple([values[name] if name in values else self._default(name) for name in names])

    @classmethod
    def _default(cls, name: str) -> Any:
        default = cls._defaults[name]
        return default.factory() if type(default) is _Fresh else default

    @classmethod
    def taken_from(cls, source: object, **others: Any) -> Self:
        """Create an object from the attributes of ``source`` named like fields, and from ``others``."""
        names = [name for name in cls._names if name not in others and hasattr(source, name)]
        return cls(**{name: getattr(source, name) for name in names}, **others)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {name: cls._default(name) for name in cls._defaults}

    def fields(self) -> dict[str, Any]:
        return dict(zip(self._names, self.values(), strict=True))

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._names)

    def replaced(self, **changes: Any) -> Self:
        return type(self)(**{**self.fields(), **changes})

    def __repr__(self) -> str:
        shown = {name: repr(getattr(self, name, ...)) for name in self._names}
        if getattr(self, self._secret, None):
            shown[self._secret] = "<secret>"
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"


@dataclass_transform(frozen_default=True, field_specifiers=(fresh,))
class Value(_Made):
    """Immutable record, compared and hashed by value. Only type checkers enforce immutability."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.values() == other.values()

    def __hash__(self) -> int:
        return hash((type(self), *self.values()))


@dataclass_transform(eq_default=False, field_specifiers=(fresh,))
class Record(_Made):
    """Mutable record, compared by identity."""
