"""``python -m elasticrs.run``, with torch's functions, for programs that extend torchrun.

In a namespace, as in torchrun, options such as ``nnodes`` and ``tee`` are text that is checked when it is
used. Options may be missing, and values may be numbers instead of text.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticrs import lazy
from elasticrs._engine.cli import command_line
from elasticrs._engine.cli.parser import OLD_LAUNCHERS, get_args_parser
from elasticrs._engine.inside.run_path import run_script_path
from elasticrs._engine.job import config as defaults
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, Namespace, converted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
    from elasticrs.launcher.api import LaunchConfig
    from elasticrs.multiprocessing.api import LogsSpecs

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

_HOMES = {
    "elasticrs.multiprocessing.api": ("DefaultLogsSpecs", "LogsSpecs", "Std"),
    "elasticrs.launcher.api": ("LaunchConfig", "elastic_launch"),
    "elasticrs.utils.logging": ("get_logger",),
    "elasticrs.utils.api": ("macros",),
    "elasticrs.multiprocessing.errors": ("record",),
}
"""Names from other modules that programs import from torchrun's module."""

_ANY_PORT = "localhost:0"


def __getattr__(name: str) -> object:
    if name == "metadata":
        # Some programs patch `metadata.entry_points` of torchrun's module to add `--logs-specs` classes.
        return importlib.import_module("importlib.metadata")
    return lazy(__name__, name, _HOMES)


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``args`` (``sys.argv[1:]`` if ``None``). A mistake raises ``SystemExit(2)``, as in argparse."""
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes of ``N`` or ``MIN:MAX``.

    Raises:
        RuntimeError: the text has more than two parts.
        ValueError: a part is not a number.
    """
    _check_parts(nnodes)
    parts = nnodes.split(":")
    return int(parts[0]), int(parts[-1])


def _check_parts(nnodes: str) -> None:
    if nnodes.count(":") > 1:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')


def determine_local_world_size(nproc_per_node: str | int) -> int:
    """Convert a value of ``--nproc-per-node`` to the number of workers on this machine.

    Args:
        nproc_per_node: number, ``cpu``, ``gpu``, ``xpu``, ``auto``, or a device of a torch extension.

    Raises:
        ValueError: this machine has no such device, or the word is unknown.
    """
    from elasticrs._engine.gpus import devices

    with suppress(ValueError):
        return int(nproc_per_node)
    try:
        return devices.worker_count(str(nproc_per_node), os.environ).number
    except devices.UnknownDeviceError:
        raise ValueError(f"Unsupported nproc_per_node value: {nproc_per_node}") from None


def get_rdzv_endpoint(args: Any) -> str:
    """Return the rendezvous endpoint. If ``static`` has none, return the address and port of rank 0."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        port = defaults.DEFAULT_MASTER_PORT if args.master_port is None else args.master_port
        return f"{args.master_addr}:{port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: Any) -> bool:
    """Return true (by default) if workers get their local rank in a variable, not in ``--local-rank``."""
    return bool(getattr(args, OLD_LAUNCHERS, True))


def config_from_args(args: Any) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Return the configuration, the function or program, and its arguments for ``elastic_launch``.

    As in torch, ``OMP_NUM_THREADS`` is set in this process if there are several workers and it is not set.

    Raises:
        RuntimeError: ``nnodes`` has more than two parts.
        ValueError: a value is invalid. The message names the option.
    """
    from elasticrs._engine.gpus.numa import AffinityMode, NumaOptions
    from elasticrs.launcher.api import LaunchConfig
    from elasticrs.multiprocessing.logs_specs import make_logs_specs

    values = _values(args)
    mode = values.numa_binding
    low, high = values.nnodes
    nproc = determine_local_world_size(str(values.nproc_per_node))
    if "OMP_NUM_THREADS" not in os.environ and nproc > 1:
        _say(values, "OMP_NUM_THREADS is not set: each worker gets 1 thread; set it to what your job needs")
        os.environ["OMP_NUM_THREADS"] = "1"
    names = {field.name for field in fields(LaunchConfig)} & {option.dest for option in OPTIONS}
    configuration = LaunchConfig(**{
        **{name: getattr(values, name) for name in names},
        "min_nodes": low,
        "max_nodes": high,
        "nproc_per_node": nproc,
        "logs_specs": make_logs_specs(defaults.LogSettings.taken_from(values), nproc),
        "run_id": values.rdzv_id,
        "rdzv_endpoint": get_rdzv_endpoint(values),
        "rdzv_configs": _rdzv_configs(values),
        "log_line_prefix_template": values.log_line_prefix_template
        or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        "numa_options": mode and NumaOptions(AffinityMode(mode)),
        "duplicate_stdout_filters": list(values.duplicate_stdout_filters) or None,
        "duplicate_stderr_filters": list(values.duplicate_stderr_filters) or None,
    })  # fmt: skip
    return configuration, *_command(values, get_use_env(args))


def run(args: Any) -> None:
    """Run a job until it finishes. The errors are those of :func:`main`, except for ``SystemExit``.

    As in torch, this function changes ``args``. It sets the rendezvous options of ``standalone`` jobs and of
    jobs that use only default options, and it sets a missing ``master_port`` to 29500.
    """
    from elasticrs.launcher.api import elastic_launch

    values = _values(args)
    is_plain = values.rdzv_backend == "static" and not values.rdzv_endpoint and values.master_port is None
    if values.standalone or (is_plain and values.nnodes[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", _ANY_PORT
        args.rdzv_id = defaults.random_run_id()
    if values.master_port is None:
        args.master_port = defaults.DEFAULT_MASTER_PORT
    if values.keep_descendants or values.linger != defaults.DEFAULT_LINGER:
        _say(
            values, "--linger and --keep-descendants are for the command line alone, and have no effect here"
        )
    configuration, command, arguments = config_from_args(args)
    elastic_launch(configuration, command, _health_check_server(values))(*arguments)


def main(args: Sequence[str] | None = None) -> None:
    """Launch a job and wait until it finishes; see :func:`elasticrs.launch.main`."""
    if args is not None:
        from elasticrs.multiprocessing.errors import record

        record(run)(parse_args(args))
    elif code := command_line.main():
        sys.exit(code)


def _values(args: Any) -> Namespace:
    found: dict[str, object] = {}
    for option in OPTIONS:
        value = getattr(args, option.dest, None)
        if value is None:
            value = option.default_as_typed
        if option.dest == "nnodes":
            _check_parts(str(value))
        if option.kind is not None and (isinstance(value, str) or option.typed is not None):
            value = converted(option.kind, option.flag, str(value))
        found[option.dest] = value
    # The launcher's API expects names instead of numbers.
    found["signals_to_handle"] = getattr(args, "signals_to_handle", None) or defaults.DEFAULT_SIGNALS
    found["signals_to_forward"] = getattr(args, "signals_to_forward", None)
    script = getattr(args, "training_script", "")
    arguments = list(getattr(args, "training_script_args", None) or ())
    return Namespace(**found, training_script=script, training_script_args=arguments)


def _health_check_server(values: Namespace) -> HealthCheckServer | None:
    if values.health_check_port is None:
        # The agent opens this server itself if `TORCHELASTIC_HEALTH_CHECK_PORT` is set.
        return None
    from elasticrs._engine.supervise.observe import open_server

    return open_server(defaults.JobSpec.taken_from(values, nproc=1, run_id=""), partial(_say, values))


def _rdzv_configs(values: Namespace) -> dict[str, Any]:
    configs: dict[str, Any] = dict(values.rdzv_conf)
    if values.rdzv_backend == "static":
        configs["rank"] = values.node_rank
    elif values.node_rank != 0:
        # Torch ignores node ranks for this back end.
        configs.setdefault("order_hint", values.node_rank)
    if values.drain is not None:
        configs["drain"] = values.drain
    return configs


def _get_logs_specs_class(logs_specs_name: str | None) -> type[LogsSpecs]:
    from elasticrs.multiprocessing import logs_specs

    chosen: type[LogsSpecs] = logs_specs.specs_class(logs_specs_name or "default")
    return chosen


def _command(values: Namespace, use_env: bool) -> tuple[Callable[..., Any] | str, list[str]]:
    local_rank = [] if use_env else ["--local-rank=${local_rank}"]
    rest = [*local_rank, *values.training_script_args]
    if values.run_path:
        return run_script_path, [values.training_script, *rest]
    if values.no_python:
        if values.module:
            raise UsageError("--no-python and --module cannot be combined")
        return values.training_script, rest
    how = ["-u", "-m"] if values.module else ["-u"]
    return os.environ.get("PYTHON_EXEC") or sys.executable, [*how, values.training_script, *rest]


def _say(values: Namespace, line: str) -> None:
    from elasticrs._engine.process.console import END_PATIENCE, Console

    console = Console(log_prefix=values.log_prefix)
    console.say(line)
    # Wait for the console's thread to write the line. Otherwise, the program could end before that.
    console.flush(END_PATIENCE)


if __name__ == "__main__":
    sys.exit(command_line.main())
