"""Find settings that have no effect (only a warning), and detect that the module of ``-m`` is missing."""

from __future__ import annotations

import os
import sys

from elasticrs._engine.job.config import PREFIX_NAMES, JobSpec
from elasticrs._engine.job.options import OPTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec

    from elasticrs._engine.job.options import Namespace

_HARDLY_OF_A_SCRIPT = frozenset((
    *("nproc-per-node", "nnodes", "standalone", "max-restarts", "on-failure", "hang-timeout", "no-python"),
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-ranks-filter", "shutdown-timeout"),
))  # fmt: skip
"""Launcher options that a script is unlikely to define itself, unlike options such as ``--log-dir``."""


def settings_without_effect(
    args: Namespace,
    environ: Mapping[str, str],
    nproc: int,
    *,
    is_polled: bool = False,
    is_alone: bool = False,
) -> Iterator[str]:
    yield from _options_of_the_script(args.training_script, args.training_script_args)
    yield from _unknown_variables(environ)
    yield from _replaced_by_standalone(args)
    if is_polled:
        yield from _without_policy(args)
    if is_alone and args.on_failure == "replace" and args.restart_delay != "0":
        yield (
            "--restart-delay has no effect with --on-failure replace on one node: a failed worker "
            "is replaced at once"
        )
    if args.on_failure == "replace" and args.max_excluded_nodes != JobSpec.defaults()["max_excluded_nodes"]:
        yield (
            "--max-excluded-nodes has no effect with --on-failure replace: an unfit node leaves once its "
            "workers have exited"
        )
    yield from _filters(args)
    yield from _local_ranks(args.local_ranks_filter, nproc)
    template = args.log_line_prefix_template or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or ""
    yield from _unknown_names(template)


def _options_of_the_script(script: str, arguments: list[str]) -> Iterator[str]:
    for argument in arguments:
        if argument == "--":
            return
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag[2:].replace("_", "-") in _HARDLY_OF_A_SCRIPT:
            yield f"{flag} has no effect, because it is passed to {script}; put it before {script}"


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = {option.variable: option for option in OPTIONS}
    for name in sorted(name for name in environ if name.startswith("PET_")):
        option = known.get(name)
        if option is None:
            import difflib

            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{name} has no effect: there is no such option{hint}"
        elif not option.has_variable:
            yield f"{name} has no effect: as with torchrun, {option.flag} is read from the command line only"


def _replaced_by_standalone(args: Namespace) -> Iterator[str]:
    given = {
        "--rdzv-endpoint": bool(args.rdzv_endpoint.strip()),
        "--rdzv-id": args.rdzv_id != "none",
        "--master-port": args.master_port is not None,
    }
    for flag in (flag for flag, is_given in given.items() if is_given and args.standalone):
        yield f"{flag} has no effect with --standalone: one node, a free port and a random id"


def _without_policy(args: Namespace) -> Iterator[str]:
    """Yield a warning for each failure-handling option that torch's polling loop ignores."""
    unset = JobSpec.defaults()
    for flag in (
        *("--restart-delay", "--max-same-failures", "--fatal-exit-codes", "--exit-codes", "--report"),
        *("--node-check", "--node-check-timeout", "--max-excluded-nodes"),
    ):
        name = flag[2:].replace("-", "_")
        if getattr(args, name) != unset[name]:
            yield f"{flag} has no effect, because the rendezvous handler is polled (--rdzv-backend)"
    if getattr(args.max_restarts, "window", None) is not None:
        yield (
            f"--max-restarts: {int(args.max_restarts)} restarts are allowed for the whole job, because the "
            "rendezvous handler is polled (--rdzv-backend)"
        )


def _filters(args: Namespace) -> Iterator[str]:
    for name, stream in (("stdout", 1), ("stderr", 2)):
        tee = (
            args.tee if isinstance(args.tee, int) else max(args.tee.values(), key=lambda bits: bits & stream)
        )
        if stream == 2 and args.capture_stderr:
            continue
        if getattr(args, f"duplicate_{name}_filters") and not tee & stream:
            yield f"--duplicate-{name}-filters has no effect: it needs --tee for {name}"


def _local_ranks(chosen: frozenset[int] | None, nproc: int) -> Iterator[str]:
    missing = sorted(rank for rank in chosen or () if rank >= nproc)
    if missing:
        names = ",".join(map(str, missing))
        shown = "" if len(missing) < len(chosen or ()) else ", so the console shows no worker"
        exist = f"0 to {nproc - 1} exist"
        yield f"--local-ranks-filter: no worker of this node has local rank {names} ({exist}){shown}"


def _unknown_names(template: str) -> Iterator[str]:
    names = [part.partition("}")[0] for part in template.split("${")[1:] if "}" in part]
    unknown = ", ".join(f"${{{name}}}" for name in names if name not in PREFIX_NAMES)
    if unknown:
        known = ", ".join(f"${{{name}}}" for name in PREFIX_NAMES)
        yield f"--log-line-prefix-template: {unknown} is not replaced; the known names are {known}"


def hint_for_missing_script(script: str) -> str:
    if script[:1] in {"\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2212"}:
        plain = script.lstrip("\u2010\u2011\u2012\u2013\u2014\u2212-")
        return f"; it starts with a typographic dash instead of '-': type --{plain}"
    first = script.split(" ", maxsplit=1)[0]
    if " " in script and os.path.isfile(first):
        return f"; pass the script and its arguments as separate words, without quotes around {script}"
    return ""


def why_no_module(name: str) -> str | None:
    """Return why ``python -m NAME`` cannot run; ``None`` if it can or if that is unknown."""
    try:
        return _why_not(name)
    except Exception:
        # The check itself failed, for example in an import hook. Python reports a missing module when it
        # runs.
        return None


def _why_not(name: str) -> str | None:
    # With `-m`, Python puts the working directory first on `sys.path`.
    places: Sequence[str] | None = ["", *sys.path]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        part = ".".join(parts[:depth])
        found = _find(part, places)
        if found is None:
            return f"there is no module {part!r}{_hint(name)}"
        places = found.submodule_search_locations
        if depth == len(parts):
            break
        if places is None:
            # Accept names such as `os.path`, because a plain module may register submodules on import.
            return f"{part!r} is a file, not a package{_hint(name)}" if name.endswith(".py") else None
        if _changes_its_path(found):
            return None
    if places is not None and _find(f"{name}.__main__", places) is None:
        return f"{name!r} is a package without a __main__ module"
    return None


def _changes_its_path(package: ModuleSpec) -> bool:
    if not package.has_location or package.origin is None:
        return False
    with open(package.origin, "rb") as file:
        return b"__path__" in file.read()


def _find(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        # Pass a top-level module's path only to `PathFinder`; other finders expect `None`.
        is_of_files = getattr(finder, "__name__", "") == "PathFinder"
        path = places if is_of_files or "." in name else None
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _hint(name: str) -> str:
    if name.endswith(".py") and os.path.isfile(name):
        return f"; to run the file {name}, leave out -m"
    return "; is it installed in this environment, or is another directory meant?"
