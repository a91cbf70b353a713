"""Native part of elasticrs. Private: the public names are in the Python modules of this package.

Every call that can block releases the GIL. Rust threads never call into Python. They put events into a queue,
from which :meth:`Supervisor.next_event` returns them. Attributes named ``*_ns`` are times on the clock of
:func:`time.monotonic_ns`, in nanoseconds. All other times are in seconds.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypeAlias, final

__version__: str

# --- specifications -------------------------------------------------------------------------------

@final
class ProcessSpec:
    """Specification of one worker process.

    Args:
        local_rank: index of the worker in its group.
        argv: program and arguments. A program without a slash is searched for in the ``PATH`` of ``env``.
        env: complete environment.
        cwd: working directory; the agent's working directory if ``None``.
        stdin, stdout, stderr: path of a file, or ``None`` for the agent's own descriptor. The child opens the
            file for appending and creates it with mode 0644.
        pass_fds: file descriptors that the worker inherits under the same numbers. The worker inherits no
            other descriptors. Default: none.
        cpus: CPUs that the worker may run on; the agent's CPUs if ``None``.
        warm: true to fork the worker from the supervisor's :class:`WarmNursery`, if it has one.

    Raises:
        ValueError: ``argv`` or ``cpus`` is empty, a string contains a NUL byte, or the name of a variable
            contains ``=``.
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
    """Specifies how to stop workers: send ``signal`` first, and SIGKILL after ``grace`` seconds. All workers
    have the same deadline.

    Raises:
        ValueError: ``signal`` is not a signal number, or ``grace`` is negative or not finite.
    """

    def __new__(cls, signal: int, grace: float) -> StopPolicy: ...
    @property
    def signal(self) -> int: ...
    @property
    def grace(self) -> float: ...

@final
class GroupSpec:
    """Specification of a group: all workers of one attempt on this node. All workers must start within 30 s.

    Args:
        processes: the worker processes, for local ranks ``0..n-1`` in order.
        on_failure: how to stop the other workers as soon as the first worker fails.
        stop_scope: processes that receive stop signals other than SIGKILL. ``"worker"``: the worker, and the
            rest of its process group once the worker has exited. ``"group"``: the worker's whole process
            group. Default: ``"group"``.
        linger: seconds for which descendants may continue after all workers have exited with 0. After that
            they get SIGTERM, and SIGKILL one second later. ``None`` lets the descendants continue without
            limit. If the group fails or is stopped, its descendants are killed at once. Default: 5.
        keep_ignored: signals that stay ignored in the workers (``nohup``). Default: none.
        replaces: true if a failing worker does not stop the others. The supervisor kills the failed worker's
            leftover processes and reports :class:`WorkerSwept`. After that, :meth:`Supervisor.replace` can
            start a replacement. The group ends when the last process of each local rank has exited with 0,
            when it is stopped (then the outcome is ``"stopped"``, even if workers have failed), or when its
            nursery is lost. ``on_failure`` then applies only to a worker that is still running although it
            has failed, for example because its timer has expired. If a worker does not exit within 30 s after
            SIGKILL, the whole group fails. Each worker is a child subreaper, so that its orphaned descendants
            become its children.
        keep_grace: longest time in seconds for which a stop waits until the workers that use
            ``elasticrs.Keep`` have copied their training state. :class:`StateKept` then reports the copies.
            0, the default, means that the workers are not asked for copies.
    """

    def __new__(
        cls,
        processes: Sequence[ProcessSpec],
        *,
        on_failure: StopPolicy,
        stop_scope: str = "group",
        linger: float | None = ...,
        keep_ignored: Sequence[int] = ...,
        replaces: bool = False,
        keep_grace: float = 0.0,
    ) -> GroupSpec: ...

# --- events ---------------------------------------------------------------------------------------

@final
class Warmed:
    """A warm nursery has finished its imports, or has exited without finishing them. If it has exited,
    workers start cold.
    """

    @property
    def is_ready(self) -> bool: ...
    @property
    def exitcode(self) -> int | None:
        """Exit status of the nursery, as in :attr:`WorkerExited.exitcode`."""
    @property
    def hung(self) -> bool:
        """True if the supervisor killed the nursery because its time limit expired."""

@final
class GroupStarted:
    """All workers of the group have been started and are running their program."""

    @property
    def pids(self) -> list[int]:
        """Pids of the workers, in the order of the local ranks."""
    @property
    def started_ns(self) -> int: ...

@final
class StartFailed:
    """The group could not be started, and all its processes have exited. Another group may be started."""

    @property
    def message(self) -> str:
        """One line that says what failed, for which local rank, and why."""
    @property
    def local_rank(self) -> int:
        """Local rank of the worker that could not be started; 0 if there is no nursery, so that no worker
        could be started.
        """
    @property
    def stage(self) -> str | None:
        """Step that failed, as a verb phrase: ``"execute"``, ``"open the log file"``, …; ``None`` if the step
        is unknown, or if there is no nursery.
        """
    @property
    def errno(self) -> int | None:
        """Error number of the failed step; ``None`` if the start hung until its deadline."""
    @property
    def subject(self) -> str | None:
        """Program, directory or file that could not be used."""

@final
class WorkerExited:
    """A worker has exited. Reported once for each worker."""

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of the signal; ``None`` if it is unknown, because the worker's
        parent process has died.
        """
    @property
    def sent_signal(self) -> int | None:
        """Last signal that the supervisor sent to the worker; ``None`` if it sent none."""
    @property
    def seen_ns(self) -> int:
        """Time when the supervisor noticed the exit. Exits that are noticed together have the same time."""

@final
class FailureSeen:
    """The first failure of a worker in the group. The other workers have already been signalled."""

    @property
    def local_rank(self) -> int: ...
    @property
    def seen_ns(self) -> int: ...
    @property
    def signalled_ns(self) -> int:
        """Time when all other workers had been signalled."""
    @property
    def siblings(self) -> int:
        """Number of other workers that were signalled."""

@final
class StateKept:
    """The workers that use ``elasticrs.Keep`` have copied their training state because they are about to be
    stopped, or the time limit for that has passed. The stop signal has just been sent to them. Reported at
    most once for each group.
    """

    @property
    def asked(self) -> list[int]:
        """Local ranks of the workers that were ordered to copy their training state."""
    @property
    def answered(self) -> list[int]:
        """Local ranks of the workers that answered in time. An answer may be that a copy was impossible."""
    @property
    def begun_ns(self) -> int:
        """Time at which the workers were ordered to copy, in nanoseconds of the monotonic clock."""
    @property
    def ended_ns(self) -> int: ...

@final
class WorkerSwept:
    """All processes of a failed worker have exited, so that it can be replaced. Reported once for each worker
    that fails in a group with ``replaces``, after :class:`WorkerExited`, unless the group ends first.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def ended(self) -> list[Descendant]:
        """The first few descendants that had to be killed. A descendant may have left its worker's session.
        If several workers fail together, such descendants are listed only in the first event.
        """
    @property
    def more_ended(self) -> int:
        """Number of further descendants that had to be killed."""
    @property
    def stuck(self) -> list[Descendant]:
        """Descendants that could not be killed."""

@final
class WorkerReplaced:
    """The replacement for a failed worker is running."""

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def started_ns(self) -> int: ...

@final
class ReplaceFailed:
    """The replacement for a worker could not be started, and all its processes have exited. Another
    replacement may be started.

    If the start hung until its deadline, the nursery is lost, and the group ends.
    """

    @property
    def message(self) -> str:
        """One line that says what failed, for which local rank, and why."""
    @property
    def local_rank(self) -> int: ...

@final
class TimerExpired:
    """An expiration timer of a worker or of one of its descendants has expired. If the timer specifies a
    signal, the signal has been sent, the worker counts as failed, and :class:`FailureSeen` follows. Otherwise
    the event is only a notice.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int:
        """Pid of the process that acquired the timer."""
    @property
    def scope(self) -> str: ...
    @property
    def at(self) -> str | None:
        """File and line of the code block that the timer guards; ``None`` if the client did not send them."""
    @property
    def deadline(self) -> float:
        """Time when the timer expired, on the worker's wall clock in seconds since 1970."""
    @property
    def others(self) -> int:
        """Number of other timers that the process holds."""
    @property
    def signal(self) -> int | None: ...
    @property
    def seen_ns(self) -> int: ...

@final
class Heartbeat:
    """Last heartbeat that a worker sent with :func:`elasticrs.timer.heartbeat`."""

    @property
    def local_rank(self) -> int: ...
    @property
    def at_ns(self) -> int:
        """Time of the heartbeat, in nanoseconds of the monotonic clock."""
    @property
    def step(self) -> int | None: ...
    @property
    def is_global(self) -> bool:
        """True if the worker counts its steps across restarts."""
    @property
    def is_automatic(self) -> bool:
        """True if the steps are optimizer steps that this library has counted since the worker's start."""
    @property
    def section(self) -> str | None:
        """Name of the section that the worker was in; ``None`` if it was in none."""
    @property
    def has_returned(self) -> bool:
        """True if the worker's program had returned, and its process was exiting."""

@final
class RankSeen:
    """State of a worker at the time when a hang was detected."""

    @property
    def local_rank(self) -> int: ...
    @property
    def heartbeat(self) -> Heartbeat | None: ...
    @property
    def is_late(self) -> bool:
        """True if at least half of the worker's time limit has passed."""
    @property
    def state(self) -> str:
        """Process state as one letter, as in ``/proc/PID/stat``; empty if unknown."""
    @property
    def wait_channel(self) -> str:
        """Kernel function in which the worker waits; empty if it cannot be read."""
    @property
    def frame(self) -> str | None:
        """Innermost stack frame of the worker's Python program; ``None`` if unknown."""

@final
class WorkerHung:
    """A worker missed its heartbeat deadline. It counts as failed, and :class:`FailureSeen` follows.

    If several workers missed their deadline, the event names the worker that most likely blocks the others.
    The event is also reported when a worker on another node hangs and a worker on this node may be blocking
    it (see ``hung_for`` of :meth:`Supervisor.stop`). In that case the group is stopped, and no
    :class:`FailureSeen` follows.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def missed(self) -> Literal["startup", "step", "section", "exit", "line"]:
        """Event that did not happen in time: the first heartbeat, the next heartbeat, the end of a section,
        the exit of the process after the program had returned, or a line of output.
        """
    @property
    def since_ns(self) -> int:
        """Time of the worker's last heartbeat or line of output, in nanoseconds of the monotonic clock. If
        the worker sent neither, the start time of its process.
        """
    @property
    def limit(self) -> float:
        """The time limit that the worker exceeded, in seconds."""
    @property
    def seen_ns(self) -> int:
        """Time when the hang was detected."""
    @property
    def ground(self) -> Literal["stopped", "behind", "elsewhere", "apart", "oldest"]:
        """Reason for blaming this worker instead of the other workers that missed their deadline.

        ``"stopped"``: a signal has stopped it. ``"behind"``: it is the only worker that is a step behind the
        others. ``"elsewhere"``: it is the only worker at a different place in the program. ``"apart"``: its
        last heartbeat is the oldest, and no other worker is at the same place in the program. ``"oldest"``:
        its last heartbeat is the oldest.
        """
    @property
    def ranks(self) -> list[RankSeen]:
        """State of each worker that was running when the hang was detected."""

@final
class WorkerRaised:
    """A worker has recorded an uncaught exception and is about to exit. If the worker does not exit within
    its time limit, a second event is sent, the worker counts as failed, and :class:`FailureSeen` follows.
    """

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int:
        """Pid of the process that recorded the exception: the worker or a descendant."""
    @property
    def text(self) -> str:
        """Last part of the traceback, as the process sent it. Empty if it sent none."""
    @property
    def seen_ns(self) -> int:
        """Time when the exception was recorded, in nanoseconds of the monotonic clock. If the process did not
        send this time, the time when the supervisor received the notice.
        """
    @property
    def limit(self) -> float | None:
        """Time limit for the exit, in seconds after ``seen_ns``. ``None`` if there is no limit."""
    @property
    def origin(self) -> Literal["own", "peer", "unknown"]:
        """``"own"``: another worker's exit cannot have caused the exception. ``"peer"``: the exception only
        reports that another worker is lost or does not answer. ``"unknown"``: another worker's exit may have
        caused the exception.
        """
    @property
    def exit(self) -> Literal["begun", "slow", "stalled"]:
        """``"begun"``: the exception has just been recorded. ``"slow"``: the time limit has passed, but the
        exit makes progress. The group is stopped, and the worker may finish its exit within the grace period.
        ``"stalled"``: the time limit has passed and the exit makes no progress. The worker gets SIGKILL.
        """

@final
class WorkersKilled:
    """SIGKILL is sent to workers now, because they did not exit in time or because of a second request."""

    @property
    def local_ranks(self) -> list[int]: ...
    @property
    def pids(self) -> list[int]: ...
    @property
    def reason(self) -> Literal["signal", "slow exit", "stalled exit", "request"]:
        """``"signal"``: the workers did not exit within the grace period after a signal. ``"slow exit"``: the
        workers had raised an uncaught exception, got no signal, and were still exiting at the end of the
        grace period, although the exit made progress. ``"stalled exit"``: the workers had raised an uncaught
        exception, and their exit made no progress. ``"request"``: SIGKILL was requested
        while the workers were already being stopped.
        """
    @property
    def signal(self) -> int | None:
        """Signal after which the workers did not exit in time; ``None`` if the reason is not ``"signal"``."""
    @property
    def limit(self) -> float:
        """Time that the workers had for their exit, in seconds: the grace period or, for a stalled exit, the
        maximum time without progress. It is 0 if the reason is ``"request"``.
        """

@final
class WorkerPaused:
    """A worker has been paused for one second by a signal (SIGSTOP, SIGTSTP, …) that this process did not
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
    """A worker that was reported by :class:`WorkerPaused` is running again."""

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
        """Kernel's short name of the program, at most 15 bytes; empty if the process had already exited."""

@final
class Fenced:
    """The deadline that :meth:`Supervisor.fence_at` set has passed, and the nursery is killing all workers.

    Reported at once, even if there is no group. If a group is running, it ends with the outcome
    ``"stopped"``, and the ``sent_signal`` of its workers is SIGKILL. No worker can be started until a new
    deadline is set or the deadline is cancelled.
    """

@final
class GroupEnded:
    """All processes of the group have exited. Another group may be started.

    ``outcome`` is ``"succeeded"`` (all workers exited with 0), ``"failed"`` (a worker failed), ``"stopped"``
    (by :meth:`Supervisor.stop` or because of :class:`Fenced`), or ``"lost"`` (the nursery died, and the
    workers with it).
    """

    @property
    def outcome(self) -> Literal["succeeded", "failed", "stopped", "lost"]: ...
    @property
    def nursery_exitcode(self) -> int | None:
        """Exit status of a lost nursery, as in :attr:`WorkerExited.exitcode`; ``None`` if the nursery was not
        lost.
        """
    @property
    def nursery_hung(self) -> bool:
        """True if the nursery was lost because it did not respond and the supervisor killed it."""
    @property
    def stuck_ranks(self) -> list[int]:
        """Local ranks of workers that did not exit after SIGKILL (state D). If there are any, the node is
        unfit for another attempt.
        """
    @property
    def wait_channels(self) -> list[str]:
        """For each of ``stuck_ranks``, the kernel function in which the worker waits; empty if unreadable."""
    @property
    def ended(self) -> list[Descendant]:
        """First few of the descendants that had to be signalled."""
    @property
    def more_ended(self) -> int:
        """Number of further descendants that had to be signalled."""
    @property
    def stuck(self) -> list[Descendant]:
        """Descendants that could not be killed."""
    @property
    def spared(self) -> list[Descendant]:
        """Descendants that were allowed to continue."""
    @property
    def ended_ns(self) -> int: ...

@final
class LogTrouble:
    """A log file cannot be read, or its file system is full. Reported once for each file."""

    @property
    def local_rank(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def errno(self) -> int: ...

@final
class Degraded:
    """A feature of the supervisor is impaired, for example the output to the console. The job continues."""

    @property
    def message(self) -> str: ...

@final
class FdReady:
    """A file descriptor that was passed to :meth:`Supervisor.watch_fd` is readable."""

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
    | StateKept
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

# --- the supervisor -------------------------------------------------------------------------------

class SupervisorError(Exception):
    """The supervisor cannot do what was requested: it was closed, its runtime panicked (in this case the
    workers have been killed), a group is already running, no group is running, or this process is a forked
    child.
    """

@final
class LogStream:
    """A log file to follow.

    Args:
        local_rank: local rank of the worker that writes to the file.
        path: path of the file, which may not exist yet.
        to: 1 or 2 to copy the lines to this descriptor of the agent; the path of a file to append the lines
            that ``contains`` selects; ``None`` to copy nothing.
        prefix: text before every line, including colour codes.
        contains: texts to search for. If ``to`` is a path, only lines that contain at least one of them are
            copied.
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
    """A nursery that runs the workers' own program: it imports the workers' modules and then forks the
    workers.

    Args:
        process: the workers' arguments, and the common part of their environment. The nursery gets a start
            value in ``ELASTICRS_NURSERY_START``, which it passes to :func:`warm_nursery_main` after its
            imports.
        report_fd: file descriptor for the nursery's report. The nursery inherits it as descriptor 6.
        limit: time limit for the imports, in seconds.
        ignored: signals that are ignored in the workers.

    Raises:
        OSError: ``report_fd`` is not open, or the process has run out of file descriptors.
        ValueError: ``limit`` is not a valid duration, or ``ignored`` contains a number that is not a signal.
    """

    def __new__(
        cls, process: ProcessSpec, *, report_fd: int, limit: float, ignored: Sequence[int] = ...
    ) -> WarmNursery: ...

@final
class Supervisor:
    """Starts, monitors and stops the workers of one agent, one group at a time.

    Args:
        owns_process: true if the process belongs to the launcher alone (the command line). The process then
            becomes a child subreaper, so that no processes remain even if the nursery is lost. False in a
            host application, whose own children the supervisor never touches.
        in_interpreter: true to run the nursery (the process that starts the workers) in a Python interpreter
            that loads this extension. By default, the nursery is a program that is embedded in the extension,
            and the interpreter is used only if that program cannot be executed from memory.
        warm: nursery that imports modules first; preferred over the other nurseries. Groups wait until its
            imports have finished, and :class:`Warmed` reports the result.

    Raises:
        SupervisorError: no nursery could be started.
        OSError: the kernel is too old (below 5.4), or the process has run out of file descriptors.
    """

    def __new__(
        cls,
        *,
        owns_process: bool = False,
        in_interpreter: bool = False,
        warm: WarmNursery | None = None,
    ) -> Supervisor: ...
    @property
    def nursery_pid(self) -> int | None: ...
    def start(self, group: GroupSpec) -> None:
        """Start all workers of a group, or none of them. Returns at once. :class:`GroupStarted` or
        :class:`StartFailed` reports the result.

        A :class:`GroupEnded` without either event means that the group was stopped, or that its nursery was
        lost, before all workers were running.

        Raises:
            SupervisorError: a group is running; see also the class.
            OSError: the process has run out of file descriptors, or one of ``pass_fds`` is not open.
        """
    def replace(self, process: ProcessSpec) -> None:
        """Start a replacement for a worker that has failed and was reported by :class:`WorkerSwept`, in a
        group with ``replaces``. Returns at once. The result is reported by :class:`WorkerReplaced` or
        :class:`ReplaceFailed`, or by the end of the group.

        The settings of the group apply to the replacement as well, and it must start within 30 s. Its log
        files are followed only if :meth:`follow` is called for them. The log files of the replaced worker are
        no longer followed.

        Raises:
            SupervisorError: the worker is running, has succeeded, or was not swept yet; the group is being
                stopped, or does not replace workers; no group is running; see also the class.
            OSError: the process has run out of file descriptors, or one of ``pass_fds`` is not open.
        """
    def adopt(
        self, local_rank: int, pid: int, status_fd: int | None = None, page_fd: int | None = None
    ) -> None:
        """Add a process that Python started to the running group, and supervise it.

        Args:
            local_rank: local rank of the process.
            pid: pid of the process.
            status_fd: needed if this process is not the parent: a pipe into which the parent writes the
                status from ``wait4``, as a C ``int``. The caller must close it.
            page_fd: descriptor from :func:`heartbeat_page`, for a process that has inherited it and has not
                started its work yet. The supervisor then watches the heartbeats of the process. Such
                processes must be adopted in the order of their ranks, from 0. The caller must close the
                descriptor.

        Raises:
            ProcessLookupError: the process does not exist.
            OSError: ``page_fd`` is not a heartbeat page.
            SupervisorError: no group is running. An empty group may be started for this purpose.
        """
    def stop(
        self,
        policy: StopPolicy,
        *,
        hung_for: float | None = None,
        hung_step: int | None = None,
        hung_frame: str | None = None,
    ) -> None:
        """Stop the group. Returns at once; :class:`GroupEnded` reports that the group has been stopped. A
        later call sends its own signal, and can shorten the grace period but not extend it.

        Args:
            policy: signal and grace period.
            hung_for: if a hung worker on another node is the reason, the seconds since that worker's last
                heartbeat. If heartbeats are watched on this node, the state of all its workers is recorded
                first, for at most 2 s. :class:`WorkerHung` then names the worker that may have kept the hung
                worker waiting. Only a worker that has been silent for at least half of ``hung_for``, or for
                half of its own limit, can be named.
            hung_step: training step of the hung worker; ``None`` if unknown.
            hung_frame: stack frame of the hung worker's main thread, as in :class:`RankSeen`; ``None`` if
                unknown.
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
        """Suspend all groups with SIGSTOP, and pause their deadlines, until :meth:`resume` is called."""
    def resume(self) -> None: ...
    def renew_nursery(self) -> bool:
        """Stop the nursery, because files of imported modules have changed. The next start of workers
        launches a new nursery and waits until that nursery has imported the modules again. :class:`Warmed`
        reports the result of the imports.

        Return false, and do not stop the nursery, if a group of workers exists or if the fence has passed.

        Raises:
            SupervisorError: see the class.
        """
    def guard_connection(self, fd: int) -> None:
        """Let the nursery hold a duplicate of this socket.

        If this process dies, the nursery keeps the connection open until it has killed all workers and their
        descendants. A later call replaces the socket. If the nursery is lost, its replacement holds the
        socket as well.

        Raises:
            OSError: ``fd`` is not open, or the process has run out of file descriptors.
            SupervisorError: see the class.
        """
    def release_connection(self) -> None:
        """Let the nursery close the socket that :meth:`guard_connection` gave it."""
    def watch_timers(self, path: str | PathLike[str] | None = None) -> str:
        """Create a FIFO and read the workers' expiration timers from it, until :meth:`close` removes the
        FIFO.

        Its records have the format of torch's ``FileTimerClient``. :class:`TimerExpired` reports expired
        timers, and :class:`Degraded` reports rejected records. Only workers and their descendants are ever
        signalled.

        Args:
            path: path of the FIFO; ``None`` for a new directory that only this user can enter. An existing
                FIFO of this user is used if no process reads from it.

        Returns:
            Path of the FIFO.

        Raises:
            FileExistsError: another file exists at ``path``.
            OSError: another process reads from the FIFO, the directory does not exist, or timers are already
                watched.
        """
    def watch_hangs(
        self,
        limit: float | None,
        *,
        startup: float | None = None,
        exit_limit: float | None = None,
        least: float | None = None,
        stop_delay: float = 0.0,
    ) -> None:
        """Give a memory page for heartbeats (``ELASTICRS_HEARTBEAT``) to each worker of groups that are
        started later, and watch these workers for hangs. :class:`WorkerHung` reports a hung worker.

        Args:
            limit: maximum number of seconds between two heartbeats or lines of output of a worker. ``None``
                to learn the limit from the job's own steps.
            startup: maximum number of seconds from the start of a group to the first heartbeat or line of
                output of each worker. ``None`` for no limit.
            exit_limit: maximum number of seconds from the return of a worker's program to the exit of its
                process. ``limit`` does not apply during that time. ``None`` for no limit.
            least: minimum of a learned limit, in seconds. ``None`` for one minute.
            stop_delay: seconds between reporting a hang and stopping the workers, so that other nodes have
                time to gather evidence about their own workers.

        Raises:
            ValueError: a limit is not finite, or not above 0.
        """
    def keep_evidence(
        self, files: Sequence[tuple[str, str]], *, py_spy: str | PathLike[str] | None = None
    ) -> None:
        """Set the files into which the state of the workers is written when a worker hangs or a timer
        expires.

        Args:
            files: two paths for each worker of the group that is started next, by local rank: the file into
                which :mod:`faulthandler` writes in the worker, and the file for the worker's state and
                stacks.
            py_spy: path of the ``py-spy`` program, for workers that do not respond; ``None`` if it is not
                installed.
        """
    def watch_exits(self, limit: float | None = None) -> str:
        """Detect workers of the next group that record an uncaught exception but do not exit.
        :class:`WorkerRaised` reports the exception, and an expired time limit.

        Args:
            limit: seconds within which a worker must exit after the exception; ``None`` for no limit.

        Returns:
            Name of an abstract socket. A worker that records an exception sends a datagram to it, and the
            kernel identifies the sender.

        Raises:
            ValueError: the limit is negative or not finite.
            OSError: the process has run out of file descriptors.
        """
    def heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of each worker in the current or last group, except workers without a
        heartbeat.
        """
    def fence_at(self, from_now: float | None) -> bool:
        """Set the time at which the nursery kills all workers, even if this process is paused at that time.

        Args:
            from_now: seconds from now, on a clock that also runs while the machine is suspended; ``None``
                cancels the deadline.

        Returns:
            ``False`` if the previous deadline had already passed. In this case, :class:`Fenced` reports it or
            has already reported it.

        Raises:
            ValueError: the time is not finite.
        """
    def next_event(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event and return it. Return ``None`` after ``timeout`` seconds. Only one thread
        may call this at a time.

        In the main thread, Python's signal handlers run as soon as a signal arrives, and this method raises
        their exceptions. If a signal arrives immediately before the wait starts, its handler may run up to 5
        seconds later. To avoid that delay, watch a descriptor from :func:`signal.set_wakeup_fd`.

        Raises:
            SupervisorError: see the class.
        """
    def watch_fd(self, fd: int) -> None:
        """Watch a file descriptor. While ``fd`` is readable, :meth:`next_event` returns :class:`FdReady`."""
    def unwatch_fd(self, fd: int) -> None: ...
    def follow(self, streams: Sequence[LogStream]) -> None:
        """Copy the contents of these files to the console, as whole lines, until their group has ended."""
    def drain(self, timeout: float) -> list[LogStream]:
        """Wait for at most ``timeout`` seconds until the files of ended groups have been copied to the
        console. Return the files that have not been copied completely.
        """
    def close(self, keep_descendants: bool = False) -> None:
        """Kill the remaining processes (unless ``keep_descendants``), and stop the nursery and the runtime
        thread. Idempotent.
        """

# --- health check server and stores ---------------------------------------------------------------

WorkersState: TypeAlias = Literal["INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED"]
Activity: TypeAlias = Literal["starting", "productive", "restarting", "waiting_for_nodes", "hung"]
RestartCause: TypeAlias = Literal[
    "worker_failed", "worker_hung", "timer_expired", "start_failed", "nursery_lost", "port_taken", "nodes"
]

@final
class HealthServer:
    """Server that reports the health of an agent over HTTP. It has its own thread, and cannot be used in
    children made by ``fork``.

    Args:
        host: address to listen on.
        port: port to listen on; 0 for any free port; ``None`` for none. The server then answers only over the
            socket of :meth:`open_control`, has no metrics, and has no thread before the first connection.
        limit: seconds after which an agent that does not respond or makes no progress counts as dead.
        age: seconds since the agent began.

    Raises:
        OSError: the address cannot be used, or there are no more file descriptors or threads.
    """

    def __new__(cls, host: str, port: int | None, limit: float, age: float = 0.0) -> HealthServer: ...
    @property
    def port(self) -> int:
        """Port on which the server listens; 0 if it has none."""
    @property
    def fd(self) -> int:
        """File descriptor that is readable while a request waits for :meth:`answer`, or an order for
        :meth:`take_orders`.
        """
    def open_control(self, folder: str, supervisor: Supervisor) -> None:
        """Also answer over the Unix socket ``PID.sock``, the control socket. Over it, programs of this user,
        and of root, can send orders to the agent.

        Args:
            folder: folder of the socket, which is created if it is missing.
            supervisor: its thread waits for the first connection.

        Raises:
            OSError: other users can use the folder, or the socket cannot be created.
        """
    def close_control(self) -> None:
        """Remove the control socket. Open connections stay open. Idempotent."""
    def outline(
        self,
        job: tuple[str, str, str, int, int, str | None],
        attempt: tuple[str, int, int, tuple[int, int, int], str | None, list[tuple[int | None, int, int]]]
        | None = None,
    ) -> None:
        """Set the facts that the server tells as the status as long as nothing has been published.

        Args:
            job: run id, role, name, number of workers on this node, maximum number of restarts, and path of
                the file of events (``None`` without one).
            attempt: name, round, number of restarts, group rank and number of nodes and of workers, folder of
                the log files (``None`` without any), and the workers: global rank, local rank and pid.
        """
    def take_orders(self) -> list[tuple[int, int, int | None, str]]:
        """Return the orders that have arrived since the last call, in order.

        Returns:
            the number of each order, the user id and the pid of the program that has sent it (``None`` if
            that program is in another pid namespace), and the text of the order.
        """
    def wants_page(self) -> bool:
        """Return true if browsers wait for a new text of the page, once for each time that they do. Then the
        agent calls :meth:`tell_page` before :meth:`answer`.
        """
    @property
    def viewers(self) -> int:
        """Number of browsers that listen to the events of the page."""
    def tell_page(self, text: str) -> None:
        """Set the text that the page for browsers shows, a JSON object. The browsers get it with the next
        :meth:`answer`, or with :meth:`close`.
        """
    def status(self) -> str:
        """Return the status of the job as JSON, as ``/status`` shows it."""
    def reply(self, number: int, line: str, *, is_last: bool = False) -> None:
        """Send a line to the program that has sent the order with this number, unless it has gone.

        Args:
            number: number of the order.
            line: line of text, without a newline.
            is_last: true for the last line of the answer.
        """
    def answer(self, age: float, supervisor: Supervisor | None = None, doing: str | None = None) -> None:
        """Report that the agent's loop is alive.

        Args:
            age: seconds since the agent's last progress.
            supervisor: if given, the report passes through the supervisor's thread, so that a hang of that
                thread is detected as well.
            doing: current activity of the agent, which is reported if the last progress is too long ago.
        """
    def show(self, supervisor: Supervisor, *, is_asked: bool = False) -> None:
        """Include the counters of this supervisor in the metrics.

        Args:
            supervisor: supervisor of the agent.
            is_asked: true if the loop that receives the supervisor's events also answers the health requests.
                If this loop does not call :meth:`Supervisor.next_event` for longer than the limit, the next
                health check reports the agent as dead.
        """
    def watch_files(self, files: Sequence[tuple[int, int, str]], are_new: bool) -> None:
        """Count the bytes in log files for the metrics, if the supervisor does not read the files. Call this
        at the start of an attempt.

        Args:
            files: local rank, descriptor (1 or 2) and path of each file. No file may be listed twice.
            are_new: true if none of the files existed before. If false, bytes that a file contains at the
                first check are not counted.

        Raises:
            ValueError: a descriptor is not 1 or 2.
            OSError: no thread could be created.
        """
    def watch_steps(self, fds: list[int]) -> None:
        """Show the workers' training steps in the metrics. The server reads them at each scrape.

        Args:
            fds: by local rank, the files in memory into which the workers write their steps
                (:mod:`elasticrs._engine.inside.keep.layout`). The server duplicates the descriptors.

        Raises:
            OSError: a descriptor is not open, or there are no more file descriptors.
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
        """Count the bytes in the watched log files for the last time, because their workers have exited."""
    def publish(
        self, state: WorkersState, status: str, workers: Sequence[tuple[int, int, int]] | None = None
    ) -> None:
        """Publish the state of the job.

        Args:
            state: state of the workers. The workers count as ready only in the state ``HEALTHY``.
            status: JSON object for ``/status``.
            workers: rank, local rank and pid of each running worker; unchanged if ``None``.

        Raises:
            ValueError: the state is unknown, or ``status`` is not a JSON object.
        """
    def enter(self, activity: Activity) -> None:
        """Record the current activity of the job. The time until the next call counts as time for this
        activity.

        Raises:
            ValueError: the activity is unknown.
        """
    def was_hung(self, seconds: float) -> None:
        """Count this many seconds of productive time as hung time instead."""
    def restarted(self, cause: RestartCause) -> None:
        """Count a restart of the workers.

        Raises:
            ValueError: the cause is unknown.
        """
    def recovered(self, seconds: float) -> None:
        """Record that the workers are running again, this many seconds after a failure."""
    def put(self, group: str, name: str, value: float) -> None:
        """Record a metric that was passed to ``put_metric``."""
    def take_notices(self) -> list[str]:
        """Return the lines for the user that were added since the last call."""
    def close(self) -> None:
        """Close the port and stop the thread. Return when this is done. Idempotent."""

@final
class TimerFifo:
    """FIFO from which only this process reads timer records. Closing this object removes the FIFO.

    Args:
        path: path of the FIFO. An existing FIFO is used if it belongs to this user, no other user may open
            it, and no process reads from it.

    Raises:
        FileExistsError: another file exists at the path.
        OSError: another process reads from the FIFO (``EBUSY``), or the FIFO cannot be created.
    """

    def __new__(cls, path: str | PathLike[str]) -> TimerFifo: ...
    @property
    def fd(self) -> int:
        """File descriptor that is readable while :meth:`read` has data."""
    def read(self) -> tuple[list[tuple[int, str, float, int]], list[str]]:
        """Return the records that have been written, at most 1 MiB. Never blocks.

        Returns:
            The records, and lines for the user about rejected records (each kind at most once a minute). A
            record contains the pid, the scope, the expiration time in seconds since 1970 (negative to release
            the timer), and the signal (0 for none).
        """
    def close(self) -> None:
        """Remove the FIFO, unless the file at its path has been replaced. Idempotent."""

@final
class WorkerStore:
    """Server for torch's ``TCPStore`` clients (2.4 and later). It is the store of one round's workers.

    The constructor binds the port and listens, so that clients can connect. :meth:`serve` starts answering
    them. If a client misbehaves (it does not use the protocol of ``TCPStore``, exceeds the protocol's limits,
    stays silent, or does not read replies), only its connection is closed, with one line for the user. All
    data that the clients store is limited to 1 GiB.

    Args:
        host: name or address to listen on; every IPv6 and IPv4 address if ``None``.
        ports: first and last port of a range, of which the first free port is used. ``None`` for any free
            port.

    Raises:
        OSError: no port could be bound, or the process has run out of file descriptors. The message contains
            the address and the port.
        OverflowError: a number is not a port number.
    """

    def __new__(cls, host: str | None = None, ports: tuple[int, int] | None = None) -> WorkerStore: ...
    @property
    def port(self) -> int: ...
    def serve(self, supervisor: Supervisor | None = None) -> None:
        """Start to answer clients, on the thread that all stores of a process share. Returns at once.

        With a supervisor, the supervisor's thread waits for the first client, before the shared thread takes
        over. Lines for the user are then reported as :class:`Degraded`. Without a supervisor,
        :meth:`take_notices` returns the lines.

        Raises:
            SupervisorError: the store is already served or closed, or the supervisor has stopped.
            OSError: there are no more threads or file descriptors.
        """
    def waiting(self) -> dict[str, list[str]]:
        """Return the keys for which each client is waiting, by the address of the client. With torch 2.5 and
        later, the address includes the client's pid.

        At most 256 clients are listed (those that have waited longest), with at most 16 keys each. If there
        are more clients, an entry without keys contains their number.
        """
    def take_notices(self) -> list[str]:
        """Return the lines for the user that were added since the last call, if there is no supervisor. Never
        blocks.

        At most 10 lines are added in 10 seconds, and at most 256 lines are kept. A separate line contains the
        number of dropped lines.
        """
    def close(self) -> None:
        """Close the listener and every connection. Return when they are closed. Idempotent.

        Waiting clients fail at once.
        """

# --- the rendezvous store -------------------------------------------------------------------------

@final
class Entry:
    """A key of the store with its value, as returned by a read."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes: ...
    @property
    def create_revision(self) -> int:
        """Revision that created the key. Overwriting the value does not change it."""
    @property
    def mod_revision(self) -> int:
        """Revision of the last change of the key."""

@final
class Change:
    """Change that one revision made to a key."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes | None:
        """New value; ``None`` if the key was deleted."""
    @property
    def create_revision(self) -> int: ...
    @property
    def mod_revision(self) -> int: ...

@final
class Connected:
    """The client has opened its session with the store."""

    @property
    def revision(self) -> int:
        """Revision of the store when the session was opened."""
    @property
    def session(self) -> int:
        """Number of the session. The store never gives this number to another session."""
    @property
    def ttl(self) -> float:
        """Time to live of the session: seconds from the last keep-alive until the store ends the session."""
    @property
    def interval(self) -> float:
        """Seconds between keep-alives. A store with very many clients may set a longer interval than
        requested.
        """
    @property
    def local_address(self) -> str:
        """Local address of the connection. Other hosts in the store's network can reach this host at this
        address.
        """

@final
class Reply:
    """Response to a transaction or a watch.

    All changes up to :attr:`revision` that match this client's watches have been reported before the
    response.
    """

    @property
    def tag(self) -> int: ...
    @property
    def ok(self) -> bool:
        """For a transaction: true if all compares held and ``then`` was applied, false if ``otherwise`` was
        applied. For a watch: true if it has started, false if it was refused.
        """
    @property
    def revision(self) -> int:
        """Revision of the store when it processed the request."""
    @property
    def results(self) -> list[int | Entry | list[Entry] | None]:
        """One result for each operation of a transaction: the number of changed keys for ``put`` and the
        deletes, an entry or ``None`` for ``get`` and ``predecessor``, and a list of entries for ``range``.
        For a watch: the entries if ``snapshot`` was set, otherwise nothing. For a refused watch: the oldest
        revision that can still be requested.
        """

@final
class Changes:
    """All changes of one revision that match this client's watches, in the order of the transaction."""

    @property
    def revision(self) -> int: ...
    @property
    def changes(self) -> list[Change]: ...

@final
class StoreNotice:
    """The store has stopped responding, or responds again. Reported only for sessions that can be resumed."""

    @property
    def message(self) -> str:
        """One line for the user: the store has stopped responding, or responds again."""

@final
class ConnectionLost:
    """The session has ended. This is always the last event."""

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
        """One line for the user, which says why the session has ended."""

StoreEvent: TypeAlias = Connected | Reply | Changes | StoreNotice | ConnectionLost

@final
class CoordinationServer:
    """The rendezvous store. It serves clients as soon as it is created.

    Args:
        addresses: hosts and ports to listen on. An empty host means all interfaces, IPv4 and IPv6. With port
            0, the kernel chooses the port for the first address, and the others use the same port.
        run_id: identifier of the run. Clients of other runs are refused. If ``None``, the clients of all runs
            are served and see the same keys.
        token: token that clients must know in addition; ``None`` for none.
        max_connections: maximum number of connections. Further clients are refused.
        max_bytes: maximum size of all data that the store keeps for clients: keys, values, watches,
            incomplete requests and unread replies. If the size is exceeded, the client with the most data is
            disconnected.
        request_timeout: seconds that a request may take from its first byte to its last.
        state: file in which the store saves its data. The store writes a change to disk before it notifies
            any client of the change. A store that is started with an existing file continues with the saved
            data, and its sessions get their full time to live to reconnect.
        grace: with ``state``, the minimum time to live of a session, in seconds.
        supervisor: report lines for the user as :class:`Degraded` events of this supervisor; if ``None``,
            :meth:`take_notices` returns them. All coordination stores of a process share one thread. It is
            neither the supervisor's thread nor the thread of the workers' stores.

    Raises:
        OSError: an address cannot be used (the message contains the address and the port), or there are no
            more threads.
        RuntimeError: the state file cannot be used. The file has not been changed.
        ValueError: there is no address, the token is empty, the run id has more than 512 bytes, or a time is
            invalid.
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
        """Port of the first address on which the store listens."""
    @property
    def fd(self) -> int:
        """File descriptor that is readable while :meth:`take_notices` has lines. It is created at the first
        use.

        Raises:
            OSError: the process has run out of file descriptors.
        """
    @property
    def has_ended(self) -> bool:
        """True if the store was closed or has failed. In case of a failure, :meth:`take_notices` returns the
        reason.
        """
    def sessions(self) -> int:
        """Return the number of connected clients."""
    def take_notices(self) -> list[str]:
        """Return one line for each unknown or refused client. See also :meth:`WorkerStore.take_notices`."""
    def lead_workers(self, address: tuple[str, int] | None, agent: int | None = None) -> None:
        """Pass connections of workers on to the workers' store. Workers connect to this coordination store if
        their script sets ``MASTER_ADDR`` and ``MASTER_PORT`` to its address. Only workers on this machine and
        on the machines of connected clients are served. Before the first call, workers are refused.

        Args:
            address: host and port of the workers' store; ``None`` if the workers' store does not exist yet.
            agent: pid of the agent whose workers are the only ones to serve; ``None`` to serve all.
        """

    def stop_listening(self) -> None:
        """Close the listening sockets. Existing connections stay open."""
    def listen_again(self) -> None:
        """Listen again after :meth:`stop_listening`.

        Raises:
            OSError: another process now uses the port.
        """
    def close(self) -> None:
        """Close the listening sockets and all connections. Idempotent."""

@final
class Compare:
    """A condition for a transaction on the store's keys.

    Raises:
        ValueError: the key is longer than 1 KiB.
    """

    @staticmethod
    def exists(name: str) -> Compare:
        """Require that the key exists."""
    @staticmethod
    def missing(name: str) -> Compare:
        """Require that the key does not exist."""
    @staticmethod
    def created_at(name: str, revision: int) -> Compare:
        """Require that the key was created at this revision. With revision 0, the key must not exist."""
    @staticmethod
    def modified_at(name: str, revision: int) -> Compare:
        """Require that the key was last changed at this revision. With revision 0, it must not exist."""
    @staticmethod
    def has_value(name: str, value: bytes) -> Compare:
        """Require that the key exists and has this value."""

@final
class Op:
    """An operation in a transaction on the store's keys.

    Raises:
        ValueError: a key is longer than 1 KiB.
    """

    @staticmethod
    def put(name: str, value: bytes, leased: bool) -> Op:
        """Set a key. A leased key is deleted when the session that last leased it ends."""
    @staticmethod
    def delete(name: str) -> Op:
        """Delete a key."""
    @staticmethod
    def delete_prefix(prefix: str) -> Op:
        """Delete all keys with this prefix."""
    @staticmethod
    def get(name: str) -> Op:
        """Read a key."""
    @staticmethod
    def range(prefix: str, limit: int) -> Op:
        """Read at most ``limit`` keys with this prefix; 0 reads all of them."""
    @staticmethod
    def predecessor(prefix: str, name: str) -> Op:
        """Read the newest key under ``prefix`` that was created before the key ``name``."""

@final
class CoordinationClient:
    """Client for one session with its lease. Create a new client after the session has ended.

    Args:
        host, port: address of the store.
        run_id: identifier of the run.
        token: token of the store. If ``scope`` is given, the result of :func:`scoped_token` instead.
        scope: prefix to which the client's keys are restricted. ``None`` for all keys.
        interval: seconds between keep-alives.
        attempts: number of missed keep-alive intervals after which the store ends the session. The client
            gives up one interval earlier.
        connect_timeout: seconds for resolving the name, connecting and the handshake together.
        stall_timeout: seconds without a call of :meth:`take` or :meth:`wait` after which keep-alives stop, so
            that a hung program loses its membership. ``None`` for no limit. Default: 60.
        supervisor: run the client on this supervisor's thread. If ``None``, it runs on a thread that all
            clients without a supervisor share.
        resume: true if the session survives the loss of its connection. Until the session's lease expires,
            the client then resumes the session on a new connection. The client sends unanswered requests
            again, so the store may execute them twice. Changes that watches have missed are reported as one
            revision.
            :class:`StoreNotice` reports a store that is unreachable for more than a second.
        met: value of :attr:`met` from an earlier client. The connection fails with the kind ``other`` if the
            store is a different one that does not continue with the state of the earlier store.

    Raises:
        ValueError: a store would not accept the interval or the number of attempts, or the token is empty.
        OSError: the process has run out of file descriptors.
        SupervisorError: a method was called after a fork.
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
        """Create a client for a session with etcd v3 instead of elasticrs's own store. The session reconnects
        while its lease lasts, and etcd executes each request once.

        Args:
            endpoints: hosts and ports of the cluster's members.
            prefix: prefix that is added to each key, and removed from returned keys. Keys that sort after
                ``~sessions/`` are reserved.
            ca_cert: PEM file of the authority that signs the members' certificates; ``None`` for the
                authorities that the system trusts.
            cert: PEM file with this client's certificate; ``None`` for none.
            key: PEM file with the private key of ``cert``.
            is_tls: true to use TLS.
            user: user name; ``None`` for none.
            password: password of the user.
            ttl: seconds without a keep-alive after which etcd ends the lease. The client gives up when four
                fifths of that time have passed. At least 2; etcd may use a longer time.
            job_lease: id and seconds of the lease for keys that are put without a session's lease. The lease
                is created if it does not exist, and every session keeps it alive. ``None`` to keep such keys
                forever.
            connect_timeout: seconds for resolving names, connecting and opening the session, on all endpoints
                together.
            read_timeout: seconds for a request, over all attempts.
            stall_timeout: see the class.
            supervisor: see the class.
            links: name of the group of sessions that watch each other, and a second host name or address of
                this machine for them to try. The first is the local address of the connection to etcd. If a
                program with a supervisor is killed, another session of the group revokes the program's lease
                as soon as none of its workers is running. Without a supervisor, or with ``None``, nothing
                revokes the lease of a killed program before it expires.

        Raises:
            ValueError: there is no endpoint, a time is invalid or too short, or only one of two related
                arguments is given.
        """
    @property
    def fd(self) -> int:
        """File descriptor that is readable while :meth:`take` has events."""
    @property
    def met(self) -> tuple[bytes, int] | None:
        """Name of the store to which the client was last connected, and the highest revision that was seen
        there. ``None`` before the first connection, and for etcd.
        """
    def take(self) -> list[StoreEvent]:
        """Return the events since the last call. The first event is :class:`Connected` or
        :class:`ConnectionLost`. Never blocks.
        """
    def wait(self, timeout: float | None) -> bool:
        """Wait until :meth:`take` has events. Return false after ``timeout`` seconds, or if there will be no
        more events.
        """
    def txn(
        self,
        tag: int,
        compares: Sequence[Compare],
        then: Sequence[Op],
        otherwise: Sequence[Op] = ...,
    ) -> None:
        """Send a transaction. A :class:`Reply` with this tag follows. Requests are carried out in order.

        Args:
            tag: any number from 0 to 2^64 - 1.
            compares: conditions that decide which operations are applied.
            then: operations that are applied if all conditions hold.
            otherwise: operations if a condition does not hold. Default: none.

        Raises:
            ValueError: the transaction has more than 1 MiB or 4096 operations.
        """
    def watch(
        self,
        tag: int,
        prefix: str,
        *,
        exact: bool = False,
        snapshot: bool = False,
    ) -> None:
        """Watch keys for changes. A :class:`Reply` with this tag follows, and then :class:`Changes`.

        Args:
            tag: see :meth:`txn`.
            prefix: prefix of the keys.
            exact: true if ``prefix`` is a whole key.
            snapshot: true if the reply should contain the existing entries at its revision. The watch
                continues with the next revision.
        """
    def unwatch(self, prefix: str, *, exact: bool = False) -> None:
        """Stop a watch. Changes that the store has already sent are still reported."""
    def clock(self) -> tuple[int, int] | None:
        """Return the difference between the store's wall clock and this host's wall clock, and the maximum
        error of that difference, both in nanoseconds. Return ``None`` before the first keep-alive was
        answered.
        """
    def close(self) -> None:
        """Close the session at once, even if another process holds a duplicate of its socket. No event
        follows. Idempotent.
        """

# --- helpers --------------------------------------------------------------------------------------

def last_lines(path: str, count: int, max_bytes: int = 65536) -> list[bytes]:
    """Return the last ``count`` lines of a file, without newlines. Read at most the last ``max_bytes`` bytes
    of the file.
    """

def copy_and_sum(sources: list[int], targets: list[int], lengths: list[int]) -> int | None:
    """Copy blocks of memory, given by addresses and lengths. Return the sum of the 8-byte words that were
    copied, modulo 2 to the power of 64. In the sum, zeros complete the last word of a block.

    The addresses are trusted, as by :func:`ctypes.memmove`, but another thread may free a source during the
    copy. If the source is no longer readable then, return ``None``. The addresses of targets must be
    multiples of 64.

    Raises:
        ChildProcessError: SIGKILL or another signal ended the process that made the copy.
        ValueError: the lists have different lengths.
    """

def check_limits(processes: int, files: int = 0, others: int = 0) -> None:
    """Check that the limits ``pids.max``, ``pid_max``, ``RLIMIT_NPROC`` and ``RLIMIT_NOFILE`` are high
    enough, before anything is started.

    Args:
        processes: number of processes that will be started.
        files: number of log files that will be followed.
        others: number of further file descriptors, for timers and heartbeats.

    Raises:
        ValueError: a limit is too low. The message contains its name and value.
    """

def heartbeat_page() -> tuple[int, str]:
    """Create a page for the heartbeats of a worker that inherits it, for :meth:`Supervisor.adopt`.

    Returns:
        File descriptor of the page, which the caller must close, and the value of ``ELASTICRS_HEARTBEAT`` for
        the worker.

    Raises:
        OSError: the process has run out of file descriptors or memory.
    """

def raise_descriptor_limit() -> int:
    """Raise the soft limit ``RLIMIT_NOFILE`` of this process to the hard limit, as far as permitted.

    Use this only in a process that belongs to the launcher alone. Supervisors that are created later start
    their workers with the previous limit.

    Returns:
        The new soft limit.
    """

def children() -> list[int]:
    """Return the pids of this process's children, including zombies. The result is correct even if ``/proc``
    belongs to another pid namespace, in which the same pids belong to other processes.
    """

def name_of(pid: int) -> str:
    """Return the kernel's short name of a process, which may contain any character. Return an empty string if
    the process does not exist or ``/proc`` does not show it. The command line is not used, because reading it
    may take forever.
    """

def patience_with(pid: int) -> float | None:
    """Return the number of seconds for which a clean-up process may continue after the processes that it
    serves have exited. Clean-up processes are multiprocessing's resource tracker and torch's shared memory
    manager.

    Return ``None`` for any other process, and for a process that does not exist. Never blocks.
    """

def scoped_token(token: bytes, scope: str) -> str:
    """Derive a token that gives a client access only to the store's keys that start with ``scope``."""

def order_stop_signals() -> None:
    """Prevent the handlers of SIGTSTP and SIGCONT from interrupting each other, so that the signals are
    handled in the order of their arrival. The effect ends when a new handler is installed for one of these
    signals.

    Raises:
        OSError: the kernel refused the change.
    """

def stop_unless_continued() -> None:
    """Stop this process, as with SIGSTOP, and return when it is continued.

    The calling thread must block SIGTSTP and must have sent SIGTSTP to itself. If a SIGCONT has arrived after
    that SIGTSTP, even before this call, the process continues at once.

    Raises:
        OSError: there is not enough memory, or there are too many processes.
    """

def nursery_main(start: str) -> int:
    """Run a nursery in this process, which is a Python interpreter that was started only for this purpose.
    Used on systems that cannot execute the embedded program.

    Returns:
        The exit code: 0, or an error number.
    """

def warm_nursery_begin(start: str) -> None:
    """Mark this process and its future children as parts of a nursery. Call this before the imports."""

def warm_nursery_main(start: str) -> tuple[list[bytes], list[bytes]]:
    """Run a nursery in this process. Its workers are forks of this process, which must have only one thread.

    Returns:
        The worker's arguments, and its environment as ``NAME=value`` strings. This function returns only in a
        worker.
    """
