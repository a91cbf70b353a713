"""Base classes for records. They are similar to dataclasses, but without the 15 ms that importing
``dataclasses`` takes. The annotations of a class are its fields.

A module that uses these classes needs ``from __future__ import annotations``. A field may have a default, or
:func:`fresh`. Fields after ``_: KW_ONLY`` (which is imported from :mod:`dataclasses` for type checkers only)
are keyword-only. A class may define its own ``__init__``.
"""

from __future__ import annotations

from itertools import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType
    from typing import Any, ClassVar

    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[type], type]:
        """Return a decorator that does nothing at run time, because it only informs type checkers. Python's
        own version requires Python 3.11 and a slow import.
        """
        return lambda made: made


class _Fresh:
    __slots__ = ("factory",)

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def fresh(*, factory: Callable[[], Any]) -> Any:
    """Return a default for a field that is created anew for each object, such as a list."""
    return _Fresh(factory)


class _Fields(type):
    """Metaclass that turns the annotations of a class into its slots."""

    def __new__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any]) -> _Fields:
        """Create a class. The annotations in its body become fields, which come after the fields of the base
        class.
        """
        above, inherited, by_name = (
            (bases[0]._names, bases[0]._defaults, bases[0]._by_name) if bases else ((), {}, ())
        )
        own: list[str] = []
        positional = None
        for field, kind in namespace.get("__annotations__", {}).items():
            if kind == "KW_ONLY":
                positional = len(own)
            elif not kind.startswith("ClassVar"):
                own.append(field)
        defaults = {field: namespace.pop(field) for field in own if field in namespace}
        names, all_defaults = (*above, *own), {**inherited, **defaults}
        is_plain = not bases or ("__init__" not in namespace and bases[0]._objects is not None)
        # Use the generic methods instead of the inherited methods, because the inherited methods may be
        # compiled for the fields of the base class.
        general = {"__init__": _Made.__init__, "values": _Made.values} if is_plain and bases else {}
        return super().__new__(cls, name, bases, {
            **general,
            **namespace,
            "__slots__": tuple(own),
            "_objects": count(1) if is_plain else None,
            "_names": names,
            "_by_name": frozenset(by_name).union(own[positional:] if positional is not None else ()),
            "_defaults": all_defaults,
        })  # fmt: skip


def _compile(kind: type[_Made]) -> None:
    """Compile ``__init__`` and ``values`` for the fields of a class. The compiled methods are as fast as
    hand-written methods, which is about five times as fast as the generic methods.
    """
    names, defaults, by_name = kind._names, kind._defaults, kind._by_name
    order = [*(name for name in names if name not in by_name), *(name for name in names if name in by_name)]
    fresh_ones = tuple(type(defaults.get(name)) is _Fresh for name in order)
    init, values = _TEMPLATES.get(fresh_ones) or _template(fresh_ones)
    renamed = {f"f{i}": name for i, name in enumerate(order)}
    code = init.__code__.replace(
        co_argcount=1 + len(order) - len(by_name),
        co_kwonlyargcount=len(by_name),
        co_varnames=("self", *order),
        co_names=tuple(renamed.get(name, name) for name in init.__code__.co_names),
    )
    made = type(init)(code, init.__globals__, "__init__")
    made.__defaults__ = tuple(defaults[name] for name in order if name in defaults and name not in by_name)
    made.__kwdefaults__ = {name: defaults[name] for name in by_name if name in defaults}
    kind.__init__ = made  # type: ignore[method-assign]
    kind.values = type(values)(values.__code__.replace(co_names=names), {})  # type: ignore[method-assign]


_TEMPLATES: dict[tuple[bool, ...], tuple[FunctionType, FunctionType]] = {}
"""Compiled templates, by whether each field has a :func:`fresh` default. Copying a template with other names
takes a fifth of the time that compiling takes.
"""


def _template(fresh_ones: tuple[bool, ...]) -> tuple[FunctionType, FunctionType]:
    """Return ``__init__`` and ``values`` for a class with the fields ``f0``, ``f1``, and so on. ``__init__``
    calls the factory of each :func:`fresh` default.
    """
    made: dict[str, Any] = {}
    sets = [
        f"    self.f{i} = "
        + (f"a{i}.factory() if type(a{i}) is _Fresh else a{i}\n" if is_fresh else f"a{i}\n")
        for i, is_fresh in enumerate(fresh_ones)
    ]
    exec(
        f"def __init__(self, {', '.join(f'a{i}' for i in range(len(sets)))}):\n"
        + ("".join(sets) or "    pass\n")
        + f"def values(self):\n    return ({''.join(f'self.f{i}, ' for i in range(len(sets)))})\n",
        {"_Fresh": _Fresh},
        made,
    )
    _TEMPLATES[fresh_ones] = made["__init__"], made["values"]
    return _TEMPLATES[fresh_ones]


_MANY = 8
"""Number of objects of a class after which its methods are compiled. A launch creates only a few objects of
each class.
"""


class _Made(metaclass=_Fields):
    _objects: ClassVar[count[int] | None]
    """Counter of created objects; ``None`` if the class has its own ``__init__``."""
    _names: ClassVar[tuple[str, ...]]
    _by_name: ClassVar[frozenset[str]]
    _defaults: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **given: Any) -> None:
        if self._objects is not None and next(self._objects) == _MANY:
            _compile(type(self))
        if given or self._by_name or len(args) != len(self._names):
            args = self._complete(args, given)
        for name, value in zip(self._names, args, strict=True):
            setattr(self, name, value)

    def _complete(self, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
        """Return the values of all fields, in order.

        Raises:
            TypeError: the arguments do not match the fields.
        """
        kind, names = type(self).__name__, self._names
        positional = [name for name in names if name not in self._by_name]
        if len(args) > len(positional):
            raise TypeError(f"{kind}: got {len(args)} values for {len(positional)} fields")
        values = dict(zip(positional, args, strict=False))
        if wrong := [name for name in given if name in values or name not in names]:
            raise TypeError(f"{kind}: unknown, or given twice: {', '.join(wrong)}")
        values.update(given)
        if missing := [name for name in names if name not in values and name not in self._defaults]:
            raise TypeError(f"{kind}: missing: {', '.join(missing)}")
        return tuple(values[name] if name in values else self._default(name) for name in names)

    def _default(self, name: str) -> Any:
        default = self._defaults[name]
        return default.factory() if type(default) is _Fresh else default

    def fields(self) -> dict[str, Any]:
        """Return all values by the names of their fields, in the order of the fields."""
        return dict(zip(self._names, self.values(), strict=True))

    def values(self) -> tuple[Any, ...]:
        """Return all values in the order of the fields."""
        return tuple(getattr(self, name) for name in self._names)

    def replaced(self, **changes: Any) -> Self:
        """Return a copy in which some fields have other values."""
        return type(self)(**{**self.fields(), **changes})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name, ...)!r}" for name in self._names)
        return f"{type(self).__name__}({fields})"


@dataclass_transform(frozen_default=True, field_specifiers=(fresh,))
class Value(_Made):
    """Base class of immutable records, which are compared and hashed by their fields. Only type checkers
    enforce the immutability.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.values() == other.values()

    def __hash__(self) -> int:
        return hash((type(self), *self.values()))


@dataclass_transform(eq_default=False, field_specifiers=(fresh,))
class Record(_Made):
    """Base class of mutable records, which are compared by identity."""
