"""The native part of elasticrs. Private: the public names are in the Python modules beside it.

Every call that can block releases the GIL. Rust threads never call into Python: what happens is put into a
queue, and :meth:`Supervisor.next_event` hands it out. Times called ``*_ns`` are on the clock of
:func:`time.monotonic_ns`; all other times are seconds.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypeAlias, final

__version__: str

# --- what to start --------------------------------------------------------------------------------

@final
class ProcessSpec:
    """One worker process.

    Args:
        local_rank: its index in the group.
        argv: program and arguments; a program without a slash is searched for in ``PATH`` of ``env``.
        env: the whole environment.
        cwd: working directory; the agent's when ``None``.
        stdin, stdout, stderr: the path of a file (opened for appending in the child, created with mode 0644),
            or ``None`` for the agent's own descriptor.
        pass_fds: descriptors that the worker gets under the same numbers; all others are closed.
            Default: none.
        cpus: the CPUs that it may run on; ``None`` for those of the agent.
        warm: it is a fork of the nursery, where that is a :class:`WarmNursery`.

    Raises:
        ValueError: empty ``argv``, a NUL byte, ``=`` in a variable's name, or ``cpus`` without any.
    """

    def __new__(
        cls,
        local_rank: int,
        argv: Sequence[str | bytes],
        *,
        env: Mapping[str, str],
        cwd: str | PathLike[str] | None = None,
        stdin: str | PathLike[str] | None = None,
        stdout: str | PathLike[str] | None = None,
        stderr: str | PathLike[str] | None = None,
        pass_fds: Sequence[int] = ...,
        cpus: Sequence[int] | None = None,
        warm: bool = False,
    ) -> ProcessSpec: ...
    @property
    def local_rank(self) -> int: ...

@final
class StopPolicy:
    """Signal, grace in seconds, then SIGKILL; one deadline for all ranks.

    Raises:
        ValueError: not a signal number; a grace that is negative or not finite.
    """

    def __new__(cls, signal: int, grace: float) -> StopPolicy: ...
    @property
    def signal(self) -> int: ...
    @property
    def grace(self) -> float: ...

@final
class GroupSpec:
    """All workers of one attempt on this node.

    Args:
        processes: local ranks ``0..n-1`` in order.
        on_failure: carried out in Rust the moment the first worker fails.
        stop_scope: whom the signals of any stop reach before SIGKILL: ``"worker"``, and the rest of its
            process group when it has ended, or ``"group"``. Default: ``"group"``.
        linger: seconds that descendants may go on when all workers have exited 0, before SIGTERM, one second,
            SIGKILL; ``None`` leaves them alone. Failed and stopped groups are swept at once. Default: 5.
        start_deadline: seconds within which all must run.
        keep_ignored: signals that stay ignored in the workers (``nohup``). Default: none.
        replaces: a worker that fails stops nobody: what it has left is swept, :class:`WorkerSwept` tells, and
            :meth:`Supervisor.replace` starts another process in its place. The group ends when the last
            process of each place has exited 0, when it is stopped (``"stopped"``, whoever has failed before),
            or with its nursery. ``on_failure`` holds for a worker that does not end after it has failed: its
            timer has expired, and this is what it gets. One that SIGKILL does not end within 30 s fails the
            group as ever. Each worker is a child subreaper: what its descendants orphan stays below it.
    """

    def __new__(
        cls,
        processes: Sequence[ProcessSpec],
        *,
        on_failure: StopPolicy,
        stop_scope: str = "group",
        linger: float | None = ...,
        start_deadline: float = 30.0,
        keep_ignored: Sequence[int] = ...,
        replaces: bool = False,
    ) -> GroupSpec: ...

# --- what happens ---------------------------------------------------------------------------------

@final
class Warmed:
    """A warm nursery has finished its imports, or has exited. After a failure, workers start cold."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def exitcode(self) -> int | None:
        """How it ended, as in :attr:`WorkerExited.exitcode`."""
    @property
    def hung(self) -> bool:
        """True if the nursery was killed because it exceeded its time limit."""
    @property
    def is_beside(self) -> bool:
        """True for a nursery of :meth:`Supervisor.import_beside` that has not taken over."""

@final
class GroupStarted:
    """Every worker of the group runs its program."""

    @property
    def pids(self) -> list[int]:
        """By local rank."""
    @property
    def started_ns(self) -> int: ...

@final
class StartFailed:
    """The group could not be started; nothing of it is left, and another one may be started."""

    @property
    def message(self) -> str:
        """One line: what failed, for which local rank, and why."""
    @property
    def local_rank(self) -> int | None: ...
    @property
    def stage(self) -> str | None:
        """What failed, as it fits after "could not": ``"execute"``, ``"open the log file"``, …"""
    @property
    def errno(self) -> int | None:
        """``None`` when the start hung until its deadline."""
    @property
    def subject(self) -> str | None:
        """The program, directory or file that the stage was about."""

@final
class WorkerExited:
    """A worker has ended; told once for each."""

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of the signal; ``None`` when nobody can tell (lost parent)."""
    @property
    def core_dumped(self) -> bool: ...
    @property
    def sent_signal(self) -> int | None:
        """The last signal that we had sent to it; ``None`` when it ended by itself."""
    @property
    def seen_ns(self) -> int:
        """When its death was seen; deaths seen in one wake-up share a stamp."""
    @property
    def max_rss_kib(self) -> int | None:
        """``None`` for adopted pids."""
    @property
    def user_us(self) -> int | None: ...
    @property
    def system_us(self) -> int | None: ...

@final
class FailureSeen:
    """The first failure of the group: its siblings have been signalled already."""

    @property
    def local_rank(self) -> int: ...
    @property
    def seen_ns(self) -> int: ...
    @property
    def signalled_ns(self) -> int:
        """When the last of the siblings had been signalled."""
    @property
    def siblings(self) -> int:
        """How many were signalled."""

@final
class WorkerSwept:
    """Nothing is left of what a failed worker had started: it can be replaced. Told once for each worker that
    fails in a group with ``replaces``, after its :class:`WorkerExited`, unless the group ends before.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def ended(self) -> list[Descendant]:
        """Descendants that had to be killed: the first of them. Where workers fail together, what has left
        their sessions is named with the first.
        """
    @property
    def more_ended(self) -> int:
        """How many more had to be."""
    @property
    def stuck(self) -> list[Descendant]:
        """Descendants that could not be killed."""
    @property
    def swept_ns(self) -> int: ...

@final
class WorkerReplaced:
    """A process runs in the place of a worker that had failed."""

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def started_ns(self) -> int: ...

@final
class ReplaceFailed:
    """It could not be started; nothing of it is left, and the place may be given to another one.

    After a start that hung until its deadline (``errno`` is ``None``) the group ends, as its nursery is lost.
    """

    @property
    def message(self) -> str:
        """One line: what failed, for which local rank, and why."""
    @property
    def local_rank(self) -> int: ...
    @property
    def stage(self) -> str | None:
        """As in :class:`StartFailed`; likewise the others."""
    @property
    def errno(self) -> int | None: ...
    @property
    def subject(self) -> str | None: ...

@final
class TimerExpired:
    """A worker, or a descendant of one, did not release an expiration timer in time. With a signal, which was
    sent, the worker counts as failed and :class:`FailureSeen` follows; otherwise the timer only tells.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int:
        """Of the process that acquired it."""
    @property
    def scope(self) -> str: ...
    @property
    def at(self) -> str | None:
        """File and line of the block, where the client says so."""
    @property
    def deadline(self) -> float:
        """By the worker's wall clock, in seconds since 1970."""
    @property
    def others(self) -> int:
        """How many other timers of the process are live."""
    @property
    def signal(self) -> int | None: ...
    @property
    def seen_ns(self) -> int: ...

@final
class Heartbeat:
    """The last sign of life that a worker gave by :func:`elasticrs.timer.heartbeat`."""

    @property
    def local_rank(self) -> int: ...
    @property
    def at_ns(self) -> int:
        """When, monotonic."""
    @property
    def step(self) -> int | None: ...
    @property
    def section(self) -> str | None:
        """The section that it was in."""

@final
class RankSeen:
    """What a worker was doing when another one, or it, was found to hang."""

    @property
    def local_rank(self) -> int: ...
    @property
    def heartbeat(self) -> Heartbeat | None: ...
    @property
    def is_late(self) -> bool:
        """At least half of its limit has passed."""
    @property
    def state(self) -> str:
        """One letter, as in ``/proc/PID/stat``; empty when that is not known."""
    @property
    def wait_channel(self) -> str:
        """The kernel function that it waits in, as far as readable."""
    @property
    def frame(self) -> str | None:
        """The innermost frame of its Python program."""

@final
class WorkerHung:
    """A worker gave no sign of life for too long: it counts as failed, and :class:`FailureSeen` follows.

    Of several that did not, it is the one that keeps the others waiting, as far as can be told. It also names
    whom a worker of another node may have waited for (``hung_for`` of :meth:`Supervisor.stop`). Then the
    group is stopped, and no :class:`FailureSeen` follows.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def missed(self) -> Literal["startup", "step", "section", "exit", "line"]:
        """What the worker missed: its first heartbeat, the next heartbeat, the end of a section, the exit of
        its process after its program had returned, or any line of output.
        """
    @property
    def since_ns(self) -> int:
        """Time of the worker's last heartbeat or line of output, in nanoseconds of the monotonic clock. The
        start of the group if there was none.
        """
    @property
    def limit(self) -> float:
        """The time limit that the worker exceeded, in seconds."""
    @property
    def seen_ns(self) -> int:
        """When it was found."""
    @property
    def ground(self) -> Literal["stopped", "behind", "elsewhere", "apart", "oldest"]:
        """Why it, of those that are late.

        A signal has stopped it; it is the only one that is a step behind; it alone stands at another place of
        the program; its sign of life is the oldest, and no other stands where it does; or it is the oldest.
        """
    @property
    def ranks(self) -> list[RankSeen]:
        """State of each worker that was running when the hang was detected."""

@final
class WorkerRaised:
    """A worker has recorded an uncaught exception and is about to exit. The event is sent again if the worker
    has not exited within its time limit. The worker then counts as failed, and :class:`FailureSeen` follows.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int:
        """The process that recorded the exception: the worker or a descendant."""
    @property
    def text(self) -> str:
        """Last part of the traceback, as the process sent it. Empty if it sent none."""
    @property
    def seen_ns(self) -> int:
        """Time when the exception was recorded, in nanoseconds of the monotonic clock. If the process did not
        send that time, the time when its notice was received.
        """
    @property
    def limit(self) -> float | None:
        """Time limit for the exit, in seconds after ``seen_ns``. ``None`` if there is no limit."""
    @property
    def exit(self) -> Literal["begun", "slow", "stalled"]:
        """``"begun"`` if the exception has just been recorded. ``"slow"`` if the time limit has passed but
        the exit makes progress: the worker may finish its exit within the grace period of the stop that
        follows. ``"stalled"`` if the time limit has passed and the exit makes no progress: the worker gets
        SIGKILL.
        """

@final
class WorkersKilled:
    """Workers did not exit in time. SIGKILL is sent to them now."""

    @property
    def local_ranks(self) -> list[int]: ...
    @property
    def pids(self) -> list[int]: ...
    @property
    def reason(self) -> Literal["signal", "slow exit", "stalled exit"]:
        """``"signal"`` if the workers did not exit within the grace period after a signal. ``"slow exit"`` if
        their exit after an uncaught exception made progress but was not complete at the end of the grace
        period; they were sent no signal before. ``"stalled exit"`` if that exit made no progress.
        """
    @property
    def signal(self) -> int | None:
        """The signal, if that is the reason."""
    @property
    def limit(self) -> float:
        """Seconds that the workers had to exit: the grace period, or for a stalled exit the maximum time
        without progress.
        """

@final
class WorkerPaused:
    """A worker has been stopped for one second by a signal (SIGSTOP, SIGTSTP, …) that this process did not
    send.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def signal(self) -> int: ...

@final
class WorkerResumed:
    """A worker reported by :class:`WorkerPaused` goes on."""

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...

@final
class Descendant:
    """A process that a worker left behind."""

    @property
    def pid(self) -> int: ...
    @property
    def command(self) -> str:
        """The kernel's short name of its program, at most 15 bytes; empty when it was gone."""

@final
class Fenced:
    """The deadline of the fence has passed: the nursery kills everything that runs.

    Told at once, also without a group. A group that runs ends with the outcome ``"stopped"``, and its workers
    with ``sent_signal`` SIGKILL. Until a new deadline is set (or none), no worker can be started.
    """

    @property
    def fenced_ns(self) -> int:
        """When the nursery saw it."""

@final
class GroupEnded:
    """Nothing of the group is left; another one may be started.

    ``outcome`` is ``"succeeded"`` (all exited 0), ``"failed"`` (a worker failed first), ``"stopped"`` (by
    :meth:`Supervisor.stop`, or by the fence), or ``"lost"`` (the nursery died, and the workers with it).
    """

    @property
    def outcome(self) -> Literal["succeeded", "failed", "stopped", "lost"]: ...
    @property
    def nursery_exitcode(self) -> int | None:
        """How the nursery ended, when it was lost, as in :attr:`WorkerExited.exitcode`."""
    @property
    def nursery_hung(self) -> bool:
        """The nursery was lost because it kept silent, and we killed it."""
    @property
    def stuck_ranks(self) -> list[int]:
        """Workers that did not end after SIGKILL (state D); the node is not fit for a restart."""
    @property
    def wait_channels(self) -> list[str]:
        """For each of ``stuck_ranks``: the kernel function it waits in, as far as readable."""
    @property
    def ended(self) -> list[Descendant]:
        """Descendants that had to be signalled: the first of them."""
    @property
    def more_ended(self) -> int:
        """How many more had to be signalled."""
    @property
    def stuck(self) -> list[Descendant]:
        """Descendants that could not be killed."""
    @property
    def spared(self) -> list[Descendant]:
        """Descendants that were left alone."""
    @property
    def ended_ns(self) -> int: ...

@final
class LogTrouble:
    """A log file cannot be read, or its file system is full; told once for each file."""

    @property
    def local_rank(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def errno(self) -> int: ...

@final
class Degraded:
    """Something works less well than it should (the console is lost, files are polled); the job goes on."""

    @property
    def message(self) -> str: ...

@final
class FdReady:
    """A descriptor given to :meth:`Supervisor.watch_fd` is readable."""

    @property
    def fd(self) -> int: ...

Event: TypeAlias = (
    Warmed
    | GroupStarted
    | StartFailed
    | WorkerExited
    | WorkerSwept
    | WorkerReplaced
    | ReplaceFailed
    | FailureSeen
    | TimerExpired
    | WorkerHung
    | WorkerRaised
    | WorkersKilled
    | WorkerPaused
    | WorkerResumed
    | Fenced
    | GroupEnded
    | LogTrouble
    | Degraded
    | FdReady
)

# --- who does it ----------------------------------------------------------------------------------

class SupervisorError(Exception):
    """The supervisor cannot do what was asked: it was closed, its runtime panicked (the workers are gone
    then), a group is running already, none is, or the process was forked.
    """

@final
class LogStream:
    """One log file to follow.

    Args:
        local_rank: whose.
        path: the file; it need not exist yet.
        to: 1 or 2: the descriptor of the agent that gets the lines; a path: the file that gets copies of some
            of them, appended; ``None``: nobody.
        prefix: put before every line, colour codes included.
        contains: a line that contains one of these is copied to the file.
    """

    def __new__(
        cls,
        local_rank: int,
        path: str,
        to: Literal[1, 2] | str | None,
        prefix: bytes,
        *,
        contains: Sequence[bytes] = ...,
    ) -> LogStream: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def path(self) -> str: ...

@final
class WarmNursery:
    """A nursery that is the workers' own program: it imports what they need, and forks them.

    Args:
        process: their arguments, and what they have of the environment in common. The nursery gets its start
            as ``ELASTICRS_NURSERY_START``, and calls :func:`warm_nursery_main` with it when it has imported.
        report_fd: it gets this as descriptor 6, for what it has to tell.
        limit: seconds for the import.
        ignored: signals that its workers ignore.

    Raises:
        OSError: ``report_fd`` is not open, or descriptors ran out.
        ValueError: ``limit`` is no span, or one of ``ignored`` no signal.
    """

    def __new__(
        cls, process: ProcessSpec, *, report_fd: int, limit: float, ignored: Sequence[int] = ...
    ) -> WarmNursery: ...

@final
class Supervisor:
    """Starts, watches and stops the workers of one agent, one group at a time.

    Args:
        owns_process: the process is ours (the command line): make it a child subreaper, so that even the loss
            of the nursery leaves nothing behind. In a host application other children are never touched.
        nursery: where its program comes from: ``"embedded"`` (the image that the extension carries, run from
            memory), ``"interpreter"`` (this Python, which loads the extension), or ``"auto"``: the first of
            them that can be executed.
        warm: a nursery that imports first is tried before those. Groups wait for it, and :class:`Warmed`
            tells how it went.

    Raises:
        SupervisorError: no nursery could be started.
        OSError: the kernel is too old (below 5.4), or descriptors ran out.
    """

    def __new__(
        cls,
        *,
        owns_process: bool = False,
        nursery: Literal["auto", "embedded", "interpreter"] = "auto",
        warm: WarmNursery | None = None,
    ) -> Supervisor: ...
    @property
    def nursery_pid(self) -> int | None: ...
    def start(self, group: GroupSpec) -> None:
        """Begin to start all workers, or none; :class:`GroupStarted` or :class:`StartFailed` tells.

        A :class:`GroupEnded` without either means that it was stopped, or its nursery was lost, before all
        ran.

        Raises:
            SupervisorError: a group is running; or see the class.
            OSError: descriptors ran out, or one of ``pass_fds`` is not open.
        """
    def replace(self, process: ProcessSpec) -> None:
        """Begin to start a process in the place of a worker that has failed and was swept, of a group with
        ``replaces``; :class:`WorkerReplaced` or :class:`ReplaceFailed` tells, or the end of the group.

        Everything that holds for the workers of the group holds for it, ``start_deadline`` as well. Its log
        files are followed when :meth:`follow` is called for them; those of the worker before it are not
        followed any more.

        Raises:
            SupervisorError: that worker runs, has succeeded, or was not swept yet; the group is being
                stopped, or its workers are not replaced; none is running; or see the class.
            OSError: descriptors ran out, or one of ``pass_fds`` is not open.
        """
    def adopt(
        self, local_rank: int, pid: int, status_fd: int | None = None, page_fd: int | None = None
    ) -> None:
        """Supervise a process that Python started, as a member of the running group.

        Args:
            local_rank: its index.
            pid: which process.
            status_fd: for a process whose parent is not this one: a pipe into which its parent writes the
                status that ``wait4`` gave, as a C ``int``. Stays the caller's.
            page_fd: for one that waits to begin and has inherited it: what :func:`heartbeat_page` gave.
                Its heartbeats are watched then; ranks in order, from 0. Stays the caller's.

        Raises:
            ProcessLookupError: no such process.
            OSError: ``page_fd`` is no such page.
            SupervisorError: no group is running (an empty one may be started for this).
        """
    def stop(
        self,
        policy: StopPolicy,
        *,
        hung_for: float | None = None,
        hung_step: int | None = None,
        hung_frame: str | None = None,
    ) -> None:
        """Stop the group; :class:`GroupEnded` tells when that is done. A later, harder call overrides.

        Args:
            policy: how.
            hung_for: the reason is a worker of another node, which has given no sign of life for so many
                seconds. Where heartbeats are watched, the evidence of all workers is taken first, for 2 s at
                most, and :class:`WorkerHung` names the one that may have kept it waiting, unless that other
                one is rather to blame: at least half of that time, or of its own limit, has passed.
            hung_step: the step that it was in.
            hung_frame: where its main thread stands, as in :class:`RankSeen`.
        """
    def signal(self, signum: int, local_ranks: Sequence[int] | None = None) -> None:
        """Send a signal to the workers with these local ranks, or to all workers if ``local_ranks`` is
        ``None``. The group's ``stop_scope`` decides which processes of each worker receive the signal.
        """
    def forward(self, signum: int, local_ranks: Sequence[int]) -> None:
        """Forward a signal that this process received to the workers with these local ranks. The group's
        ``stop_scope`` decides which processes of each worker receive the signal. Nothing is sent while
        workers are being started.
        """

    def suspend(self) -> None:
        """Suspend all groups with SIGSTOP and pause their deadlines until :meth:`resume`."""
    def resume(self) -> None: ...
    def import_beside(self, limit: float) -> None:
        """Import the modules again in a second warm nursery, because files of imported modules have changed.

        It has the lowest priority, and replaces an earlier second nursery. The first nursery and its workers
        continue. :class:`Warmed` reports the result.

        Args:
            limit: time limit for the imports, in seconds.

        Raises:
            SupervisorError: see the class.
        """
    def take_over(self) -> bool:
        """Let the second nursery start the next groups, and end the first one.

        Return false, and change nothing, if no second nursery has finished its imports or if a group exists.

        Raises:
            SupervisorError: see the class.
        """
    def guard_connection(self, fd: int) -> None:
        """Give the nursery a duplicate of this socket to hold, in place of an earlier one.

        When this process dies, the connection ends only after the nursery has ended all workers and what they
        had started. A nursery that replaces a lost one holds it as well.

        Raises:
            OSError: ``fd`` is not open, or descriptors ran out.
            SupervisorError: see the class.
        """
    def release_connection(self) -> None:
        """Undo :meth:`guard_connection`."""
    def watch_timers(self, path: str | PathLike[str] | None = None) -> str:
        """Read expiration timers of the workers from a FIFO, until :meth:`close` removes it.

        Its records are those of torch's ``FileTimerClient``. What expires is told as :class:`TimerExpired`,
        what is refused as :class:`Degraded`. Only workers and their descendants are ever signalled.

        Args:
            path: where; ``None``: in a directory that only this user can enter. A FIFO of this user that is
                there, and that nobody reads, is used.

        Returns:
            Where it is.

        Raises:
            FileExistsError: something else is at ``path``.
            OSError: somebody reads the FIFO there; timers are watched already; no such directory.
        """
    def watch_hangs(
        self,
        limit: float | None,
        *,
        startup: float | None = None,
        exit_limit: float | None = None,
        least: float | None = None,
    ) -> None:
        """Give each worker of groups that are started later a memory page for heartbeats
        (``ELASTICRS_HEARTBEAT``), and watch these workers for hangs. :class:`WorkerHung` reports a hung
        worker.

        Args:
            limit: maximum number of seconds between two heartbeats or lines of output of a worker. ``None``
                to learn the limit from the job's own steps.
            startup: maximum number of seconds from the start of a group to the first heartbeat or line of
                output of each worker. ``None`` for no limit.
            exit_limit: maximum number of seconds from the return of a worker's program to the exit of its
                process. ``limit`` does not apply during that time. ``None`` for no limit.
            least: minimum of a learned limit, in seconds. ``None`` for one minute.

        Raises:
            ValueError: a limit is not finite, or not above 0.
        """
    def keep_evidence(
        self, files: Sequence[tuple[str, str]], *, py_spy: str | PathLike[str] | None = None
    ) -> None:
        """Where to keep what the workers were doing when one of them hung, or a timer expired.

        Args:
            files: by local rank, of the group that is started next: the file into which the worker's hook
                lets :mod:`faulthandler` write, and the one that is written.
            py_spy: the program, for workers that do not answer.
        """
    def watch_exits(self, limit: float | None = None) -> str:
        """Watch for workers of the group that is started next which record an uncaught exception and do not
        end. :class:`WorkerRaised` tells of both.

        Args:
            limit: seconds within which a worker must have ended then; ``None``: any time.

        Returns:
            The name of an abstract socket to which such a worker sends a datagram; the kernel says who it is.

        Raises:
            ValueError: the limit is negative or not finite.
            OSError: descriptors ran out.
        """
    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of each worker that had any, of the group that runs or ran last."""
    def fence_at(self, from_now: float | None) -> bool:
        """Set the moment at which the nursery kills all workers, even if this process is stopped then.

        Args:
            from_now: seconds from now, on the clock that goes on while the machine is suspended; ``None``
                takes the deadline back.

        Returns:
            ``False`` when the deadline before had passed already: :class:`Fenced` tells, or has told.

        Raises:
            ValueError: the time is not finite.
        """
    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event, or ``None`` after ``timeout`` seconds. One thread at a time.

        Python's signal handlers run as soon as a signal arrives in the main thread; what they raise is
        raised here. One that arrives in the instant before the wait begins is looked at within 5 seconds; who
        wants it at once watches a descriptor of :func:`signal.set_wakeup_fd`.

        Raises:
            SupervisorError: see the class.
        """
    def watch_fd(self, fd: int) -> None:
        """From now on :meth:`next_event` returns :class:`FdReady` while ``fd`` is readable."""
    def unwatch_fd(self, fd: int) -> None: ...
    def follow(self, streams: Sequence[LogStream]) -> None:
        """Copy what is written to these files to the console, as whole lines, until their group has ended."""
    def drain(self, timeout: float) -> list[LogStream]:
        """Wait until every followed file of ended groups is on the console; returns those that are not."""
    def close(self, keep_descendants: bool = False) -> None:
        """Kill what is left (unless ``keep_descendants``), end the nursery and the runtime thread.
        Idempotent.
        """

# --- stores ---------------------------------------------------------------------------------------

WorkersState: TypeAlias = Literal["INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED"]
Activity: TypeAlias = Literal["starting", "productive", "restarting", "waiting_for_nodes", "hung"]
RestartCause: TypeAlias = Literal[
    "worker_failed", "worker_hung", "timer_expired", "start_failed", "nursery_lost", "port_taken", "nodes"
]

@final
class HealthServer:
    """Says over HTTP how an agent is, from a thread of its own. Not for children made by ``fork``.

    Args:
        host: where it listens.
        port: its port; 0 for any that is free.
        limit: seconds after which an agent that does not answer, or makes no progress, counts as dead.

    Raises:
        OSError: the address cannot be had; no descriptor or thread is left.
    """

    def __new__(cls, host: str, port: int, limit: float) -> HealthServer: ...
    @property
    def port(self) -> int:
        """Where it listens."""
    @property
    def fd(self) -> int:
        """Readable while somebody waits for :meth:`answer`."""
    def answer(self, age: float, supervisor: Supervisor | None = None, doing: str | None = None) -> None:
        """The loop is alive, and the last progress was ``age`` seconds ago.

        Args:
            age: seconds.
            supervisor: the answer counts when the thread that supervises the workers has passed it on.
            doing: in what the agent is, for the reason that is told when the progress is too old.
        """
    def show(self, supervisor: Supervisor, *, is_asked: bool = False) -> None:
        """Show what this supervisor counts.

        Args:
            supervisor: of the agent.
            is_asked: the loop that takes its events answers for the agent. One that does not come back to
                :meth:`Supervisor.next_event` for longer than the limit is dead at the first question.
        """
    def watch_files(self, files: Sequence[tuple[int, int, str]], are_new: bool) -> None:
        """An attempt begins that writes to files which nobody reads: count their bytes for the metrics.

        Args:
            files: local rank, descriptor (1 or 2) and path of each; none of them twice.
            are_new: none of them was there so far. Otherwise what comes after a first look counts.

        Raises:
            ValueError: of a descriptor.
            OSError: there is no thread left that could look at them.
        """
    def identify(self, run_id: str, node: str, placed: tuple[int, int] | None = None) -> None:
        """Set the identity of the agent within its job, for the metrics.

        Args:
            run_id: name of the job.
            node: name of the machine.
            placed: group rank of this node and number of workers on all nodes; ``None`` before the first
                round.
        """
    def files_ended(self) -> None:
        """What wrote to them has ended: they are looked at a last time."""
    def publish(
        self, state: WorkersState, status: str, workers: Sequence[tuple[int, int, int]] | None = None
    ) -> None:
        """The job is in this state from now on.

        Args:
            state: of the workers; they are ready in the state ``HEALTHY``.
            status: for ``/status``: the JSON of an object.
            workers: rank, local rank and pid of each, while they run; as before when ``None``.

        Raises:
            ValueError: no such state, or ``status`` is something else.
        """
    def enter(self, activity: Activity) -> None:
        """What time goes to from now on.

        Raises:
            ValueError: no such activity.
        """
    def was_hung(self, seconds: float) -> None:
        """So much of the productive time was none."""
    def restarted(self, cause: RestartCause) -> None:
        """The workers were started again.

        Raises:
            ValueError: no such cause.
        """
    def recovered(self, seconds: float) -> None:
        """The workers run again, so long after a failure."""
    def put(self, group: str, name: str, value: float) -> None:
        """One value of ``put_metric``."""
    def take_notices(self) -> list[str]:
        """Lines for the user, since the last call."""
    def close(self) -> None:
        """Closes the port and ends the thread; returns when that is done. Idempotent."""

@final
class TimerFifo:
    """A FIFO of timer records that only this process reads; it is removed when this is closed.

    Args:
        path: where it is made. One of this user's, that nobody else may open and nobody reads, is taken over.

    Raises:
        FileExistsError: something else is there.
        OSError: ``EBUSY``: somebody reads the FIFO there; or it cannot be made.
    """

    def __new__(cls, path: str | PathLike[str]) -> TimerFifo: ...
    @property
    def fd(self) -> int:
        """Readable when :meth:`read` has something."""
    def read(self) -> tuple[list[tuple[int, str, float, int]], list[str]]:
        """Take what has been written, at most 1 MiB; never waits.

        Returns:
            The records: pid, scope, when the timer expires in seconds since 1970 (negative: release), and
            the signal (0: none). And lines for the user on what was refused, each kind once a minute.
        """
    def close(self) -> None:
        """Remove the FIFO, unless somebody has put something else there. Idempotent."""

@final
class WorkerStore:
    """A server for torch's ``TCPStore`` clients (2.4 and later): the store of one round's workers.

    Made, it is bound and listens, so that clients may connect; :meth:`serve` makes it answer. What a client
    does wrong (no client of a TCPStore, a request beyond the protocol's limits, silence, replies that it does
    not take) closes its connection alone, with one line for the user. Everything that clients make it hold
    is at most 1 GiB.

    Args:
        host: a name or an address to listen on; every address, IPv6 and IPv4, when ``None``.
        port: a port, 0 for a free one, or the first and the last of a range, of which the first free one is
            taken.

    Raises:
        OSError: no such port can be had, or no descriptor; names address and port.
        OverflowError: no number of a port.
    """

    def __new__(cls, host: str | None = None, port: int | tuple[int, int] = ...) -> WorkerStore: ...
    @property
    def port(self) -> int: ...
    def serve(self, supervisor: Supervisor | None = None) -> None:
        """Begin to answer, on the thread that all stores of a process share. Returns at once.

        A store of a supervisor's takes that thread when its first client comes.

        With a supervisor, lines for the user come as :class:`Degraded`; otherwise see :meth:`take_notices`.

        Raises:
            SupervisorError: it is served already, or closed, or the supervisor has ended.
            OSError: no thread or descriptor is left.
        """
    def waiting(self) -> dict[str, list[str]]:
        """Who waits for which keys: by the client's address, with its pid (torch 2.5 and later).

        Of many, the 256 that have waited longest, and 16 keys of each; how many more there are is an entry of
        its own, without keys.
        """
    def take_notices(self) -> list[str]:
        """Lines for the user since the last call, when there is no supervisor. At most 10 in 10 seconds, of
        which 256 are kept; how many more there were is a line of its own. Never blocks.
        """
    def close(self) -> None:
        """End the listener and every connection; returns when they are gone. Idempotent.

        Clients that wait fail at once.
        """

# --- the store in which agents meet ---------------------------------------------------------------

@final
class Entry:
    """A key and its value, as a read found it."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes: ...
    @property
    def create_revision(self) -> int:
        """The revision that made the key; overwriting keeps it."""
    @property
    def mod_revision(self) -> int:
        """The revision of its last change."""

@final
class Change:
    """What one revision did to a key."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes | None:
        """``None``: the key was deleted."""
    @property
    def create_revision(self) -> int: ...
    @property
    def mod_revision(self) -> int: ...

@final
class Connected:
    """The session has begun."""

    @property
    def revision(self) -> int:
        """The store's revision."""
    @property
    def session(self) -> int:
        """Its number; never used again."""
    @property
    def ttl(self) -> float:
        """Seconds from the last keep-alive to the end of the session."""
    @property
    def interval(self) -> float:
        """Seconds between keep-alives; a store with very many clients asks for more than were wished."""
    @property
    def local_address(self) -> str:
        """Our end of the connection: where others on that network find this host."""
    @property
    def peer_address(self) -> str: ...

@final
class Reply:
    """The answer to a transaction or a watch.

    All changes up to :attr:`revision` that watches of this client cover have been told before it.
    """

    @property
    def tag(self) -> int: ...
    @property
    def ok(self) -> bool:
        """The compares held, so ``then`` was applied, else ``otherwise``; the watch has begun."""
    @property
    def revision(self) -> int:
        """At which the store was when it judged."""
    @property
    def results(self) -> list[int | Entry | list[Entry] | None]:
        """One for each op: ``put`` and the deletes give the number of keys that they changed, ``get`` and
        ``predecessor`` an entry or ``None``, ``range`` a list of entries. Of a watch: with ``snapshot`` the
        entries, else nothing; of one that was refused, the oldest revision that can be asked for.
        """

@final
class Changes:
    """All changes of one revision that any watch of this client covers, in the order of the transaction."""

    @property
    def revision(self) -> int: ...
    @property
    def changes(self) -> list[Change]: ...

@final
class StoreNotice:
    """The store does not answer, or answers again: only of sessions that may be taken up again."""

    @property
    def message(self) -> str:
        """One line for the user."""

@final
class ConnectionLost:
    """The session is over; always the last event."""

    @property
    def kind(
        self,
    ) -> Literal[
        "refused",
        "unreachable",
        "timeout",
        "resolve",
        "version",
        "token",
        "not_ours",
        "run",
        "closed",
        "silent",
        "slow",
        "protocol",
        "limit",
        "gone",
        "other",
    ]: ...
    @property
    def message(self) -> str:
        """One line for the user."""

StoreEvent: TypeAlias = Connected | Reply | Changes | StoreNotice | ConnectionLost

@final
class CoordinationServer:
    """The store, serving from the moment it is made.

    Args:
        addresses: hosts and ports to listen on; an empty host means all interfaces, IPv4 and IPv6. With port
            0 the kernel chooses for the first address, and the others use the same port.
        run_id: clients of other runs are refused; ``None``: all are served, and see the same keys.
        token: clients must know it, too.
        max_connections: further ones are refused.
        max_bytes: of all that clients make it hold: keys, values and history, watches, what has come of
            requests and what was not read of answers. What does not fit ends the client that has most of it.
        request_timeout: how many seconds a request may take from its first byte to its last.
        state: a file in which it keeps what it holds, on disk before anybody is told of it. A store that is
            started with the file goes on from there; its sessions have their whole time to live to come back.
        grace: with ``state``, the shortest time to live of a session in seconds.
        supervisor: tell the user something as its :class:`Degraded`; otherwise see :meth:`take_notices`. All
            stores of a process share a thread, which is never the supervisor's.

    Raises:
        OSError: an address cannot be had; names address and port. No thread is left.
        RuntimeError: the state cannot be used; the file is as it was.
        ValueError: no address, an empty token, a run id of more than 512 bytes, a time that is none.
    """

    def __new__(
        cls,
        addresses: Sequence[tuple[str, int]],
        *,
        run_id: str | None,
        token: bytes | None = None,
        max_connections: int = ...,
        max_bytes: int = ...,
        request_timeout: float = ...,
        state: str | PathLike[str] | None = None,
        grace: float = 0.0,
        supervisor: Supervisor | None = None,
    ) -> CoordinationServer: ...
    @property
    def port(self) -> int:
        """Of the first address."""
    @property
    def fd(self) -> int:
        """Readable while :meth:`take_notices` has something; made when it is first asked for.

        Raises:
            OSError: no descriptor is left.
        """
    @property
    def has_ended(self) -> bool:
        """True when it was closed, or an error within it has ended it; :meth:`take_notices` then says why."""
    def sessions(self) -> int:
        """How many clients are connected."""
    def take_notices(self) -> list[str]:
        """Strangers and refusals, one line each; otherwise as :meth:`WorkerStore.take_notices`."""
    def stop_listening(self) -> None:
        """Close the listening sockets; connections go on."""
    def listen_again(self) -> None:
        """Undo :meth:`stop_listening`.

        Raises:
            OSError: somebody else has the port now.
        """
    def close(self) -> None:
        """Close everything. Idempotent."""

@final
class CoordinationClient:
    """Client for one session with its lease. Create a new client after the session has ended.

    Args:
        host, port: address of the store.
        run_id: identifier of the run.
        token: token of the store. If ``scope`` is given, the result of :func:`scoped_token` instead.
        scope: prefix of the only keys that this client may use. ``None`` for all keys.
        interval: seconds between keep-alives.
        attempts: after so many intervals without one the store ends the session; this side gives it up one
            interval earlier.
        connect_timeout: seconds for resolving, connecting and the handshake together.
        stall_timeout: keep-alives stop when :meth:`take` was not called for so many seconds, and nobody waits
            in :meth:`wait` either: a hung program is no member of anything. ``None``: never. Default: 60.
        supervisor: run on its thread; otherwise on one that all clients without a supervisor share.
        resume: the session outlives its connection. It is taken up again on another one until its lease is
            over; requests that were not answered are made again, so that they may be carried out twice, and
            watches are told of what they have missed, as one revision. :class:`StoreNotice` tells of a store
            that is away for more than a second.
        met: a store that was met before, as :attr:`met` says. Another one is refused (``other``), unless it
            goes on with that one's state.

    Raises:
        ValueError: an interval or a number of attempts that no store takes, an empty token.
        OSError: no descriptor is left.
        SupervisorError: from calls after a fork.
    """

    def __new__(
        cls,
        host: str,
        port: int,
        *,
        run_id: str,
        token: bytes | None = None,
        scope: str | None = None,
        interval: float = 1.0,
        attempts: int = 5,
        connect_timeout: float = 5.0,
        stall_timeout: float | None = ...,
        supervisor: Supervisor | None = None,
        resume: bool = False,
        met: tuple[bytes, int] | None = None,
    ) -> CoordinationClient: ...
    @staticmethod
    def etcd(
        endpoints: Sequence[tuple[str, int]],
        *,
        prefix: str,
        ca_cert: str | None,
        cert: str | None,
        key: str | None,
        is_tls: bool,
        user: str | None,
        password: str | None,
        ttl: float,
        job_lease: tuple[int, float] | None,
        connect_timeout: float,
        read_timeout: float,
        stall_timeout: float | None,
        supervisor: Supervisor | None,
        links: tuple[str, str | None] | None = None,
    ) -> CoordinationClient:
        """A session with etcd v3 in place of our own store. It goes on over further connections while its
        lease lasts, and each request is carried out once.

        Args:
            endpoints: hosts and ports of the cluster's members.
            prefix: put before each key, and taken off what comes back. Keys that sort behind ``~sessions/``
                are not for the user.
            ca_cert: who signs the members' certificates, a file in PEM; ``None``: whoever the system trusts.
            cert: what this client shows, a file in PEM.
            key: its private key, a file in PEM.
            is_tls: speak TLS.
            user: who this client is.
            password: proves it.
            ttl: seconds without a keep-alive after which etcd ends the lease; this side gives it up a fifth
                of that earlier. At least 2; etcd may make it longer.
            job_lease: id and seconds of the lease of keys that are put without one: made when it is not
                there, and kept alive by every session. ``None``: such keys stay for ever.
            connect_timeout: seconds for names, connections and the beginning of the session, on all endpoints
                together.
            read_timeout: seconds for a request, over all attempts.
            stall_timeout: as of our own store.
            supervisor: as of our own store.
            links: name of the group of sessions that watch each other, and another host name or address of
                this machine. When a program with a supervisor is killed and none of its workers runs
                anymore, another session of the group revokes its lease at once. Without a supervisor, or
                with ``None``, the session has no links, so after a kill its lease expires.

        Raises:
            ValueError: no endpoint, a time that is none or too short, half of a pair.
        """
    @property
    def fd(self) -> int:
        """Readable while :meth:`take` has something."""
    @property
    def met(self) -> tuple[bytes, int] | None:
        """The name of the store that was met last, and the highest revision that was seen there; ``None``
        before the first, and of etcd.
        """
    def take(self) -> list[StoreEvent]:
        """What has happened since the last call: first :class:`Connected` or :class:`ConnectionLost`. Never
        blocks.
        """
    def wait(self, timeout: float | None) -> bool:
        """Wait until :meth:`take` has something; false: the time is over, or nothing can come any more."""
    def txn(
        self,
        tag: int,
        compares: Sequence[tuple[str | bytes | int, ...]],
        then: Sequence[tuple[str | bytes | int, ...]],
        otherwise: Sequence[tuple[str | bytes | int, ...]] = ...,
    ) -> None:
        """Send a transaction; :class:`Reply` with this tag follows. Requests are carried out in order.

        Args:
            tag: any number from 0 to 2^64 - 1.
            compares: ``("exists", key)``, ``("missing", key)``, ``("create", key, revision)``,
                ``("mod", key, revision)`` (revision 0: the key is missing), ``("value", key, value)``.
            then: what to do when all hold: ``("put", key, value, leased)``, ``("delete", key)``,
                ``("delete_prefix", prefix)``, ``("get", key)``, ``("range", prefix, limit)`` (limit 0: all),
                ``("predecessor", prefix, key)``: of the keys under ``prefix`` the one with the highest create
                revision below that of ``key``. A leased key ends with the session that leased it last.
            otherwise: what to do when one does not hold. Default: nothing.

        Raises:
            ValueError: an unknown kind, a key of more than 1 KiB, more than 1 MiB or 4096 ops in all.
        """
    def watch(
        self,
        tag: int,
        prefix: str,
        *,
        exact: bool = False,
        snapshot: bool = False,
        from_revision: int | None = None,
    ) -> None:
        """Be told of changes; :class:`Reply` with this tag follows, and then :class:`Changes`.

        Args:
            tag: as in :meth:`txn`.
            prefix: how the keys begin.
            exact: it is the whole key.
            snapshot: the reply holds what is there at its revision; the watch goes on right after it.
            from_revision: begin with the changes of this revision. They follow the reply, those of this watch
                alone. The watch is refused when the store does not remember them any more.

        Raises:
            ValueError: a revision, in a session that may be taken up again.
        """
    def unwatch(self, prefix: str, *, exact: bool = False) -> None:
        """End a watch; what is on its way still comes."""
    def clock(self) -> tuple[int, int] | None:
        """The store's wall clock minus ours, and by how much that may be wrong, in nanoseconds; ``None``
        before the first keep-alive was answered.
        """
    def close(self) -> None:
        """End the session at once, whoever holds a duplicate of its socket. No event follows. Idempotent."""

# --- helpers --------------------------------------------------------------------------------------

def last_lines(path: str, count: int, max_bytes: int = 65536) -> list[bytes]:
    """The last ``count`` lines of a file, without their newlines, from its last ``max_bytes`` bytes."""

def check_limits(processes: int, files: int = 0, others: int = 0) -> None:
    """Compare with ``pids.max``, ``pid_max``, ``RLIMIT_NPROC`` and ``RLIMIT_NOFILE`` before anything is
    started.

    Args:
        processes: how many will be started.
        files: how many of their log files will be followed.
        others: further descriptors, those of timers and heartbeats.

    Raises:
        ValueError: names the limit and its value.
    """

def heartbeat_page() -> tuple[int, str]:
    """Make a page for the heartbeats of a worker that inherits it, for :meth:`Supervisor.adopt`.

    Returns:
        Its descriptor, which is the caller's; and what the worker finds in ``ELASTICRS_HEARTBEAT``.

    Raises:
        OSError: no descriptor, or no memory.
    """

def raise_descriptor_limit() -> int:
    """Raise the soft ``RLIMIT_NOFILE`` of this process to the hard one, as far as permitted.

    For a process that is all ours. Workers of supervisors that are made later get the limit that was.

    Returns:
        The soft limit that holds now.
    """

def children() -> list[int]:
    """The pids of this process's children, zombies as well. Right also where ``/proc`` is that of another pid
    namespace, in which these numbers are other processes.
    """

def name_of(pid: int) -> str:
    """The kernel's short name of a process, which may hold any character; empty when it is gone, or ``/proc``
    does not show it. A command line may take for ever to read.
    """

def patience_with(pid: int) -> float | None:
    """Seconds for which a process that cleans up after others (multiprocessing's resource tracker, torch's
    manager of shared memory) may go on when these have ended; ``None`` for any other process, and for one
    that is gone. Never blocks.
    """

def scoped_token(token: bytes, scope: str) -> str:
    """Derive a token that gives a client access only to the store's keys that begin with ``scope``."""

def order_stop_signals() -> None:
    """Keep the handlers of SIGTSTP and SIGCONT from interrupting each other: each hears of them in the order
    in which they came. Holds until one of them gets another handler.

    Raises:
        OSError: the kernel refused.
    """

def stop_unless_continued() -> None:
    """Stop this process, as with SIGSTOP, and return when it goes on.

    The calling thread has to block SIGTSTP and to have sent one to itself: a SIGCONT that came after that
    counts, also when it came before this call, and the process goes on at once.

    Raises:
        OSError: no memory, or too many processes.
    """

def nursery_main(start: str) -> int:
    """Be a nursery: for an interpreter that was started for this alone, where the embedded program cannot be
    executed.

    Returns:
        The exit code: 0, or an error number.
    """

def warm_nursery_begin(start: str) -> None:
    """Mark this process, and all that it starts, as a nursery's, before it imports."""

def warm_nursery_main(start: str) -> tuple[list[bytes], list[bytes]]:
    """Be a nursery whose workers are forks of it. The process must have one thread.

    Returns:
        In a worker: its arguments, and its environment, ``NAME=value`` each. In the nursery never.
    """
