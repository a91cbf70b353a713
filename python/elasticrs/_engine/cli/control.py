"""Commands of ``elasticctl``."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
from typing import TYPE_CHECKING

from elasticrs._engine.cli.control_client import Problem, choose, find, no_jobs
from elasticrs._engine.cli.status_text import TITLES, ranks_table, remarks, row, sentence, table
from elasticrs._engine.process.console import visible
from elasticrs._engine.supervise.observe.orders import DONE, FAILED, NO_JOB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elasticrs._engine.cli.control_client import Agent


def run(args: Sequence[str]) -> int:
    """Carry out a command line, and return its exit code."""
    options = _parser().parse_args(args)
    try:
        code: int = options.run(options)
    except Problem as problem:
        _tell(str(problem))
        return problem.code
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python would otherwise complain when it closes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except KeyboardInterrupt:
        return FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("elasticctl", description="Look at jobs on this machine; act on them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
        added.set_defaults(run=action)
        return added

    def of_job(name: str, action: Any, text: str) -> argparse.ArgumentParser:
        added = command(name, action, text)
        who = "run id, script, or pid of the agent (default: the only job)"
        added.add_argument("-j", "--job", metavar="JOB", help=who)
        return added

    lists = command("ps", _ps, "list the jobs of this user on this machine")
    lists.add_argument("--json", action="store_true", help="print the status of each as a line of JSON")
    status = of_job("status", _status, "say how a job is, and which ranks need a look")
    status.add_argument("--json", action="store_true", help="print all of it as JSON")
    stop = of_job("stop", _stop, "stop a job: SIGTERM to its workers, so that they can save")
    stop.add_argument("--now", action="store_true", help="kill the workers at once")
    stop.add_argument("--no-wait", action="store_true", help="do not wait for the end of the job")
    return parser


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
    agent = choose(find(_tell), options.job)
    if agent.status is None:
        what = f"agent {agent.pid} does not answer: it is stopped or stuck"
        raise Problem(FAILED, f"{what}; kill -9 {agent.pid} ends the job")
    return agent, agent.status


def _status(options: argparse.Namespace) -> int:
    _, status = _chosen(options)
    if options.json:
        _print([json.dumps(status, indent=2)])
    else:
        _print([sentence(status), *remarks(status), "", *ranks_table(status)])
    return DONE


def _stop(options: argparse.Namespace) -> int:
    agent, _ = _chosen(options)
    try:
        pidfd = os.pidfd_open(agent.pid)
    except ProcessLookupError:
        raise Problem(NO_JOB, f"{agent.title} has just ended") from None
    try:
        code = _obey(agent, {"do": "stop", "now": options.now})
        if code == DONE and not options.no_wait:
            select.select([pidfd], [], [])
            _print([f"{agent.title} has ended"])
        return code
    finally:
        os.close(pidfd)


def _obey(agent: Agent, order: dict[str, Any]) -> int:
    """Send an order, print the answers as they come, and return the exit code."""
    for answer in agent.ask(order):
        code = answer.get("code")
        if code is None or code == DONE:
            _print([f"{agent.title}: {answer.get('message')}"])
        else:
            _tell(f"{agent.title}: {answer.get('message')}")
        if code is not None:
            return int(code)
    raise Problem(FAILED, f"{agent.title}: the agent has ended before its answer")
