"""Comparison of every public name in the installed torch's elastic modules with ours.

A difference has a place (a module, or :data:`OPTIONS` for the command line), a name in it, and a state:

=============== =======================================================================================
``same``        nothing differs
``missing``     ours lacks it
``extra``       only ours has it (a parameter or an option)
``default``     another default
``kind``        another kind of thing, or of parameter
``value``       another value of a constant or of a member of an enumeration
``order``       positional parameters in another order
``bases``       ours lacks a base class
``object``      torch's is the same object as in another module, ours is not
=============== =======================================================================================

A parameter is named ``Class.method(parameter)``, a member ``Class.member``. A class is told about where it is
defined, elsewhere only whether it is there. Annotations are not compared.
"""

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import pkgutil
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

ELASTIC = "torch.distributed.elastic"
TORCHS = (ELASTIC, "torch.distributed.launcher", "torch.distributed.run", "torch.distributed.launch")
"""The modules, and packages with all that is in them."""

COMMANDS = ("torch.distributed.run", "torch.distributed.launch")
"""Not packages, but their names are used wherever they were defined."""

OPTIONS = "options of the command line"

PRIVATE = {
    # Other modules of torch import the function.
    "agent.server.api": ("_RoleInstanceInfo", "_get_fq_hostname"),
    # Other projects create a server with this class.
    "agent.server.local_elastic_agent": ("_AliveCallbackProxy",),
    "launcher.api": ("_get_addr_and_port", "_get_entrypoint_name"),
    "rendezvous.registry": ("_register_out_of_tree_handlers",),
    # Launchers that copy torch's `run` import these functions.
    "rendezvous.utils": (
        *("_PeriodicTimer", "_delay", "_matches_machine_hostname", "_parse_rendezvous_config"),
        "_try_parse_port",
    ),
    # Other programs patch `metadata.entry_points`.
    "run": ("_get_logs_specs_class", "metadata"),
}
"""Names that are not public and used from outside."""

HOOKS = {
    "SimpleElasticAgent": (
        *("_rendezvous", "_assign_worker_ranks", "_initialize_workers", "_restart_workers", "_invoke_run"),
        *("_exit_barrier", "_record_worker_events", "_record_metrics", "_construct_event"),
        *("_get_worker_state", "_record_metric_with_condition", "_record_flakiness_metric"),
    ),
    "LocalElasticAgent": ("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"),
}
"""Methods with an underscore that subclasses override, beside abstract ones."""

Differences = dict[tuple[str, str], str]
"""State by place and name; several differences of one name are joined by commas."""


def ours_of(module: str) -> str:
    """Return the name of our module that corresponds to a module of torch."""
    for prefix in (ELASTIC, "torch.distributed"):
        if module == prefix or module.startswith(prefix + "."):
            return "elasticrs" + module[len(prefix) :]
    raise ValueError(module)


def torch_modules() -> Iterator[str]:
    """Yield the names of torch's public modules, including submodules."""
    for name in TORCHS:
        yield name
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
            if not found.name.rpartition(".")[2].startswith("_"):
                yield found.name


def public_names(module: ModuleType) -> list[str]:
    """Return the names that programs may use from a module: its ``__all__`` or, without one, the names
    without an underscore that it defines.

    A package without ``__all__`` offers what it imports from its own modules.
    """
    private = list(PRIVATE.get(ours_of(module.__name__).removeprefix("elasticrs."), ()))
    stated = getattr(module, "__all__", None)
    if stated is not None:
        return sorted([*stated, *private])
    offers = hasattr(module, "__path__") or module.__name__ in COMMANDS
    homes = tuple(f"{name}." for name in TORCHS) if offers else (module.__name__ + ".",)
    return sorted([name for name, value in vars(module).items() if _is_public(name, value, homes)] + private)


def _is_public(name: str, value: object, homes: tuple[str, ...]) -> bool:
    if name.startswith("_") or inspect.ismodule(value):
        return False
    home = getattr(value, "__module__", None)
    if home is None:
        # A constant does not tell where it was defined. Exclude `REMAINDER`, which comes from argparse.
        return name.isupper() and name != "REMAINDER" and isinstance(value, str | int | float)
    return f"{home}.".startswith(homes)


class Comparison:
    """Collects, for each name in torch's modules, how ours differs."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[str]] = {}

    def run(self) -> Differences:
        for name in torch_modules():
            self._module(name)
        self._options()
        return {key: ", ".join(dict.fromkeys(states)) or "same" for key, states in sorted(self.found.items())}

    def _tell(self, place: str, name: str, state: str) -> None:
        self.found.setdefault((place, name), []).append(state)

    def _module(self, name: str) -> None:
        place = ours_of(name)
        if not exists(ours_of(name)):
            # Report only the package if a whole package is missing, not each of its modules.
            if exists(ours_of(name).rpartition(".")[0]):
                self._tell(place, "(module)", "missing")
            return
        try:
            theirs = importlib.import_module(name)
        except ImportError:
            # The module needs a package that torch does not require, so its names cannot be read.
            return
        ours = importlib.import_module(ours_of(name))
        for each in public_names(theirs):
            before = len(self.found)
            self._name(place, each, getattr(theirs, each), ours)
            if len(self.found) == before:
                self.found[place, each] = []

    def _name(self, place: str, name: str, theirs: Any, module: ModuleType) -> None:
        try:
            ours = getattr(module, name)
        except AttributeError:
            return self._tell(place, name, "missing")
        home = getattr(theirs, "__module__", None)
        qualname = getattr(theirs, "__qualname__", name)
        if isinstance(home, str) and our_name(home) not in (place, None) and "." not in qualname:
            original = self._original(home, qualname)
            if original is not None and original is not ours:
                self._tell(place, name, "object")
            return None
        if kind(theirs) != kind(ours):
            return self._tell(place, name, "kind")
        if inspect.isclass(theirs):
            return self._class(place, name, theirs, ours)
        if callable(theirs) and kind(theirs) == "function":
            return self._parameters(place, name, theirs, ours)
        if isinstance(theirs, str | int | float | tuple) and theirs != ours:
            self._tell(place, name, "value")
        return None

    def _original(self, home: str, qualname: str) -> object:
        try:
            return getattr(importlib.import_module(ours_of(home)), qualname, None)
        except ImportError:
            return None

    def _class(self, place: str, name: str, theirs: type, ours: type) -> None:
        names = {base.__name__ for base in ours.__mro__}
        if any(base.__name__ not in names for base in theirs.__mro__ if is_telling(base)):
            self._tell(place, name, "bases")
        if issubclass(theirs, enum.Enum):
            for member in theirs:
                if member.name not in ours.__members__:  # type: ignore[attr-defined]
                    self._tell(place, f"{name}.{member.name}", "missing")
                elif ours[member.name].value != member.value:  # type: ignore[index]
                    self._tell(place, f"{name}.{member.name}", "value")
        else:
            self._parameters(place, name, theirs, ours)
            if dataclasses.is_dataclass(theirs) and not dataclasses.is_dataclass(ours):
                self._tell(place, name, "kind")
        for each, member in members(theirs).items():
            self._member(place, f"{name}.{each}", each, member, ours)

    def _member(self, place: str, name: str, each: str, theirs: object, ours: type) -> None:
        mine = inspect.getattr_static(ours, each, None)
        if mine is None:
            if not (kind(theirs) == "attribute" and each in attributes(ours)):
                self._tell(place, name, "missing")
        elif "function" in (kind(theirs), kind(mine)) and kind(theirs) != kind(mine):
            self._tell(place, name, "kind")
        elif kind(theirs) == "function":
            self._parameters(place, name, theirs, mine)

    def _parameters(self, place: str, name: str, theirs: Any, ours: Any) -> None:
        before, now = parameters(theirs), parameters(ours)
        for each in before.keys() - now.keys():
            self._tell(place, f"{name}({each})", "missing")
        for each in now.keys() - before.keys():
            self._tell(place, f"{name}({each})", "extra")
        for each in before.keys() & now.keys():
            if before[each].kind != now[each].kind:
                self._tell(place, f"{name}({each})", "kind")
            if not is_same(before[each].default, now[each].default):
                self._tell(place, f"{name}({each})", "default")
        common = [each for each in before if each in now]
        if common != list(now)[: len(common)]:
            self._tell(place, name, "order")

    def _options(self) -> None:
        theirs, ours = options("torch.distributed.run"), options("elasticrs.run")
        for flag in sorted(theirs.keys() | ours.keys()):
            if flag not in ours or flag not in theirs:
                self._tell(OPTIONS, flag, "missing" if flag not in ours else "extra")
                continue
            before, now = theirs[flag], ours[flag]
            self.found.setdefault((OPTIONS, flag), [])
            for fact in before:
                if before[fact] != now[fact]:
                    self._tell(OPTIONS, flag, "default" if fact == "default" else "kind")


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def our_name(module: str) -> str | None:
    """Like :func:`ours_of`, but return ``None`` for a module that is not compared."""
    return ours_of(module) if any(f"{module}.".startswith(f"{name}.") for name in TORCHS) else None


def is_telling(base: type) -> bool:
    """Return true if a base class is a basic Python type or belongs to one of the compared modules."""
    return base.__module__ in ("builtins", "abc", "enum", "typing") or base.__module__.startswith(TORCHS)


def kind(value: object) -> str:
    """Return the kind of a value as its users see it: class, function or attribute."""
    if inspect.isclass(value):
        return "class"
    if isinstance(value, staticmethod | classmethod):
        return "function"
    if inspect.isroutine(value) and not inspect.isdatadescriptor(value):
        return "function"
    return "attribute"


def members(cls: type) -> dict[str, object]:
    """Return the public members, abstract methods and hooks of a class, including those of its base classes
    in torch.
    """
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("torch."):
            continue
        for name, value in vars(base).items():
            hooks = HOOKS.get(cls.__name__, ())
            if not name.startswith("_") or getattr(value, "__isabstractmethod__", False) or name in hooks:
                found[name] = value
    if issubclass(cls, enum.Enum):
        return {name: value for name, value in found.items() if name not in cls.__members__}
    return found


def attributes(cls: type) -> set[str]:
    """Return the names of the instance attributes that a class declares as slots, annotations or
    parameters.
    """
    found: set[str] = set()
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        found |= {slots} if isinstance(slots, str) else set(slots)
        found |= vars(base).get("__annotations__", {}).keys()
    return found | parameters(cls).keys()


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters by name, without ``self`` and ``cls``. Empty if Python cannot determine the
    signature.
    """
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    try:
        found = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return {}
    fields = dataclasses.fields(value) if inspect.isclass(value) and dataclasses.is_dataclass(value) else ()
    made = {each.name: each.default_factory for each in fields}
    return {
        name: each.replace(default=made[name]())
        if made.get(name, dataclasses.MISSING) is not dataclasses.MISSING
        else each
        for name, each in found.items()
        if name not in ("self", "cls")
    }


def is_same(theirs: object, ours: object) -> bool:
    if shown(theirs) == shown(ours):
        return True
    # A member of an IntEnum equals its number, so compare the values, too.
    return isinstance(theirs, int | float | str) and isinstance(ours, int | float | str) and theirs == ours


def shown(default: object) -> str:
    """Return a default value as a string that can be compared between the two packages."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if inspect.isroutine(default):
        return "a function" if default.__name__ == "<lambda>" else default.__name__
    text = repr(default)
    return f"<{type(default).__name__}>" if " at 0x" in text else text


def options(module: str) -> Mapping[str, dict[str, object]]:
    """Return the properties of each option, keyed by the option's longest spelling."""
    parser = importlib.import_module(module).get_args_parser()
    found: dict[str, dict[str, object]] = {}
    for action in parser._actions:
        spelled = {name.replace("_", "-") for name in action.option_strings}
        name = max(spelled, key=len) if spelled else action.dest
        found[name] = {
            "spellings": sorted(action.option_strings),
            "takes a value": action.nargs != 0,
            "dest": action.dest,
            "default": shown(action.default),
            "choices": sorted(map(str, action.choices)) if action.choices else None,
        }
    return found


def compare() -> Differences:
    """Compare all names and return their states."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Comparison().run()
