"""``elasticrun --check torchrun ARGS…``: describe how elasticrun would run a torchrun command line.

No process is started, and torch is not needed. ``docs/compatibility.md`` explains the differences.
"""

from __future__ import annotations

import os
import shlex

from elasticrs._engine.cli.arguments import TextRequested, check_limits, parse, resolve
from elasticrs._engine.cli.help import wrapped
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, OURS, set_by_variables
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.job.options import Namespace

_COLUMN = 22
_TORCHRUN, _OLD_LAUNCHER = "torchrun", "torch.distributed.launch"
_MODULES = (["torch.distributed.run"], [_OLD_LAUNCHER])


class _Command(Value):
    """A torchrun command line and its job. ``given`` has the options that it or the environment sets."""

    program: str
    args: Namespace
    given: frozenset[str]
    job: JobSpec
    environ: Mapping[str, str]

    @property
    def backend(self) -> str:
        """``c10d``, ``etcd`` or ``static``; empty for a single node or another back end."""
        return "" if self.job.rendezvous is None else str(self.job.rendezvous.backend)

    @property
    def is_elastic(self) -> bool:
        return self.backend in ("c10d", "etcd")

    @property
    def restarts(self) -> bool:
        return int(self.args.max_restarts) > 0


class _Difference(Value):
    """A difference from torchrun. ``applies`` tells whether it affects a command line; ``None``: always."""

    subject: str
    text: str
    applies: Callable[[_Command], bool] | None = None


def _if_given(name: str) -> Callable[[_Command], bool]:
    return lambda command: name in command.given


_DIFFERENCES = (
    _Difference(
        "--nnodes",
        "a lost node is noticed within seconds, and the others restart without it, which uses no restart; "
        "all nodes must use elasticrun, with equal --nnodes and --max-restarts",
        lambda command: command.is_elastic,
    ),
    _Difference(
        "script",
        "its name, arguments and user must be the same on all nodes (--rdzv-conf same_command=0: need not)",
        lambda command: bool(command.backend) and not command.job.is_polled,
    ),
    _Difference(
        "--nnodes",
        "if a node is lost, the others wait until a node with its rank joins; all nodes must use elasticrun",
        lambda command: command.backend == "static",
    ),
    _Difference(
        "--max-restarts",
        "counted for the whole job, also in TORCHELASTIC_RESTART_COUNT (torchrun: by each node)",
        lambda command: command.restarts and bool(command.backend),
    ),
    _Difference(
        "--max-restarts",
        "a failure that repeats without progress, or that no restart can fix, ends the job earlier "
        "(--max-same-failures 0: never)",
        lambda command: command.restarts and not command.job.is_polled,
    ),
    _Difference(
        "--rdzv-backend",
        "etcd's API v3, etcd 3.4 or newer (torchrun: v2, which etcd 3.6 lacks)",
        lambda command: command.backend == "etcd",
    ),
    _Difference(
        "--rdzv-endpoint",
        "a store of elasticrs; a TCPStore that a program hosts there is refused",
        lambda command: command.backend == "c10d",
    ),
    _Difference(
        "--rdzv-conf",
        "last_call_timeout applies to the first start only, and restart_call_timeout (0) to restarts",
        lambda command: command.is_elastic and "last_call_timeout" in command.args.rdzv_conf,
    ),
    _Difference(
        "--node-rank",
        "orders the nodes (torchrun: no effect)",
        lambda command: command.is_elastic and "node-rank" in command.given,
    ),
    _Difference(
        "MASTER_ADDR",
        "the address of rank 0's node, not its name",
        lambda command: command.is_elastic and command.args.local_addr is None,
    ),
    _Difference(
        "MASTER_PORT",
        "a new store and port for every attempt (torchrun: one store for the job)",
        lambda command: not command.job.is_polled and command.job.master_port is None,
    ),
    _Difference(
        "workers' store",
        "hosted by rank 0, so TORCHELASTIC_USE_AGENT_STORE is False (torchrun: by the launcher)",
        lambda command: command.job.master_port is not None,
    ),
    _Difference(
        "--nproc-per-node",
        "counted from the driver's files; torch is queried only if they do not help",
        lambda command: command.args.nproc_per_node in ("gpu", "auto"),
    ),
    _Difference("--tee", "a line that is written in parts is shown as one line", _if_given("tee")),
    _Difference(
        "--log-dir",
        "folders of attempts are never deleted or reused; the name of the run's folder contains the host",
        lambda command: not {"log-dir", "tee", "redirects"}.isdisjoint(command.given),
    ),
    _Difference(
        "--numa-binding", "system calls in the worker; numactl is not needed", _if_given("numa-binding")
    ),
    _Difference("--shutdown-timeout", "applies to every kind of stop", _if_given("shutdown-timeout")),
    _Difference(
        "--monitor-interval",
        "no effect: exits are reported by the kernel",
        lambda command: "monitor-interval" in command.given and not command.job.is_polled,
    ),
    _Difference("--event-log-handler", "events have times (torchrun: 0)", _if_given("event-log-handler")),
    _Difference(
        "file timers",
        "an expired timer ends its worker (torchrun: the launcher too)",
        lambda command: command.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1",
    ),
    _Difference(
        "--local-rank",
        "not passed to the script; write --local-rank='${local_rank}' after its name if it needs that",
        lambda command: command.program == _OLD_LAUNCHER and not command.args.use_env,
    ),
    _Difference(
        "signals",
        "those ignored at the start (nohup, &) stay ignored; USR1 and USR2 are passed on to the workers",
    ),
    _Difference(
        "leftover processes",
        "all processes that workers leave behind are killed, even if the launcher is killed",
    ),
    _Difference(
        "failure report",
        "ranks that were stopped are not listed as failures; tracebacks without @record",
    ),
    _Difference("exit code", "2 and one line for a usage error; otherwise equal"),
)


def check(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the description, and the exit code: 0, or 2 if elasticrun would not run the job here.

    Raise ``UsageError`` if the command line is not one of torchrun, or if it runs no job.
    """
    program, argv = _program(words)
    try:
        args = parse(argv, environ)
        job = resolve(args, environ)
        check_limits(job)
    except TextRequested:
        raise UsageError("--check: this command line only prints text; it runs no job") from None
    except UsageError as error:
        return f"elasticrun would not run this here: {error}{os.linesep}", 2
    names = frozenset(name.replace("_", "-") for name in args.given | set_by_variables(environ))
    command = _Command(program, args, names, job, environ)
    return os.linesep.join(_lines(command, argv)) + os.linesep, 0


def _program(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    first = os.path.basename(words[0])
    if first == _TORCHRUN:
        return _TORCHRUN, words[1:]
    if first.startswith("python") and words[1:2] == ["-m"] and list(words[2:3]) in _MODULES:
        return (_OLD_LAUNCHER if words[2] == _OLD_LAUNCHER else _TORCHRUN), words[3:]
    raise UsageError(
        f"--check: got {words[0]!r}, expected torchrun, or python -m torch.distributed.run, and its arguments"
    )


def _lines(command: _Command, argv: Sequence[str]) -> Iterator[str]:
    found = [each for each in _DIFFERENCES if each.applies is None or each.applies(command)]
    yield "elasticrun would run this here."
    yield from ("", "The same job with elasticrun:", f"  elasticrun {shlex.join(argv)}", "")
    different = {each.subject for each in found}
    options = [option for option in OPTIONS if option.name in command.given]
    equal = [each.flag for each in options if each.group != OURS and each.flag not in different]
    yield from _row("same", ", ".join((*equal, "script, arguments and environment of the workers")))
    ours = [each.flag for each in options if each.group == OURS and each.dest != "use_env"]
    if ours:
        yield from _row("not in torchrun", ", ".join(ours))
    yield from ("", "What differs from torchrun:")
    for each in found:
        yield from _row(f"  {each.subject}", each.text)
    if command.job.notices:
        yield from ("", "What the launcher would say:")
        for notice in command.job.notices:
            yield from wrapped(notice, "  ")
    yield from ("", 'Details: the page "Compatibility with torchrun" of the documentation')


def _row(head: str, text: str) -> Iterator[str]:
    indent = " " * _COLUMN
    first, *more = wrapped(text, indent)
    yield f"{head.ljust(_COLUMN)}{first[_COLUMN:]}"
    yield from more
