"""Converts the options into a :class:`.JobSpec`: reads the environment, checks values, chooses the
rendezvous.

Everything that can be checked is checked before a process is started. If a setting has no effect, a line
tells the user so, and the job runs.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import elasticrs
from elasticrs._engine import public
from elasticrs._engine.job import config
from elasticrs._engine.job.config import (
    NVML,
    HealthSource,
    JobSpec,
    LogSettings,
    Preload,
    UsageError,
)
from elasticrs._engine.job.options import OPTIONS, Namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any, TypeVar

    from elasticrs._engine.nodes.protocol.rendezvous import Command, Rendezvous

    T = TypeVar("T")

_MAX_WORKERS_PER_CPU = 32
"""Number of workers per CPU above which the launcher warns of a likely mistake."""
_SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
"""Environment variables of schedulers. They are defined here to avoid importing :mod:`.schedulers`."""
_REMOVED_VARIABLES = {
    "ELASTICRS_KUBEFLOW_PROGRESS": "let the script report its progress to Kubeflow; /status shows the"
    " training step (--health-check-port)",
    "ELASTICRS_TIMELINE": "the event 'attempt running' has the times of a restart"
    " (--event-log-handler file:PATH)",
}
"""Environment variables that only earlier versions of elasticrs read, each with advice on its replacement."""


def resolve(args: Namespace, environ: Mapping[str, str]) -> JobSpec:
    for name, instead in _REMOVED_VARIABLES.items():
        if environ.get(name, "") not in ("", "0"):
            raise UsageError(f"{name} is set, but this variable is gone: {instead}")
    notices: list[str] = []
    command = _command(args, environ)
    if not args.no_scheduler and any(map(environ.get, _SCHEDULERS)):
        from elasticrs._engine.cli.schedulers import with_scheduler

        args = with_scheduler(args, environ, notices)
    nproc = _nproc(args.nproc_per_node, environ, notices)
    timeout = args.shutdown_timeout
    grace = config.shutdown_timeout_from(environ) if timeout is None else timeout
    meeting = meeting_of(args, environ, grace, notices)
    rendezvous = meeting.get("rendezvous")
    if args.on_failure == "replace":
        _check_replace(args, meeting)
    if rendezvous is not None:
        meeting["rendezvous"] = rendezvous.replaced(command=_compared(args, command))
    template = args.log_line_prefix_template or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    for text in args.node_check or ():
        _check_source(HealthSource.parse(text), environ)
    if args.virtual_local_rank:
        from elasticrs._engine.workers.plan import virtual_local_rank

        _accepted("--virtual-local-rank:", virtual_local_rank, nproc - 1, environ)
    if args.hang_startup_timeout is not None and args.hang_timeout is None:
        raise UsageError("--hang-startup-timeout needs --hang-timeout: SECONDS or auto")
    if args.hang_exit_timeout != config.WorkerSettings.hang_exit_timeout and args.hang_timeout is None:
        raise UsageError("--hang-exit-timeout needs --hang-timeout: SECONDS or auto")
    has_handler = "make_handler" in meeting
    is_alone = not has_handler and rendezvous is None
    notices += _settings_without_effect(args, environ, nproc, has_handler=has_handler, is_alone=is_alone)
    cpus = len(os.sched_getaffinity(0))
    if nproc > _MAX_WORKERS_PER_CPU * cpus:
        notices.append(f"--nproc-per-node is {nproc}, but this node has only {cpus} CPUs to run workers on")
    if nproc > 1 and not args.no_python and not args.module and _is_from_stdin(args):
        notices.append(
            f"only one of the {nproc} workers can read the program from standard input; the others run "
            "nothing: write the program to a file"
        )
    variables = {"TORCHELASTIC_SIGNALS_TO_HANDLE": _names(args.signals_to_handle)}
    if nproc > 1 and "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = "1"
        notices.append("OMP_NUM_THREADS is not set: each worker gets 1 thread; set it to what your job needs")
    metrics = os.path.join(os.path.dirname(elasticrs.__file__), "metrics", "static_init.py")
    health_check_port = _health_port(args, environ, notices)
    return JobSpec.taken_from(
        args,
        **{"rdzv_backend": "c10d" if rendezvous is None else rendezvous.backend, **meeting},
        nproc=nproc,
        command=command,
        variables=variables,
        notices=notices,
        name=args.training_script,
        shutdown_timeout=grace,
        signals=args.signals_to_handle,
        forwarded=_forwarded(args),
        uninterruptible_state_timeout=config.uninterruptible_state_timeout_from(environ),
        stop_scope=args.stop_scope or ("group" if args.no_python else "worker"),
        linger=None if args.keep_descendants else args.linger,
        cpus=_cpus(args.numa_binding, nproc, environ),
        preload=_preload(args, command),
        # Command-line jobs record metrics only if `static_init.py` exists; see `elasticrs.metrics`.
        has_metrics=os.path.exists(metrics),
        health_check_port=health_check_port,
        logs=LogSettings.taken_from(args, log_line_prefix_template=template),
    )


def meeting_of(
    args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]
) -> dict[str, Any]:
    """Return the fields of :class:`.JobSpec` for the rendezvous. As in torch, the options choose its kind::

    --standalone, or one node without an endpoint and a port    there is no rendezvous
    static                                                      the user assigns the ranks of the nodes
    c10d, elasticrs, etcd                                       the rendezvous assigns the ranks
    any other back end, or c10d in a file                       a rendezvous handler assigns the ranks
    """
    found: dict[str, Any] = {"run_id": args.rdzv_id, "master_addr": args.local_addr or "localhost"}
    if _is_alone(args):
        if args.rdzv_conf or args.node_rank != 0:
            # There is no rendezvous. As in torch, check its settings, but not the back end and the endpoint.
            _describe("static", args, environ, grace, notices)
        return {**found, "run_id": config.random_run_id()}
    from elasticrs._engine.nodes.describe import BACKENDS, C10D, STATIC, is_in_file
    from elasticrs._engine.nodes.transport.addresses import parse_endpoint

    is_file = args.rdzv_backend == C10D and is_in_file(args.rdzv_conf)
    kind = None if is_file else BACKENDS.get(args.rdzv_backend)
    if kind is None:
        return {**found, **_by_handler(args, environ, notices)}
    found["rendezvous"] = _describe(args.rdzv_backend, args, environ, grace, notices)
    if kind == STATIC:
        endpoint = _static_endpoint(args)
        host, port = parse_endpoint("--rdzv-endpoint", endpoint)
        if port is None:
            raise UsageError(
                f"--rdzv-endpoint: got {endpoint!r}, expected HOST:PORT with the static rendezvous, "
                "the same on all nodes"
            )
        return {**found, "master_addr": host, "master_port": port or None}
    if args.master_port is not None:
        # The rendezvous of the nodes uses the endpoint's port, and the store of the workers gets a new port
        # in each attempt, so neither uses --master-port.
        notices.append("--master-port has no effect: only the static rendezvous uses it")
    return found


def _is_alone(args: Namespace) -> bool:
    low, high = args.nnodes
    if args.standalone and low > 1:
        nodes = str(low) if low == high else f"{low}:{high}"
        raise UsageError(f"--standalone is for one node, but --nnodes is {nodes}")
    is_plain = args.rdzv_backend == "static" and high == 1 and args.master_port is None
    return bool(args.standalone) or (is_plain and not args.rdzv_endpoint.strip())


def _by_handler(args: Namespace, environ: Mapping[str, str], notices: list[str]) -> dict[str, Any]:
    from elasticrs._engine.nodes.describe import COMMAND_LINE
    from elasticrs._engine.nodes.transport.settings import exit_barrier_timeout_of

    # Programs and packages can register their own rendezvous back ends in this registry.
    public("rendezvous.registry.find_backend")(args.rdzv_backend, COMMAND_LINE)
    for option, is_given in (
        ("--master-port", args.master_port is not None),
        ("--node-rank", args.node_rank != 0),
        ("--drain", args.drain is not None),
    ):
        if is_given:
            notices.append(f"{option} has no effect: this rendezvous backend does not support it")
    barrier = args.exit_barrier_timeout
    if barrier is None:
        barrier = exit_barrier_timeout_of(args.rdzv_conf, environ, "--rdzv-conf")
    make_handler = partial(
        public("rendezvous.registry.handler_of_command_line"),
        *(args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id, args.nnodes, args.local_addr, args.rdzv_conf),
    )
    return {
        "make_handler": make_handler,
        "rdzv_backend": args.rdzv_backend,
        "exit_barrier_timeout": barrier,
    }


def _describe(
    backend: str, args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]
) -> Rendezvous | None:
    from elasticrs._engine.nodes.describe import describe

    rendezvous, more = describe(
        backend,
        _static_endpoint(args) if backend == "static" else args.rdzv_endpoint.strip(),
        args.rdzv_id,
        (1, 1) if args.standalone else args.nnodes,
        {**args.rdzv_conf, **({} if args.drain is None else {"drain": args.drain})},
        environ,
        node_rank=0 if args.standalone else args.node_rank,
        local_addr=args.local_addr,
        grace=grace,
        exit_barrier_timeout=args.exit_barrier_timeout,
    )
    notices += more
    return rendezvous


def _static_endpoint(args: Namespace) -> str:
    from elasticrs._engine.nodes.transport.addresses import shown_endpoint

    if endpoint := args.rdzv_endpoint.strip():
        return str(endpoint)
    host = args.master_addr.strip().strip("[]")
    port = config.DEFAULT_MASTER_PORT if args.master_port is None else args.master_port
    return shown_endpoint(host, port)


def check_limits(job: JobSpec) -> None:
    from elasticrs._engine.workers import process
    from elasticrs._engine.workers.logs import followed_files

    nproc, files = job.nproc, followed_files(job.logs, job.nproc)
    refused = f"--nproc-per-node: got {nproc}:"
    _accepted(refused, process.check_limits, nproc, job.hang_timeout, os.environ, files)


def _accepted(refused: str, function: Callable[..., T], *values: object) -> T:
    """Call a function. Turn ``ValueError`` and ``OSError`` into usage errors that begin with ``refused``."""
    try:
        return function(*values)
    except (ValueError, OSError) as error:
        raise UsageError(f"{refused} {error}") from None


def _health_port(args: Namespace, environ: Mapping[str, str], notices: list[str]) -> int | None:
    port: int | None = args.health_check_port
    text = environ.get("TORCHELASTIC_HEALTH_CHECK_PORT")
    if port is not None or text is None:
        return port
    try:
        return config.health_port(text)
    except ValueError as error:
        # As in torch, an invalid port only disables the health check server.
        notices.append(
            f"no health check server: TORCHELASTIC_HEALTH_CHECK_PORT: got {text!r}, expected {error}"
        )
        return None


def _names(signums: Sequence[int]) -> str:
    import signal

    return ",".join(signal.Signals(signum).name for signum in signums)


def _forwarded(args: Namespace) -> tuple[int, ...]:
    refused = f"--signals-to-forward: got {_names(args.signals_to_forward or ())!r}, expected"
    return _accepted(refused, config.forwarded_signals, args.signals_to_forward, args.signals_to_handle)


def _nproc(wanted: int | str, environ: Mapping[str, str], notices: list[str]) -> int:
    if isinstance(wanted, int):
        return wanted
    from elasticrs._engine.gpus import devices

    name = "PET_NPROC_PER_NODE" if environ.get("PET_NPROC_PER_NODE") == wanted else "--nproc-per-node"
    try:
        count = devices.worker_count(wanted, environ)
    except devices.UnknownDeviceError:
        raise UsageError(
            f"{name}: got {wanted!r}, expected a whole number from 1, cpu, gpu, xpu or auto"
        ) from None
    except devices.CountError as error:
        raise UsageError(f"{name}: got {wanted!r}, but {error}") from None
    notices.append(f"--nproc-per-node {wanted} is {count.number} ({count.kind}, according to {count.source})")
    return count.number


def _cpus(mode: str | None, nproc: int, environ: Mapping[str, str]) -> list[list[int]] | None:
    if mode is None:
        return None
    from elasticrs._engine.gpus.numa import cpus_by_local_rank

    return _accepted(f"--numa-binding: got {mode!r}, but", cpus_by_local_rank, mode, nproc, environ)


def _check_replace(args: Namespace, meeting: Mapping[str, Any]) -> None:
    where, back_end = "--on-failure: got 'replace', but", None
    if args.no_python:
        raise UsageError(f"{where} with --no-python, single workers cannot be replaced")
    has_handler, rendezvous = "make_handler" in meeting, meeting.get("rendezvous")
    if has_handler or (rendezvous is not None and rendezvous.is_static):
        # Replacing a single worker needs a rendezvous of the workers in the store of the nodes' rendezvous.
        # These back ends have no such store.
        is_file = has_handler and args.rdzv_backend == "c10d"
        back_end = f"--rdzv-backend {args.rdzv_backend}{' in a file' if is_file else ''}"
    method = args.start_method if args.run_path else "spawn"
    if why := config.why_not_replaceable(method, back_end):
        raise UsageError(f"{where} {why}")


def _preload(args: Namespace, command: list[str]) -> Preload | None:
    if args.warm == "off":
        return None
    from elasticrs._engine.workers.warm import modules as warm

    if args.no_python:
        entry = warm.Entry(command[0], why_cold="with --no-python, the workers are not Python programs")
    elif args.run_path:
        entry = warm.entry_of_script(command[0], start_method=args.start_method)
    else:
        entry = warm.entry_of_command(command)
    return _accepted(f"--warm: got {args.warm!r}, but", warm.preload, args.warm, entry)


def _command(args: Namespace, environ: Mapping[str, str]) -> list[str]:
    script: str = args.training_script
    if args.run_path:
        _check_script(script)
        return [script, *args.training_script_args]
    if args.no_python:
        if args.module:
            raise UsageError("--no-python and --module cannot be combined")
        _check_program(script, "script", environ)
        return [script, *args.training_script_args]
    python = environ.get("PYTHON_EXEC") or sys.executable
    _check_program(python, "PYTHON_EXEC" if environ.get("PYTHON_EXEC") else "the Python interpreter", environ)
    if args.module:
        if not script:
            raise UsageError("-m: got '', expected the name of a module")
        if python == sys.executable and (why := _why_no_module(script)):
            raise UsageError(f"-m: got {script!r}, but {why}")
        return [python, "-u", "-m", script, *args.training_script_args]
    if script.startswith("-") and not os.path.exists(script):
        return [python, "-u", *_python_words(args, python)]
    _check_script(script)
    # Prepend `./`, because Python would treat a name that starts with `-` as an option.
    path = os.path.join(os.curdir, script) if script.startswith("-") else script
    return [python, "-u", path, *args.training_script_args]


def _is_from_stdin(args: Namespace) -> bool:
    from elasticrs._engine.workers.process import parse_python

    script = args.training_script
    if script == "/dev/stdin":
        return True
    has_options = script.startswith("-") and not os.path.exists(script)
    return has_options and parse_python([script, *args.training_script_args]).kind == "stdin"


def _python_words(args: Namespace, python: str) -> list[str]:
    """Return the words after ``--`` as Python's arguments, such as ``-X faulthandler train.py``."""
    from elasticrs._engine.workers.process import parse_python

    words = [args.training_script, *args.training_script_args]
    found = parse_python(words)
    if found.unknown is not None:
        raise UsageError(
            f"script {args.training_script!r} does not exist, and Python has no option {found.unknown}"
        )
    if found.program is None:
        missing = {"c": "code is missing after -c", "m": "the name of a module is missing after -m"}
        raise UsageError(
            f"{' '.join(words)}: {missing.get(found.kind, 'no script follows the options of Python')}"
        )
    if found.kind == "script":
        _check_script(found.program)
    elif found.kind == "m" and python == sys.executable and (why := _why_no_module(found.program)):
        raise UsageError(f"-m: got {found.program!r}, but {why}")
    return words


def _compared(args: Namespace, command: list[str]) -> Command:
    from elasticrs._engine.nodes.protocol import rendezvous

    program, *arguments = command
    if args.run_path:
        return rendezvous.command_of_file(program, arguments)
    if args.no_python:
        return rendezvous.command_of_program(program, arguments)
    return rendezvous.command_of_python(arguments)


def _check_source(source: HealthSource, environ: Mapping[str, str]) -> None:
    if source.words:
        try:
            _check_program(source.words[0], "--node-check: program", environ)
        except UsageError as error:
            import difflib

            word = source.words[0].partition(":")[0].lower()
            hint = f" (did you mean {NVML}?)" if difflib.get_close_matches(word, (NVML,), 1, 0.5) else ""
            raise UsageError(f"{error}{hint}") from None


def _check_script(script: str) -> None:
    if not os.path.exists(script):
        raise UsageError(f"script {script!r} does not exist{_hint_for_missing_script(script)}")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"script {script!r} is a folder without a __main__.py")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {script!r} cannot be read: permission denied")


def _check_interpreter(program: str, what: str) -> None:
    with open(program, "rb") as file:
        line = file.read(256).partition(b"\n")[0]
    words = line[2:].split()
    if line.startswith(b"#!") and line.endswith(b"\r") and words and not os.path.exists(words[0] + b"\r"):
        raise UsageError(
            f"the first line of {what} {program!r}, {os.fsdecode(line.strip())}, ends with CR LF, so the "
            "kernel looks for another interpreter; convert the script, for example with dos2unix"
        )


def _check_program(program: str, what: str, environ: Mapping[str, str]) -> None:
    if os.sep in program:
        if not os.path.exists(program):
            raise UsageError(f"{what} {program!r} does not exist")
        if os.path.isdir(program) or not os.access(program, os.X_OK):
            raise UsageError(f"{what} {program!r} is not executable")
        _check_interpreter(program, what)
        return
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return
    raise UsageError(f"{what} {program!r} was not found in PATH")


_LAUNCHER_OPTIONS = frozenset((
    *("nproc-per-node", "nnodes", "standalone", "max-restarts", "on-failure", "hang-timeout", "no-python"),
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-ranks-filter", "shutdown-timeout"),
))  # fmt: skip
"""Launcher options that a script is unlikely to define itself, unlike options such as ``--log-dir``."""


def _settings_without_effect(
    args: Namespace,
    environ: Mapping[str, str],
    nproc: int,
    *,
    has_handler: bool = False,
    is_alone: bool = False,
) -> Iterator[str]:
    yield from _options_of_the_script(args.training_script, args.training_script_args)
    yield from _unknown_variables(environ)
    yield from _replaced_by_standalone(args)
    if is_alone and args.on_failure == "replace" and args.restart_delay != "0":
        yield (
            "--restart-delay has no effect with --on-failure replace on one node: a failed worker "
            "is replaced at once"
        )
    if args.max_excluded_nodes != config.WorkerSettings.max_excluded_nodes:
        if args.on_failure == "replace":
            yield (
                "--max-excluded-nodes has no effect with --on-failure replace: an unfit node leaves once its "
                "workers have exited"
            )
        elif has_handler:
            yield (
                f"--max-excluded-nodes has no effect with --rdzv-backend {args.rdzv_backend}: an unfit node "
                "ends the job"
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
        if flag.startswith("--") and flag[2:].replace("_", "-") in _LAUNCHER_OPTIONS:
            yield f"{flag} has no effect, because it is passed to {script}; put it before {script}"


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    names = sorted(name for name in environ if name.startswith("PET_"))
    known = {option.variable: option for option in OPTIONS} if names else {}
    for name in names:
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
    unknown = ", ".join(f"${{{name}}}" for name in names if name not in config.PREFIX_NAMES)
    if unknown:
        known = ", ".join(f"${{{name}}}" for name in config.PREFIX_NAMES)
        yield f"--log-line-prefix-template: {unknown} is not replaced; the known names are {known}"


def _hint_for_missing_script(script: str) -> str:
    if script[:1] in {"\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2212"}:
        plain = script.lstrip("\u2010\u2011\u2012\u2013\u2014\u2212-")
        return f"; it starts with a typographic dash instead of '-': type --{plain}"
    first = script.split(" ", maxsplit=1)[0]
    if " " in script and os.path.isfile(first):
        return f"; pass the script and its arguments as separate words, without quotes around {script}"
    return ""


def _why_no_module(name: str) -> str | None:
    """Return why ``python -m NAME`` cannot run; ``None`` if it can or if that is unknown."""
    try:
        return _why_not(name)
    except Exception:
        # The search failed, for example in an import hook. Python itself reports a missing module later.
        return None


def _why_not(name: str) -> str | None:
    # With `-m`, Python puts the working directory first on `sys.path`.
    places: Sequence[str] | None = ["", *sys.path]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        part = ".".join(parts[:depth])
        found = _spec_of(part, places)
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
    if places is not None and _spec_of(f"{name}.__main__", places) is None:
        return f"{name!r} is a package without a __main__ module"
    return None


def _changes_its_path(package: ModuleSpec) -> bool:
    if not package.has_location or package.origin is None:
        return False
    with open(package.origin, "rb") as file:
        return b"__path__" in file.read()


def _spec_of(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
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
