"""Launch jobs from Python, with torch's names. Other child processes of the program are left alone."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from elasticrs import events
from elasticrs._engine.job import config as defaults
from elasticrs._engine.job import options
from elasticrs._engine.job.config import UnresolvedSettings, WorkerSettings
from elasticrs._engine.nodes.transport.addresses import parse_endpoint
from elasticrs._engine.nodes.transport.settings import exit_barrier_timeout_of
from elasticrs._engine.supervise.observe import check_destination
from elasticrs._engine.supervise.observe.health_check_server import _AliveCallbackProxy
from elasticrs.agent.server.local_elastic_agent import LocalElasticAgent
from elasticrs.agent.server.worker_group import WorkerSpec, with_settings
from elasticrs.metrics import MetricsConfig, initialize_metrics
from elasticrs.multiprocessing.api import (
    DefaultLogsSpecs,
    LogsSpecs,
    SignalException,
    refuse_while_main_is_imported,
)
from elasticrs.multiprocessing.errors import ChildFailedError
from elasticrs.rendezvous import registry as rdzv_registry
from elasticrs.rendezvous.api import RendezvousParameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs.agent.server.local_elastic_agent import HealthCheckServer
    from elasticrs.rendezvous.api import RendezvousHandler

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_log = logging.getLogger("elasticrs.agent")


@dataclass
@with_settings
class LaunchConfig(WorkerSettings, UnresolvedSettings):
    """Configuration of a job, with torch's fields and defaults. A wrong setting raises ``ValueError``.

    For the keyword-only fields, see :class:`.WorkerSettings` and :class:`.UnresolvedSettings`.

    Args:
        min_nodes: minimum number of nodes.
        max_nodes: maximum number of nodes.
        nproc_per_node: number of workers on each node.
        logs_specs: destination of the workers' output; :class:`DefaultLogsSpecs` if ``None``.
        run_id: name of the job; a random name if empty.
        role: role of the workers.
        rdzv_endpoint: ``HOST[:PORT]`` of the rendezvous.
        rdzv_backend: name of the rendezvous back end.
        rdzv_configs: settings of the rendezvous.
        rdzv_timeout: value for ``rdzv_configs["timeout"]``, in seconds; -1 for the default of 900.
        max_restarts: number of restarts before the job fails.
        monitor_interval: seconds between two polls by an agent class of the user.
        start_method: start method of function workers: ``spawn``, ``fork`` or ``forkserver``.
        log_line_prefix_template: template of the prefix of tee'd lines.
        metrics_cfg: configuration for :func:`elasticrs.metrics.initialize_metrics`.
        local_addr: address of this node.
        event_log_handler: destination of events; see :func:`elasticrs.events.get_logging_handler`.
        numa_options: binding of the workers to CPUs; see :class:`.NumaOptions`.
        signals_to_handle: names of signals that stop the job, separated by commas.
        duplicate_stdout_filters: texts that select tee'd lines to copy to ``filtered_stdout.log`` as well.
        duplicate_stderr_filters: the same for standard error and ``filtered_stderr.log``.
        virtual_local_rank: true if each worker sees only its own GPU, and has local rank 0.
        shutdown_timeout: seconds between stop signal and SIGKILL; if ``None``, from the environment, or 30.
        exit_barrier_timeout: seconds to wait for other nodes; from ``rdzv_configs`` or the environment (300).
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = defaults.DEFAULT_MONITOR_INTERVAL
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = defaults.DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    exit_barrier_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", 900)
        if self.shutdown_timeout is None:
            self.shutdown_timeout = defaults.shutdown_timeout_from(os.environ)
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")
        if self.exit_barrier_timeout is None:
            self.exit_barrier_timeout = exit_barrier_timeout_of(self.rdzv_configs, os.environ, "rdzv_configs")
        elif self.exit_barrier_timeout < 0:
            raise ValueError(f"exit_barrier_timeout must be non-negative, got {self.exit_barrier_timeout}")
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        options.check(self)


_OF_WORKERS = {each.name for each in fields(LaunchConfig)} & {each.name for each in fields(WorkerSpec)}


class elastic_launch:  # noqa: N801 -- torch's name
    """Runs a job: ``elastic_launch(config, entrypoint)(*args)``. See :func:`launch_agent`."""

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run this node's agent until the job has finished. Return the functions' results by global rank.

    Args:
        config: configuration of the job. If its ``run_id`` is empty, it is set to a random name.
        entrypoint: program (whose results are ``None``), or function that can be imported by name.
        args: arguments of the entrypoint.
        health_check_server: see :class:`~elasticrs.agent.server.LocalElasticAgent`.

    Raises:
        ChildFailedError: workers failed. It is also an :class:`elasticrs.errors.JobFailedError`.
        RuntimeError: the workers could not be started. It is also a ``JobFailedError``.
        SignalException: a signal stopped the job.
        ValueError: the configuration is invalid.
        SystemExit: this process is a worker that imports a main module without a ``__name__`` guard.
    """
    refuse_while_main_is_imported()
    if not config.run_id:
        config.run_id = defaults.random_run_id()
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master_addr, master_port = _get_addr_and_port(parameters)
    spec = WorkerSpec(
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=rdzv_registry.get_rendezvous_handler(parameters),
        master_addr=master_addr,
        master_port=master_port,
        **{name: getattr(config, name) for name in _OF_WORKERS},
    )
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs or DefaultLogsSpecs(),
        start_method=config.start_method,
        exit_barrier_timeout=config.exit_barrier_timeout,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
        health_check_server=health_check_server,
        signals_to_handle=config.signals_to_handle,
    )
    # As in torch, keep the signals for all agents that this program or its children create later.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    alive_callback = getattr(health_check_server, "alive_callback", None)
    if isinstance(alive_callback, _AliveCallbackProxy):
        alive_callback.set_delegate(agent._get_alive_time)
    name = _get_entrypoint_name(entrypoint, args)
    check_destination(config.event_log_handler)
    is_signalled = False
    try:
        initialize_metrics(MetricsConfig(config.metrics_cfg))
        # After the agent's own events, record one with the outcome of the job, as torch's launcher does.
        try:
            result = agent.run()
        except Exception as error:
            is_signalled = isinstance(error, SignalException)
            events.record(agent.get_event_failed(), config.event_log_handler)
            raise
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.is_failed():
            failed = ChildFailedError(name=name, failures=result.failures)
            if result.verdict is not None and result.exit_code is not None:
                failed.verdict, failed.exit_code = result.verdict, result.exit_code
                failed.reason = result.reason
            raise failed
        return result.return_values
    finally:
        if not is_signalled:
            # After a signal, do not shut the rendezvous handler down, as that would end the job on all nodes.
            _shut_down(spec.rdzv_handler)
        if isinstance(config.logs_specs, DefaultLogsSpecs):
            config.logs_specs._remove_if_empty()


def _shut_down(handler: RendezvousHandler) -> None:
    try:
        handler.shutdown()
    except Exception as error:
        _log.warning("the rendezvous could not be shut down: %r", error)


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    if callable(entrypoint):
        return entrypoint.__name__
    if entrypoint == sys.executable:
        return next((arg for arg in args if not arg.startswith("-")), "")
    return entrypoint or ""


def _get_addr_and_port(rdzv_parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    if rdzv_parameters.backend != "static":
        return None, None
    endpoint = rdzv_parameters.endpoint.strip()
    if not endpoint:
        raise ValueError("endpoint is missing: the static rendezvous needs HOST:PORT")
    host, port = parse_endpoint("endpoint", endpoint)
    if port is None:
        raise ValueError(f"port is missing in endpoint: {endpoint}")
    return host, port or None
