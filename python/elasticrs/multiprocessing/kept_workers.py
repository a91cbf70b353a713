"""Workers of an agent that are functions, started by ``fork`` or ``forkserver``: see :mod:`.keeper`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs._worker.run_path import run_script_path
from elasticrs.multiprocessing.spawn import FunctionWorkers, stop_tracker
from elasticrs.multiprocessing.starting import KEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from elasticrs import _core
    from elasticrs.agent.attempt import Attempt
    from elasticrs.logs import LogPaths
    from elasticrs.multiprocessing.starting import Kept
    from elasticrs.workers import WorkerSetup


class KeptWorkers(FunctionWorkers):
    """Workers that call a function, and whose parent is a keeper.

    The group of the core starts without members, and adopts them before they begin.

    Args:
        setup: what all kinds need.
        function: with ``forkserver`` importable by name.
        arguments: for all workers the same.
        start_method: ``fork`` or ``forkserver``.
    """

    def __init__(
        self, setup: WorkerSetup, function: Callable[..., Any], arguments: Sequence[Any], start_method: str
    ) -> None:
        super().__init__(setup, function, arguments)
        self._start_method = start_method
        self._kept: Kept | None = None
        self._pids: dict[int, int] = {}

    def specs(self, paths: LogPaths, environments: Mapping[int, dict[str, str]]) -> list[_core.ProcessSpec]:
        """See the base class: starts them, each of which waits to begin; for the core nothing is left."""
        self._values.clear()
        ranks = range(len(environments))
        functions = _Functions(
            self._setup.job.name,
            self._function,
            dict.fromkeys(ranks, self._arguments),
            {rank: environments[rank] for rank in ranks},
            {rank: paths.stdouts.get(rank, "") for rank in ranks},
            {rank: paths.stderrs.get(rank, "") for rank in ranks},
        )
        self._kept = KEPT[self._start_method](functions, self._setup.job.cpus)
        self._pids = self._kept.launch()
        return []

    def started(self, supervisor: _core.Supervisor, attempt: Attempt) -> None:
        """Have them adopted, and let them begin."""
        kept = self._kept
        if kept is None:
            return
        for rank, pid in self._pids.items():
            supervisor.adopt(rank, pid, kept.statuses[rank])
        attempt.pids = [self._pids[rank] for rank in sorted(self._pids)]
        self._results = dict(kept.pipes)
        super().started(supervisor, attempt)
        kept.let_begin()

    def ended(self, supervisor: _core.Supervisor, attempt: Attempt) -> None:
        """Read what is left, and end what they have left behind."""
        super().ended(supervisor, attempt)
        kept, self._kept = self._kept, None
        if kept is not None:
            exits = attempt.exits.values()
            kept.end(has_succeeded=bool(exits) and not any(ended.exitcode for ended in exits))


class KeptScriptWorkers(KeptWorkers):
    """Workers that run a script by :func:`run_script_path`, in a process that is ours alone.

    Args:
        setup: what all kinds need.
        script: its path, and its arguments.
        start_method: ``fork`` or ``forkserver``.
    """

    def __init__(self, setup: WorkerSetup, script: Sequence[str], start_method: str) -> None:
        super().__init__(setup, run_script_path, script, start_method)

    def ended(self, supervisor: _core.Supervisor, attempt: Attempt) -> None:
        """Stop multiprocessing's own helper as well: it would outlive the launcher by some time."""
        super().ended(supervisor, attempt)
        stop_tracker()

    def silent_ranks(self) -> Collection[int]:
        """None: see below."""
        return ()

    def return_values(self) -> dict[int, object]:
        """Scripts return nothing, and may end by ``os._exit(0)``."""
        return dict.fromkeys(range(self._setup.job.nproc))


class _Functions:
    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        stdouts: dict[int, str],
        stderrs: dict[int, str],
    ) -> None:
        self.name = name
        self.nprocs = len(args)
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.stdouts = stdouts
        self.stderrs = stderrs
