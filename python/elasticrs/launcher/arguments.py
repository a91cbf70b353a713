"""From the command line and ``PET_*`` variables to a :class:`Launch`.

The grammar is argparse's, as far as torchrun's users can tell: ``--name value``, ``--name=value``, ``-r3``,
``-r 3``, unambiguous abbreviations, ``--`` before the script; everything after the script belongs to the
script.
"""

from __future__ import annotations

import os
import sys

from elasticrs import config, devices
from elasticrs.config import JobConfig, LogSettings, UsageError
from elasticrs.launcher.options import NOT_YET, OPTIONS, Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs.rendezvous.elastic.settings import Rendezvous

_BY_NAME = {option.name: option for option in OPTIONS}
_BY_LETTER = {option.short: option for option in OPTIONS if option.short}


class Namespace:
    """The values of all options by their name with underscores, like argparse's."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Namespace({', '.join(f'{k}={v!r}' for k, v in sorted(self.__dict__.items()))})"


class HelpRequested(Exception):  # noqa: N818 -- not an error
    """The user asked for ``--help`` or ``--version``."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Launch:
    """A job that is ready to run, and the command of its workers.

    Args:
        job: what the agent needs.
        logs: where output goes.
        command: program and arguments of a worker.
        notices: lines for the user, such as a default that was chosen.
        variables: what is added to the environment of every worker.
    """

    __slots__ = ("command", "job", "logs", "notices", "variables")

    def __init__(
        self,
        job: JobConfig,
        logs: LogSettings,
        command: list[str],
        notices: list[str],
        variables: dict[str, str],
    ) -> None:
        self.job = job
        self.logs = logs
        self.command = command
        self.notices = notices
        self.variables = variables


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Namespace:
    """Read the command line.

    Args:
        argv: the arguments, without the program.
        environ: for ``PET_*`` defaults; an argument wins over its variable.

    Raises:
        UsageError: one line for the user.
        HelpRequested: ``--help`` or ``--version``.
    """
    values: dict[str, object] = {option.dest: option.default for option in OPTIONS}
    values.update(_defaults(environ))
    script: str | None = None
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument != "--" and argument.startswith("-") and len(argument) > 1:
            values.update(_read(argument, arguments))
            continue
        script = next(arguments, None) if argument == "--" else argument
        rest = list(arguments)
    if isinstance(values["signals_to_handle"], str):
        values["signals_to_handle"] = config.parse_signals(config.DEFAULT_SIGNALS)
    if script is None:
        raise UsageError("no script given: elasticrun [options] script [arguments of the script]")
    return Namespace(**values, training_script=script, training_script_args=rest)


def resolve(args: Namespace, environ: Mapping[str, str]) -> Launch:
    """Turn the options into a job, and check everything that can be checked before something is started.

    Args:
        args: from :func:`parse`.
        environ: the agent's environment.

    Raises:
        UsageError: one line for the user.
    """
    nproc = _nproc(args.nproc_per_node, environ)
    command = _command(args, environ)
    timeout = args.shutdown_timeout
    grace = config.shutdown_timeout_from(environ) if timeout is None else timeout
    notices: list[str] = []
    meeting = _meeting(args, environ, grace, notices)
    job = JobConfig(
        nproc,
        meeting.run_id,
        role=args.role,
        name=args.training_script,
        max_restarts=args.max_restarts,
        shutdown_timeout=grace,
        signals=args.signals_to_handle,
        linger=None if args.keep_descendants else args.linger,
        master_addr=meeting.master_addr,
        master_port=meeting.master_port,
        rendezvous=meeting.rendezvous,
    )
    logs = LogSettings(
        log_dir=args.log_dir,
        redirects=args.redirects,
        tee=args.tee,
        local_ranks_filter=args.local_ranks_filter,
        prefix_template=args.log_line_prefix_template or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        capture_stderr=args.capture_stderr,
    )
    variables = {"TORCHELASTIC_SIGNALS_TO_HANDLE": _names(args.signals_to_handle)}
    if nproc > 1 and "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = "1"
        notices.append(
            "OMP_NUM_THREADS is not set: each of the workers gets 1; set it to what suits your job"
        )
    return Launch(job, logs, command, notices, variables)


def _read(argument: str, arguments: Iterator[str]) -> dict[str, object]:
    if argument.startswith("--"):
        name, equals, text = argument.partition("=")
        option = _find(name)
        if option.is_flag:
            if equals:
                raise UsageError(f"{option.flag}: got {text!r}, expected no value")
            return {option.dest: True}
        return {option.dest: _convert(option, option.flag, text if equals else _value(option, arguments))}
    letter, tail = argument[1], argument[2:]
    if letter == "h":
        raise HelpRequested("help")
    found = _BY_LETTER.get(letter)
    if found is None:
        raise UsageError(f"unknown option -{letter}{_suggestion(argument)}")
    if found.is_flag:
        more = _read("-" + tail, arguments) if tail else {}
        return {found.dest: True, **more}
    text = tail[1:] if tail.startswith("=") else tail
    return {found.dest: _convert(found, "-" + letter, text or _value(found, arguments))}


def _find(typed: str) -> Option:
    name = typed[2:].replace("_", "-")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in ("help", "version"):
        raise HelpRequested(name)
    if name in NOT_YET:
        raise UsageError(f"--{name} is not supported by this release")
    candidates = [option for option in OPTIONS if name and option.name.startswith(name)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UsageError(f"{typed} could be " + " or ".join(option.flag for option in candidates))
    if name and "help".startswith(name):
        raise HelpRequested("help")
    raise UsageError(f"unknown option {typed}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, _BY_NAME, 1)
    return f" (did you mean --{near[0]}?)" if near else "; --help lists them all"


def _value(option: Option, arguments: Iterator[str]) -> str:
    text = next(arguments, None)
    # As in argparse: what looks like an option is none's value, unless it is a negative number or has a
    # space.
    if text is None or (text.startswith("-") and len(text) > 1 and " " not in text and not _is_number(text)):
        raise UsageError(f"{option.flag}: a value is missing")
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _convert(option: Option, name: str, text: str) -> object:
    if option.convert is None:
        raise TypeError(f"{name} is a flag")
    try:
        return option.convert(text)
    except ValueError as error:
        raise UsageError(f"{name}: got {text!r}, expected {error}") from None


def _defaults(environ: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for option in OPTIONS:
        text = environ.get(option.variable) if option.has_variable else None
        if text is None:
            continue
        if option.is_flag:
            if not _is_number(text):
                raise UsageError(f"{option.variable}: got {text!r}, expected 0 or 1")
            found[option.dest] = bool(float(text))
        else:
            found[option.dest] = _convert(option, option.variable, text)
    return found


def _names(signums: Sequence[int]) -> str:
    import signal

    return ",".join(signal.Signals(signum).name for signum in signums)


def _nproc(wanted: int | str, environ: Mapping[str, str]) -> int:
    if isinstance(wanted, int):
        return wanted
    gpus = devices.cuda_device_count(environ) if wanted in ("gpu", "auto") else 0
    if wanted == "gpu" and gpus == 0:
        raise UsageError("--nproc-per-node: got 'gpu', but this machine shows no CUDA device")
    return gpus or devices.cpu_count()


class _Meeting:
    """Where the workers meet, and with which nodes the agent does.

    Args:
        run_id: the name of the job.
        master_addr: where rank 0 hosts the workers' store.
        master_port: its port; ``None`` for a fresh one in every attempt.
        rendezvous: with the other nodes; ``None`` when there are none.
    """

    __slots__ = ("master_addr", "master_port", "rendezvous", "run_id")

    def __init__(
        self, run_id: str, master_addr: str, master_port: int | None, rendezvous: Rendezvous | None = None
    ) -> None:
        self.run_id = run_id
        self.master_addr = master_addr
        self.master_port = master_port
        self.rendezvous = rendezvous


def _meeting(args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str]) -> _Meeting:
    """By torch's rules: a plain launch and ``--standalone`` are one node that meets nobody."""
    low, high = args.nnodes
    endpoint: str = args.rdzv_endpoint.strip()
    alone = args.local_addr or "localhost"
    is_plain = args.rdzv_backend == "static" and high == 1 and not endpoint and args.master_port is None
    if args.standalone:
        if low > 1:
            raise UsageError(f"--standalone is for one node, but --nnodes is {_range(args.nnodes)}")
        # What torch would have replaced is not looked at.
        is_plain, high = True, 1
    if is_plain and not args.rdzv_conf and args.node_rank == 0:
        return _Meeting(config.random_run_id(), alone, None)
    return _described(args, environ, grace, notices, is_plain=is_plain)


def _described(
    args: Namespace, environ: Mapping[str, str], grace: float, notices: list[str], *, is_plain: bool
) -> _Meeting:
    from elasticrs.rendezvous.elastic.describe import STATIC, check_backend, describe
    from elasticrs.rendezvous.endpoint import parse_endpoint

    backend = STATIC if is_plain else check_backend(args.rdzv_backend)
    endpoint: str = args.rdzv_endpoint.strip()
    if backend == STATIC and not endpoint:
        endpoint = _static_endpoint(args)
    barrier = args.exit_barrier_timeout
    rendezvous, more = describe(
        backend,
        endpoint,
        args.rdzv_id,
        (1, 1) if args.standalone else args.nnodes,
        {**args.rdzv_conf, **({} if args.drain is None else {"drain": args.drain})},
        environ,
        node_rank=0 if args.standalone else args.node_rank,
        local_addr=args.local_addr,
        grace=grace,
        exit_barrier_timeout=config.exit_barrier_timeout_from(environ) if barrier is None else barrier,
    )
    notices += more
    if is_plain:
        return _Meeting(config.random_run_id(), args.local_addr or "localhost", None)
    if backend == STATIC:
        host, port = parse_endpoint("--rdzv-endpoint", endpoint)
        if port is None:
            raise UsageError(
                f"--rdzv-endpoint: got {endpoint!r}, expected HOST:PORT with the static rendezvous, "
                "the same on all nodes"
            )
        return _Meeting(args.rdzv_id, host, port or None, rendezvous)
    if args.master_port is not None:
        notices.append("--master-port has no effect here: it is for the static rendezvous")
    # The workers' store has a port of its own; the endpoint is where nodes meet.
    return _Meeting(args.rdzv_id, args.local_addr or "localhost", None, rendezvous)


def _static_endpoint(args: Namespace) -> str:
    host = args.master_addr.strip().strip("[]")
    port = config.DEFAULT_MASTER_PORT if args.master_port is None else args.master_port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _range(nodes: tuple[int, int]) -> str:
    low, high = nodes
    return str(low) if low == high else f"{low}:{high}"


def _command(args: Namespace, environ: Mapping[str, str]) -> list[str]:
    script: str = args.training_script
    if args.no_python:
        if args.module:
            raise UsageError("--no-python and --module exclude each other")
        _check_program(script, "script", environ)
        return [script, *args.training_script_args]
    python = environ.get("PYTHON_EXEC") or sys.executable
    _check_program(python, "PYTHON_EXEC" if environ.get("PYTHON_EXEC") else "the Python interpreter", environ)
    if args.module:
        if not script:
            raise UsageError("-m: got '', expected the name of a module")
        return [python, "-u", "-m", script, *args.training_script_args]
    if not os.path.exists(script):
        raise UsageError(f"script {script!r} does not exist")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {script!r} cannot be read: permission denied")
    # Python would take it for an option.
    path = os.path.join(os.curdir, script) if script.startswith("-") else script
    return [python, "-u", path, *args.training_script_args]


def _check_program(program: str, what: str, environ: Mapping[str, str]) -> None:
    if os.sep in program:
        if not os.path.exists(program):
            raise UsageError(f"{what} {program!r} does not exist")
        if os.path.isdir(program) or not os.access(program, os.X_OK):
            raise UsageError(f"{what} {program!r} is not executable")
        return
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return
    raise UsageError(f"{what} {program!r} was not found in PATH")
