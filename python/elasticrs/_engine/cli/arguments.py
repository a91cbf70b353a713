"""Parse the command line and the ``PET_*`` environment variables into a :class:`.JobSpec`.

Words are parsed as argparse would parse them, as far as users of torchrun can notice a difference. All words
after the script's name are arguments of the script.
"""

from __future__ import annotations

import os
import sys

import elasticrs
from elasticrs._engine import public
from elasticrs._engine.cli.checks import hint_for_missing_script, settings_without_effect, why_no_module
from elasticrs._engine.job import config
from elasticrs._engine.job.config import JobSpec, LogSettings, Preload, UsageError
from elasticrs._engine.job.options import NEWER, OPTIONS, OURS, Namespace, Option
from elasticrs._engine.job.policy_options import HealthSource, similar_source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs._engine.nodes.protocol.rendezvous import Command, Rendezvous
    from elasticrs._engine.workers.warm.modules import Entry

_BY_NAME = {option.name: option for option in OPTIONS}
_ALL = "; --help all lists the options"
_ALIKE = 4
"""Minimum length of the prefix that an unknown option and the suggested option share."""
_MANY = 32
"""Number of workers per CPU above which the launcher warns of a likely mistake."""
_SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
"""Environment variables by which a scheduler is recognized. They are defined here, because a launch without a
scheduler should not import :mod:`.schedulers`.
"""
_REPEATED = frozenset(option.dest for option in OPTIONS if option.repeats)
_BY_LETTER = {option.short: option for option in OPTIONS if option.short}


class TextRequested(Exception):  # noqa: N818 -- not an error
    """Raised for an option such as ``--help``, which only prints text. ``words`` are the option's values."""

    def __init__(self, what: str, *words: str) -> None:
        super().__init__(what)
        self.what = what
        self.words = words


_GONE = {
    "ELASTICRS_KUBEFLOW_PROGRESS": "let the script report its progress to Kubeflow; /status shows the"
    " training step (--health-check-port)",
    "ELASTICRS_TIMELINE": "the event 'attempt running' has the times of a restart"
    " (--event-log-handler file:PATH)",
}
"""Environment variables that only earlier versions of elasticrs read, each with advice on its replacement."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Namespace:
    """Parse the command line; it overrides ``PET_*`` variables. Raise ``UsageError`` or ``TextRequested``."""
    values: dict[str, object] = {}
    script: str | None = None
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument != "--" and argument.startswith("-") and len(argument) > 1:
            for name, value in _read(argument, arguments).items():
                earlier = values.get(name) if name in _REPEATED else None
                values[name] = earlier + value if isinstance(earlier, tuple) else value  # type: ignore[operator]
            continue
        script = next(arguments, None) if argument == "--" else argument
        rest = list(arguments)
    given = frozenset(values)
    values = {**_defaults(environ, values), **values}
    if isinstance(values["signals_to_handle"], str):
        values["signals_to_handle"] = config.parse_signals(config.DEFAULT_SIGNALS)
    if script is None:
        raise UsageError("no script given: elasticrun [options] script [arguments of the script]")
    return Namespace(**values, given=given, training_script=script, training_script_args=rest)


def resolve(args: Namespace, environ: Mapping[str, str]) -> JobSpec:
    """Convert the options into a job. Check everything that can be checked before a process is started."""
    for name, instead in _GONE.items():
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
        _check_devices(nproc, environ)
    if args.hang_startup_timeout is not None and args.hang_timeout is None:
        raise UsageError("--hang-startup-timeout needs --hang-timeout: SECONDS or auto")
    if args.hang_exit_timeout != config.WorkerSettings.hang_exit_timeout and args.hang_timeout is None:
        raise UsageError("--hang-exit-timeout needs --hang-timeout: SECONDS or auto")
    is_polled = "is_polled" in meeting
    is_alone = not is_polled and rendezvous is None
    notices += settings_without_effect(args, environ, nproc, is_polled=is_polled, is_alone=is_alone)
    cpus = len(os.sched_getaffinity(0))
    if nproc > _MANY * cpus:
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
    host = args.health_check_host or environ.get("ELASTICRS_HEALTH_CHECK_HOST") or config.LOOPBACK
    metrics = os.path.join(os.path.dirname(elasticrs.__file__), "metrics", "static_init.py")
    health_check_port = _health_port(args, environ, notices)
    return JobSpec.taken_from(
        args,
        **{"rdzv_backend": "c10d" if rendezvous is None else rendezvous.backend, **meeting},
        nproc=nproc,
        command=command,
        variables=variables,
        logs=LogSettings.taken_from(args, log_line_prefix_template=template),
        notices=notices,
        name=args.training_script,
        shutdown_timeout=grace,
        signals=args.signals_to_handle,
        forwarded=_forwarded(args),
        stop_scope=args.stop_scope or ("group" if args.no_python else "worker"),
        linger=None if args.keep_descendants else args.linger,
        is_multi_node=rendezvous is not None,
        cpus=_cpus(args.numa_binding, nproc, environ),
        uninterruptible_state_timeout=config.uninterruptible_state_timeout_from(environ),
        preload=_preload(args, command),
        # Command-line jobs record metrics only if `static_init.py` exists; see `elasticrs.metrics`.
        has_metrics=os.path.exists(metrics),
        health_check_port=health_check_port,
        health_check_host=host,
    )


def meeting_of(
    args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]
) -> dict[str, Any]:
    """Choose the rendezvous back end as torch does. Return the fields of :class:`.JobSpec` for it::

    --standalone, or one node without an endpoint and a port    no rendezvous
    static                                                      the user assigns the ranks of the nodes
    c10d, elasticrs, etcd                                       the rendezvous assigns the ranks
    anything else, or c10d in a file                            the agent polls a rendezvous handler
    """
    if is_alone(args):
        return _alone(args, environ, grace, notices)
    from elasticrs._engine.nodes.describe import BACKENDS, C10D, ETCD, STATIC, is_in_file

    makers: dict[str, Callable[[Namespace, Mapping[str, str], float, list[str]], dict[str, Any]]]
    makers = {STATIC: _static, C10D: _elastic, ETCD: _elastic}
    backend = BACKENDS.get(args.rdzv_backend, "")
    if args.rdzv_backend == C10D and is_in_file(args.rdzv_conf):
        backend = ""
    return makers.get(backend, _polled)(args, environ, grace, notices)


def is_alone(args: Any) -> bool:
    low, high = args.nnodes
    if args.standalone and low > 1:
        nodes = str(low) if low == high else f"{low}:{high}"
        raise UsageError(f"--standalone is for one node, but --nnodes is {nodes}")
    is_plain = args.rdzv_backend == "static" and high == 1 and args.master_port is None
    return bool(args.standalone) or (is_plain and not args.rdzv_endpoint.strip())


def _alone(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> dict[str, Any]:
    if args.rdzv_conf or args.node_rank != 0:
        # No rendezvous is used, but check its settings anyway. As in torch, ignore the back end and endpoint.
        _describe("static", args, environ, grace, notices)
    return {
        "run_id": config.random_run_id(),
        "master_addr": args.local_addr or "localhost",
        "master_port": None,
    }


def _static(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> dict[str, Any]:
    from elasticrs._engine.nodes.transport.addresses import parse_endpoint

    rendezvous = _describe("static", args, environ, grace, notices)
    endpoint = _static_endpoint(args)
    host, port = parse_endpoint("--rdzv-endpoint", endpoint)
    if port is None:
        raise UsageError(
            f"--rdzv-endpoint: got {endpoint!r}, expected HOST:PORT with the static rendezvous, "
            "the same on all nodes"
        )
    return {
        "run_id": args.rdzv_id,
        "master_addr": host,
        "master_port": port or None,
        "rendezvous": rendezvous,
    }


def _elastic(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> dict[str, Any]:
    rendezvous = _describe(args.rdzv_backend, args, environ, grace, notices)
    if args.master_port is not None:
        notices.append("--master-port has no effect: only the static rendezvous uses it")
    # The nodes' rendezvous already uses the endpoint's port, so the workers' store gets a new port for every
    # attempt.
    return {
        "run_id": args.rdzv_id,
        "master_addr": args.local_addr or "localhost",
        "master_port": None,
        "rendezvous": rendezvous,
    }


def _polled(args: Namespace, environ: Mapping[str, str], _grace: float, notices: list[str]) -> dict[str, Any]:
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
    return {
        "run_id": args.rdzv_id,
        "master_addr": args.local_addr or "localhost",
        "master_port": None,
        "is_polled": True,
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

    nproc = job.nproc
    try:
        process.check_limits(nproc, job.hang_timeout, os.environ, followed_files(job.logs, nproc))
    except ValueError as error:
        raise UsageError(f"--nproc-per-node: got {nproc}: {error}") from None


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


def _read(argument: str, arguments: Iterator[str]) -> dict[str, object]:
    if argument.startswith("--"):
        name, equals, text = argument.partition("=")
        try:
            option = _find(name)
        except TextRequested as request:
            if request.what == "help":
                raise _help(text if equals else next(arguments, ""), is_exact=bool(equals)) from None
            raise
        if option.is_flag:
            if equals:
                raise UsageError(f"{option.flag}: got {text!r}, expected no value")
            return {option.dest: True}
        value = _convert(option, option.flag, text if equals else _value(option, arguments))
        if option.name in ("print-completion", "check"):
            raise TextRequested(option.name, str(value), *arguments)
        return {option.dest: value}
    letter, tail = argument[1], argument[2:]
    if letter == "h":
        raise _help(tail or next(arguments, ""), is_exact=False)
    found = _BY_LETTER.get(letter)
    if found is None:
        near = _suggestion(argument[1:])
        # The word may combine several short options, so report only its first letter. But report the whole
        # word if it resembles a long option.
        raise UsageError(f"unknown option {argument if near != _ALL else '-' + letter}{near}")
    if found.is_flag:
        more = _read("-" + tail, arguments) if tail else {}
        return {found.dest: True, **more}
    text = tail[1:] if tail.startswith("=") else tail
    return {found.dest: _convert(found, "-" + letter, text or _value(found, arguments))}


def _help(word: str, *, is_exact: bool) -> TextRequested:
    """Return the exception for ``--help=WORD`` (``is_exact``) or ``--help WORD``. The word is a help topic.

    Without ``=``, the word may also be the name of the script.
    """
    from elasticrs._engine.cli.help import TOPICS

    if is_exact and word not in TOPICS:
        raise UsageError(f"--help: got {word!r}, expected " + " or ".join(TOPICS))
    return TextRequested("help", *([word] if word in TOPICS else []))


def _find(typed: str) -> Option:
    name = typed[2:].replace("_", "-")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in ("help", "version"):
        raise TextRequested(name)
    candidates = [option for option in OPTIONS if name and option.name.startswith(name)]
    # Prefer torchrun's options, because every abbreviation that torchrun accepts must also work here.
    torchs = [option for option in candidates if option.group != OURS]
    if not torchs and name and "help".startswith(name):
        raise TextRequested("help")
    candidates = torchs or [option for option in candidates if option.name in NEWER] or candidates
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UsageError(f"{typed} could be " + " or ".join(option.flag for option in candidates))
    raise UsageError(f"unknown option {typed}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    import difflib

    typed = name.partition("=")[0].lower().replace("_", "-")
    near = difflib.get_close_matches(typed, _BY_NAME, 1)
    if not near:
        # Suggest an option with the same start, such as --nproc-per-node for --nprocs.
        near = [known for known in _BY_NAME if known.startswith(typed[: max(_ALIKE, len(typed) - 1)])]
    return f" (did you mean --{near[0]}?)" if near else _ALL


def _value(option: Option, arguments: Iterator[str]) -> str:
    text = next(arguments, None)
    # Like argparse, reject values that look like options. Negative numbers and text with spaces are accepted.
    if text is None or (text.startswith("-") and len(text) > 1 and " " not in text and not _is_number(text)):
        example = f"{option.flag} {option.kind.metavar if option.kind is not None else ''}"
        raise UsageError(f"{option.flag}: a value is missing, as in {example}")
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _convert(option: Option, name: str, text: str) -> object:
    try:
        return option.converted(text)
    except ValueError as error:
        raise UsageError(f"{name}: got {text!r}, expected {error}") from None


def _defaults(environ: Mapping[str, str], given: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for option in OPTIONS:
        found[option.dest] = option.default
        text = environ.get(option.variable) if option.has_variable else None
        if text is None or option.dest in given:
            continue
        if option.is_flag:
            try:
                found[option.dest] = bool(int(text))
            except ValueError:
                raise UsageError(f"{option.variable}: got {text!r}, expected 0 or 1") from None
        else:
            found[option.dest] = _convert(option, option.variable, text)
    return found


def _names(signums: Sequence[int]) -> str:
    import signal

    return ",".join(signal.Signals(signum).name for signum in signums)


def _forwarded(args: Namespace) -> tuple[int, ...]:
    try:
        return config.forwarded_signals(args.signals_to_forward, args.signals_to_handle)
    except ValueError as error:
        got = _names(args.signals_to_forward)
        raise UsageError(f"--signals-to-forward: got {got!r}, expected {error}") from None


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

    try:
        return cpus_by_local_rank(mode, nproc, environ)
    except (ValueError, OSError) as error:
        raise UsageError(f"--numa-binding: got {mode!r}, but {error}") from None


def _check_replace(args: Namespace, meeting: Mapping[str, Any]) -> None:
    where, back_end = "--on-failure: got 'replace', but", None
    if args.no_python:
        raise UsageError(f"{where} with --no-python, single workers cannot be replaced")
    is_polled, rendezvous = "is_polled" in meeting, meeting.get("rendezvous")
    if is_polled or (rendezvous is not None and rendezvous.is_static):
        # Workers can be replaced only if they form a rendezvous of their own in the store that the nodes'
        # rendezvous uses. With these back ends, they cannot.
        is_file = is_polled and args.rdzv_backend == "c10d"
        back_end = f"--rdzv-backend {args.rdzv_backend}{' in a file' if is_file else ''}"
    method = args.start_method if args.run_path else "spawn"
    if why := config.why_not_replaceable(method, back_end):
        raise UsageError(f"{where} {why}")


def _entry(args: Namespace, command: list[str]) -> Entry:
    from elasticrs._engine.workers.warm import modules as warm

    if args.no_python:
        return warm.Entry(command[0], why_cold="with --no-python, the workers are not Python programs")
    if args.run_path:
        return warm.entry_of_script(command[0], start_method=args.start_method)
    return warm.entry_of_command(command)


def _preload(args: Namespace, command: list[str]) -> Preload | None:
    if args.warm == "off":
        return None
    from elasticrs._engine.workers.warm import modules as warm

    entry = _entry(args, command)
    try:
        return warm.preload(args.warm, entry)
    except UsageError as error:
        raise UsageError(f"--warm: got {args.warm!r}, but {error}") from None


def _check_devices(nproc: int, environ: Mapping[str, str]) -> None:
    from elasticrs._engine.workers.plan import virtual_local_rank

    try:
        virtual_local_rank(nproc - 1, environ)
    except ValueError as error:
        raise UsageError(f"--virtual-local-rank: {error}") from None


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
        if python == sys.executable and (why := why_no_module(script)):
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
    elif found.kind == "m" and python == sys.executable and (why := why_no_module(found.program)):
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
    if source.built_in is None:
        try:
            _check_program(source.words[0], "--node-check: program", environ)
        except UsageError as error:
            near = similar_source(source.words[0])
            raise UsageError(f"{error} (did you mean {near}?)" if near else str(error)) from None


def _check_script(script: str) -> None:
    if not os.path.exists(script):
        raise UsageError(f"script {script!r} does not exist{hint_for_missing_script(script)}")
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
