"""The commands of ``elasticctl``, the program with which a user looks at running jobs and acts on them."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from elasticrs._engine.cli.control_client import (
    ANSWER_LIMIT,
    SIGNAL_LIMIT,
    Outcome,
    Problem,
    choose,
    find,
    no_jobs,
    what_to_do,
    why_silent,
)
from elasticrs._engine.job.options import near_name
from elasticrs._engine.job.phrases import attempt_text, duration
from elasticrs._engine.process.console import visible
from elasticrs._engine.supervise.observe.status_text import (
    TITLES,
    ranks_table,
    remarks,
    row,
    sentence,
    table,
    why_stuck,
)
from elasticrs._engine.supervise.run.orders import DONE, FAILED, NO_JOB, NOT_AGREED, USAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn

    from elasticrs._engine.cli.control_client import Agent


_LOOK = 0.2
"""Seconds between two looks at log files, or at the status during a restart."""


EXAMPLES = {"--job": "--job llama", "--rank": "--rank 3", "--lines": "--lines 50"}
"""Examples of options with a value, for error messages."""


class _Parser(argparse.ArgumentParser):
    """Parser that raises :class:`.Problem` for an error, instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        error = sys.exc_info()[1]
        hint = f"see {self.prog} --help"
        if isinstance(error, argparse.ArgumentError) and error.argument_name is not None:
            name = error.argument_name.rpartition("/")[2]
            message = f"{name}: {error.message}"
            if name in EXAMPLES:
                hint = f"for example: {self.prog} {EXAMPLES[name]}"
        raise Problem(USAGE, f"{message} ({hint})")


def _number(text: str) -> int:
    """Parse a value of the command line."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number, 0 or more")
    return int(text)


def run(args: Sequence[str]) -> int:
    """Carry out a command line of ``elasticctl``, and return the exit code."""
    if len(args) > 1 and args[0] in ("-h", "--help"):
        # Treat `--help COMMAND` as `COMMAND --help`, which also rejects an unknown command.
        args = [*args[1:], "--help"]
    try:
        options = _parsed(args)
        code: int = options.run(options)
    except Problem as problem:
        _tell(str(problem))
        return problem.code
    except BrokenPipeError:
        # The program that reads the output, such as `head`, has ended. Discard the rest, so that Python ends
        # without an error message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except KeyboardInterrupt:
        return FAILED
    return code


def _parsed(args: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parser()
    if not args:
        raise Problem(USAGE, f"a command is missing, for example: elasticctl ps ({', '.join(commands)})")
    word = args[0]
    if word.startswith("-") and word not in parser._option_string_actions:
        what = f"unknown argument {word!r}; options come after the command"
        raise Problem(USAGE, f"{what} (for example: elasticctl status --job llama)")
    if not word.startswith("-") and word not in commands:
        near = near_name(word, commands)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(commands)}"
        raise Problem(USAGE, f"unknown command {word!r} ({hint})")
    options, unknown = parser.parse_known_args(args)
    if unknown:
        flags = commands.get(word, parser)._option_string_actions
        known = [flag.lstrip("-") for flag in flags if flag.startswith("--")]
        near = near_name(unknown[0].lstrip("-"), known) if unknown[0].startswith("--") else None
        hint = f"did you mean --{near}?" if near else "see elasticctl --help"
        raise Problem(USAGE, f"unknown argument {unknown[0]!r} ({hint})")
    return options


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command line, and the parser of each command by its name."""
    parser = _Parser("elasticctl", description="Look at jobs on this machine; act on them.")
    from elasticrs import __version__

    parser.add_argument("--version", action="version", version=f"elasticrs {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Any, text: str) -> _Parser:
        added = commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
        added.set_defaults(run=action)
        return added

    def of_job(name: str, action: Any, text: str) -> _Parser:
        added = command(name, action, text)
        who = "run id or script, or how it begins; or pid of the agent (default: the only job)"
        added.add_argument("-j", "--job", metavar="JOB", help=who)
        return added

    lists = command("ps", _ps, "list the jobs of this user on this machine")
    lists.add_argument("--json", action="store_true", help="print the status of each as a line of JSON")
    status = of_job("status", _status, "say how a job is, and which ranks need a look")
    status.add_argument("--json", action="store_true", help="print all of it as JSON")
    status.add_argument("-w", "--watch", action="store_true", help="show it on the whole terminal; keys act")
    logs = of_job("logs", _logs, "print the last lines of the workers' log files")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines, until the job ends")
    logs.add_argument("-r", "--rank", metavar="RANK", type=_number, help="of this rank only")
    logs.add_argument(
        "-n", "--lines", metavar="N", type=_number, default=10, help="of each file (default: 10)"
    )
    logs.add_argument("--events", action="store_true", help="the events of --event-log-handler file:PATH")
    stacks = of_job("stacks", _stacks, "say where each rank is, and who waits for whom")
    stacks.add_argument("--all", action="store_true", help="print whole stacks")
    stacks.add_argument("--json", action="store_true", help="print all of it as JSON")
    of_job("checkpoint", _checkpoint, "SIGUSR1 to all ranks after the same step, so that they save")
    restart = of_job("restart", _restart, "restart all workers of a job, which costs none of its restarts")
    drain = of_job("drain", _drain, "have a node leave a job; the other nodes continue")
    drain.usage = "%(prog)s [-h] [-j JOB] [--stay-out] [--no-wait] NODE"
    drain.add_argument("node", metavar="NODE", nargs="?", help="host name of the node, or its group rank")
    drain.add_argument("--stay-out", action="store_true", help="the job does not admit the node again")
    stop = of_job("stop", _stop, "stop a job: SIGTERM to its workers, so that they can save")
    stop.add_argument(
        "--now",
        action="store_true",
        help="kill the workers at once; they cannot save, so the steps since their last copy are lost",
    )
    for each in (restart, drain, stop):
        each.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
    return parser, commands.choices


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{visible(line)}\n" for line in lines))
    sys.stdout.flush()


def _tell(line: str) -> None:
    sys.stderr.write(f"elasticctl: {visible(line)}\n")


def _ps(options: argparse.Namespace) -> int:
    agents = find(_tell)
    if options.json:
        _print([json.dumps(agent.status or {"agent": {"pid": agent.pid}}) for agent in agents])
    elif agents:
        _print(table([TITLES, *(row(agent.pid, agent.status) for agent in agents)]))
    else:
        _tell(no_jobs())
    return DONE


def _chosen(options: argparse.Namespace) -> tuple[Agent, dict[str, Any]]:
    agent = choose(find(_tell, options.job), options.job)
    if agent.status is None:
        raise Problem(FAILED, why_silent(agent.pid))
    return agent, agent.status


def _chosen_to_act(options: argparse.Namespace) -> tuple[Agent, dict[str, Any]]:
    agent, status = _chosen(options)
    if reason := why_stuck(status):
        _tell(f"{agent.title}: {reason}; it carries out orders only when it goes on: {what_to_do(agent.pid)}")
    return agent, status


def _status(options: argparse.Namespace) -> int:
    agent, status = _chosen(options)
    status = agent.with_others(status)
    if options.watch:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise Problem(USAGE, "--watch needs a terminal; --json is for programs")
        from elasticrs._engine.cli.watch import Watch

        with _agent_end(agent) as end:
            outcome = Outcome(agent)
            try:
                Watch(agent, status).run()
            except Problem:
                if not select.select([end], [], [], ANSWER_LIMIT)[0]:
                    raise
                code, line = outcome.tell()
                _print([line])
                return code
    elif options.json:
        _print([json.dumps(status, indent=2)])
    else:
        _print([sentence(status), *remarks(status), "", *ranks_table(status)])
    return DONE


def _logs(options: argparse.Namespace) -> int:
    from elasticrs._engine.cli.log_lines import LogLines

    agent, status = _chosen(options)
    lines = LogLines(agent, status, rank=options.rank, events=options.events, count=options.lines)
    with closing(lines):
        lines.print_new()
        if options.follow:
            with _agent_end(agent) as end:
                outcome = Outcome(agent)
                while not select.select([end], [], [], 0 if lines.print_new() else _LOOK)[0]:
                    lines.follow_attempts()
            while lines.print_new():
                continue
            code, line = outcome.tell()
            _tell(line)
            return code
    return DONE


@contextmanager
def _agent_end(agent: Agent) -> Iterator[int]:
    """Open a file descriptor that is readable once the agent has ended."""
    try:
        pidfd = os.pidfd_open(agent.pid)
    except ProcessLookupError:
        raise Problem(NO_JOB, f"{agent.title} has just ended") from None
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _stop(options: argparse.Namespace) -> int:
    agent, _ = _chosen_to_act(options)
    return _end(options, agent, {"do": "stop", "now": options.now})


def _drain(options: argparse.Namespace) -> int:
    if options.node is None:
        what = "drain needs a node: its host name or group rank"
        raise Problem(USAGE, f"{what} (for example: elasticctl drain gpu009)")
    agent, status = _chosen_to_act(options)
    order = {"do": "drain", "node": options.node, "stay_out": options.stay_out}
    group = status["group"] or {}
    if options.node in (status["host"], str(group.get("rank"))):
        return _end(options, agent, order, ": this node has left the job, and its agent has ended")
    return _meet_again(options, agent, status, order)


def _end(options: argparse.Namespace, agent: Agent, order: dict[str, Any], told: str = " has ended") -> int:
    """Send an order after which the agent ends, such as ``stop``. Wait for the agent's end, and tell it."""
    with _agent_end(agent) as end:
        try:
            code = _obey(agent, order, SIGNAL_LIMIT)
        except Problem:
            # An agent that ends early does not answer. So look whether it has ended.
            if not select.select([end], [], [], ANSWER_LIMIT)[0]:
                raise
            code = DONE
        if code in (DONE, NOT_AGREED) and not options.no_wait:
            select.select([end], [], [])
            _print([f"{agent.title}{told}"])
        return code


def _stacks(options: argparse.Namespace) -> int:
    from elasticrs._engine.cli.stacks_text import spied, text

    agent, status = _chosen(options)
    answer = spied(agent.stacks(status))
    _print([json.dumps(answer)] if options.json else text(answer, is_whole=options.all))
    return DONE


def _checkpoint(options: argparse.Namespace) -> int:
    agent, _ = _chosen_to_act(options)
    return _obey(agent, {"do": "checkpoint"}, SIGNAL_LIMIT)


def _restart(options: argparse.Namespace) -> int:
    agent, before = _chosen_to_act(options)
    return _meet_again(options, agent, before, {"do": "restart"})


def _meet_again(
    options: argparse.Namespace, agent: Agent, before: dict[str, Any], order: dict[str, Any]
) -> int:
    """Send an order that restarts the workers, and wait until they run (unless ``--no-wait`` is given)."""
    with _agent_end(agent) as end:
        begun = time.monotonic()
        code = _obey(agent, order, SIGNAL_LIMIT)
        while code in (DONE, NOT_AGREED) and not options.no_wait:
            if select.select([end], [], [], _LOOK)[0]:
                raise Problem(FAILED, f"{agent.title} has ended instead")
            now = agent.asked_again()
            if now["round"] != before["round"] and now["state"] == "HEALTHY":
                took = duration(time.monotonic() - begun)
                nodes = now["group"]["world_size"]
                where = f" on {nodes} nodes" if nodes != 1 else ""
                what = f"attempt {attempt_text(now['attempt'])} is running{where}"
                _print([f"{agent.title}: {what}, after {took}"])
                break
        return code


def _obey(agent: Agent, order: dict[str, Any], limit: float | None = None) -> int:
    """Send an order to the agent, print its answers as they come, and return the exit code that it tells."""
    for answer in agent.ask(order, limit):
        code = answer.get("code")
        if code is None or code == DONE:
            _print([f"{agent.title}: {answer.get('message')}"])
        else:
            _tell(f"{agent.title}: {answer.get('message')}")
        if code is not None:
            return int(code)
    raise agent.has_ended()
