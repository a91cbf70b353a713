"""Replays a recorded job. Builds the evidence that each attempt leaves on each node, and passes it to the
agents' code for a decision.

One node is decided by :class:`.OneNode`, several nodes by the members of a simulated
rendezvous. In both cases, the options come from a command line, the error files are real files, and each node
reports its failures and its exit code as the launcher does.
"""

import itertools
import json
import shlex
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

from helpers import attempts as told
from rendezvous.cluster import Cluster

from elasticrs import _core
from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.failures import failure
from elasticrs._engine.failures.failure import Clock, root_cause
from elasticrs._engine.job.config import ExitCodes
from elasticrs._engine.job.options import parse
from elasticrs._engine.job.restart_policy import Cause
from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.supervise import failed_attempt
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.attempt import Attempt, JobResult
from elasticrs._engine.supervise.decide.decisions import OneNode
from elasticrs._engine.supervise.decide.several_nodes import has_failed_alone, verdict_of
from elasticrs._engine.supervise.failed_attempt import Place, first_seen, first_word, own_cause
from elasticrs._engine.supervise.observe import job_report
from elasticrs._engine.workers.logs import LogPaths
from elasticrs._engine.workers.plan import NodeShare, Plan, assign

MS = 1_000_000
OPTIONS = "--max-restarts 5 --exit-codes verdict"
NODES = "abcdefgh"


class Verdict(NamedTuple):
    """Conclusion of a node after the last attempt of a case.

    Args:
        verdict: verdict of the JSON report; ``None`` if the job goes on or has succeeded.
        code: exit code of the launcher; ``None`` if the job goes on.
        restarts: number of charged restarts.
        root: global rank of the root cause; ``None`` if no worker is to blame.
        text: all that the user is told about the failure.
    """

    verdict: str | None
    code: int | None
    restarts: int
    root: int | None
    text: str


class Node:
    """A simulated node whose workers exit as the case describes.

    Args:
        folder: folder for the files of its workers.
        place: index of the node.
        clocks: seconds by which its wall clock and its monotonic clock differ from those of this machine.
    """

    def __init__(self, folder, place, clocks=(0.0, 0.0)):
        self.folder, self.place = folder / NODES[place], place
        self._wall_ns, self._monotonic_ns = (int(seconds * 1e9) for seconds in clocks)
        self.clock = Clock(offset_ns=-self._wall_ns, error_ns=200_000)

    def attempt(self, number, restarts, shape, ends, began_ns, ran, step, counters=()):
        """Build the record of an attempt and the files of its workers."""
        shares = [NodeShare("default", count) for count in shape]
        plan = Plan(assign(shares, self.place), "a", 1)
        folder = self.folder / str(number)
        folder.mkdir(parents=True)
        names = {rank: str(folder / f"{rank}.json") for rank in range(len(ends))}
        printed = {rank: str(folder / f"{rank}.out") for rank, end in enumerate(ends) if "stdout" in end}
        attempt = Attempt(number, restarts, plan, str(number), LogPaths(printed, {}, {}, {}, names))
        told.adopted(attempt, *(100 * self.place + rank + 100 for rank in range(len(ends))))
        began_ns += self._monotonic_ns
        failed_ns = began_ns + int(ran * 1e9)
        told.stamped(attempt, planned=began_ns, started=began_ns, ended=failed_ns + 50 * MS)
        if step is not None:
            attempt.heartbeats = [
                told.beat(rank, began_ns, step[0], is_global=step[1]) for rank in range(len(ends))
            ]
        for rank, end in enumerate(ends):
            self._end(attempt, rank, end, failed_ns)
        if counters:
            attempt.oom_kills = {"/cg/memory.events": counters[0]}
            attempt.oom_kills_after = {"/cg/memory.events": counters[1]}
        own = [each for each in attempt.exits.values() if each.exitcode != 0 and each.sent_signal is None]
        if own:
            first = min(own, key=lambda each: each.seen_ns)
            told.failed(attempt, first.local_rank, first.seen_ns)
        elif attempt.expired:
            local_rank, why = next(iter(attempt.expired.items()))
            told.failed(attempt, local_rank, why.seen_ns)
        return attempt

    def _end(self, attempt, rank, end, failed_ns):
        seen_ns = failed_ns + int(end["at"] * MS)
        pid = attempt.pids[rank]
        told.exited(attempt, rank, end["exit"], end.get("signalled"), pid=pid, seen_ns=seen_ns)
        if "stdout" in end:
            with open(attempt.paths.stdouts[rank], "w", encoding="utf-8") as file:
                file.write(end["stdout"])
        if "error" in end:
            recorded_ns = seen_ns - int(end["error"].get("before", 1.0) * MS)
            with open(attempt.paths.error_files[rank], "w", encoding="utf-8") as file:
                file.write(error_file(end["error"], pid, recorded_ns))
            # elasticrs's hook in the worker notifies the agent when it records an exception.
            if "own" not in end["error"] and end["error"].get("notice", True):
                text = str(end["error"].get("message", "x"))
                origin = "peer" if end["error"].get("is_lost_peer") else "unknown"
                told.raised(attempt, rank, pid=pid, seen_ns=recorded_ns, text=text, origin=origin)
        if "hung" in end:
            attempt.append(hang_of(rank, seen_ns, end["hung"]), _core.WorkerHung)

    def caused(self, attempt, job):
        """Return this node's failure as reported after its workers have exited."""
        word = self.first_word(attempt) if attempt.first_failure is not None else None
        return own_cause(attempt, self._name, word, fatal_exit_codes=job.fatal_codes)

    def first_word(self, attempt):
        """Return this node's failure as reported immediately, before its workers have exited."""
        return first_word(attempt, first_seen(attempt), self._name)

    @property
    def _name(self):
        return Place(NODES[self.place], f"host-{NODES[self.place]}", self.place, self.clock)

    def __enter__(self):
        """Replace this machine's clocks with those of the node."""
        self._clocks, failure.time = (
            failure.time,
            SimpleNamespace(
                time_ns=lambda: time.time_ns() + self._wall_ns,
                monotonic_ns=lambda: time.monotonic_ns() + self._monotonic_ns,
            ),
        )

    def __exit__(self, *_):
        failure.time = self._clocks


def hang_of(rank, seen_ns, found):
    last = told.beat(rank, seen_ns - 61_000 * MS, found["step"])
    ranks = [told.seen(rank, last, found.get("frame"))]
    return told.hung(rank, ranks, last.at_ns, seen_ns, ground=found["ground"])


def error_file(error, pid, recorded_ns):
    """Return the text of an error file, written by elasticrs's hook in the worker or, for ``own``, by the
    program itself.
    """
    if "own" in error:
        return error["own"] if isinstance(error["own"], str) else json.dumps(error["own"])
    exception, place = error["exception"], error.get("place", "train.py:88")
    facts = {
        name: error[name]
        for name in ("is_retryable", "is_start_error", "is_transient", "is_lost_peer")
        if name in error
    }
    text = f"{exception.rpartition('.')[2]}: {error.get('message', 'x')}"
    file, _, line = place.partition(":")
    stack = f'Traceback (most recent call last):\n  File "/job/{file}", line {line}, in f\n{text}'
    return json.dumps(
        {
            "message": {"message": text, "extraInfo": {"py_callstack": stack, "timestamp": "1"}},
            "elasticrs": {
                "monotonic_ns": recorded_ns,
                "pid": error.get("pid", pid),
                "failure": {"exception": exception, "place": place, **facts},
            },
        }
    )


class Played:
    """Replays a case and returns its outcome. ``order`` is the order in which the nodes report."""

    def __init__(self, case, vocabulary, folder, order=None):
        self._case, self._vocabulary = case, vocabulary
        script = folder / "train.py"
        script.write_text("")
        options = shlex.split(f"{OPTIONS} {case.get('options', '')}")
        self.job = resolve(parse([*options, str(script)], {}), {})
        self._attempts = [
            {"nodes": each} if isinstance(each, str) else each
            for each in case["attempts"]
            for _ in range(each.get("times", 1) if isinstance(each, dict) else 1)
        ]
        shape = [text.split(",") for text in self._attempts[0]["nodes"].split("|")]
        self._shape = [len(workers) for workers in shape]
        clocks = case.get("clocks", [(0.0, 0.0)] * len(shape))
        self._nodes = [Node(folder, place, clocks[place]) for place in range(len(shape))]
        self._order = order or range(len(shape))
        self._results = [JobResult() for _ in shape]
        self._last = [(None, None) for _ in shape]

    def _record(self, number, restarts, attempt):
        """Add the record of an attempt to each node's result."""
        texts = attempt["nodes"].split("|")
        began_ns = time.monotonic_ns() - int(attempt.get("ran", 1.0) * 1e9)
        for node, result, text in zip(self._nodes, self._results, texts, strict=True):
            ends = [self._worker(word.strip()) for word in text.split(",")]
            result.attempts.append(
                node.attempt(
                    *(number, restarts, self._shape, ends, began_ns, attempt.get("ran", 1.0)),
                    *(self._step(attempt), attempt.get("oom", ())),
                )
            )

    @staticmethod
    def _step(attempt):
        """Return the step in the workers' last heartbeats, and whether it is counted across restarts. Return
        ``None`` if there were no heartbeats.
        """
        if "step" not in attempt:
            return (attempt["global_step"], True) if "global_step" in attempt else None
        return None if attempt["step"] is None else (attempt["step"], False)

    def _worker(self, word):
        """Return how a worker ends. ``word`` names an entry of the vocabulary, optionally followed by ``@``
        and the time in ms.
        """
        name, _, at = word.partition("@")
        end = self._vocabulary[name]
        return {**end, "at": float(at or end.get("at", 0))}

    def verdicts(self):
        """Return the verdicts of all nodes."""
        return self._one_node() if len(self._nodes) == 1 else self._several_nodes()

    def _one_node(self):
        decisions, actions, result = OneNode(self.job), [], self._results[0]
        for event in (machine.Begin(), machine.RendezvousCompleted()):
            actions = decisions.step(event)
        for number, attempt in enumerate(self._attempts):
            if number:
                decisions.step(machine.DelayOver())
                decisions.step(machine.RendezvousCompleted())
            decisions.step(machine.Started())
            self._record(number, decisions._state.restarts, attempt)
            decisions.observe(result.attempts[-1])
            actions = decisions.step(self._end_of_group(attempt, result.attempts[-1]))
            if decisions.phase.is_terminal:
                break
        is_over = decisions.phase.is_terminal
        return [
            self._verdict(result, decisions.phase, actions, decisions._state.restarts)
            if is_over
            else (self._going_on(result.attempts[-1], decisions._state.restarts))
        ]

    @staticmethod
    def _end_of_group(given, attempt):
        if "not_started" in given:
            return machine.StartFailed(given["not_started"])
        failed = any(worker.exitcode != 0 for worker in attempt.exits.values()) or attempt.expired
        return machine.GroupEnded(
            "failed" if failed else "succeeded",
            tuple(given.get("stuck", ())),
            unfit=given.get("unfit"),
            found_unfit=given.get("found_unfit"),
        )

    def _verdict(self, result, phase, actions, restarts):
        result.phase, result.exit_code = phase, 0 if phase is machine.Phase.SUCCEEDED else 1
        for action in actions:
            if isinstance(action, machine.ReportFailure):
                result.message, result.verdict = action.message, action.verdict
        return self._reported(result, restarts)

    def _reported(self, result, restarts):
        failed = job_report.all_failures(result) if result.exit_code else {}
        headline = job_report.headline_of(result, failed) if failed else None
        code = job_report.exit_code(ExitCodes.parse(self.job.exit_codes), result, failed)
        report = job_report.report(self.job, result, failed, headline, code)
        text = job_report.termination_message(report) if result.exit_code else ""
        return Verdict(report["verdict"], code, restarts, report["root_cause"], text)

    @staticmethod
    def _going_on(attempt, restarts):
        failed = failed_attempt.failures(attempt)
        root = root_cause(failed) if failed else None
        text = failed_attempt.first_of(attempt)[1] if failed else ""
        return Verdict(None, None, restarts, root, text)

    def _several_nodes(self):
        count = len(self._nodes)
        cluster = Cluster(
            min_nodes=self._case.get("min_nodes", count), max_nodes=count, policy=self.job.restart_settings
        )
        agents = [cluster.add(NODES[place]) for place in range(count)]
        for number, attempt in enumerate(self._attempts):
            self._record(number + 1, cluster.head.used, attempt)
            cluster.now += int(attempt.get("ran", 1.0) * 1e9)
            self._report(agents, attempt)
            if any(agent.outcome is not None for agent in agents):
                break
            for agent in agents:
                if "delay" in agent.timers:
                    agent.fire("delay")
        here = [place for place in range(count) if NODES[place] != self._attempts[-1].get("lost")]
        return [self._of_node(cluster, agents[place], place) for place in here]

    def _report(self, agents, given):
        """Let the nodes report. All nodes report their first failures, and then the exits of their
        workers.
        """
        ended = {}
        for place in self._order:
            agent, node, attempt = agents[place], self._nodes[place], self._results[place].attempts[-1]
            with node:
                cause = node.caused(attempt, self.job)
                if cause is not None and attempt.first_failure is not None:
                    agent.send(messages.WorkerFailed(node.first_word(attempt).encoded()))
            here = given if given.get("on", agent.name) == agent.name else {}
            self._last[place] = cause, here.get("found_unfit")
            ended[place] = messages.GroupEnded(
                None if cause is None else cause.encoded(), here.get("unfit"), unfit=here.get("found_unfit")
            )
            if all(worker.exitcode == 0 for worker in attempt.exits.values()):
                ended[place] = messages.WorkersDone()
        for place, event in ended.items():
            if agents[place].name == given.get("lost"):
                agents[place].kill()
            else:
                agents[place].send(event)

    def _of_node(self, cluster, agent, place):
        outcome, head, result = agent.outcome, cluster.head, self._results[place]
        if outcome is None:
            text = "\n".join([*(stop.why for stop in agent.all(messages.Stop)), *agent.texts])
            return Verdict(None, None, head.used, None, text)
        result.phase = machine.Phase.FAILED if outcome.kind != "succeeded" else machine.Phase.SUCCEEDED
        result.exit_code = 0 if outcome.kind == "succeeded" else 1
        cause, found_unfit = self._last[place]
        alone = has_failed_alone(cause, head.failures, agent.name)
        result.verdict = verdict_of(outcome, is_unfit=found_unfit is not None, has_failed_alone=alone)
        result.message = outcome.message
        if outcome.cause is not None:
            result.first_cause = Cause.decoded(outcome.cause)
        return self._reported(result, head.used)


def orders(case):
    """Return all orders in which the nodes of a case can report; for more than three nodes, only the
    ascending and the descending order.
    """
    first = case["attempts"][0]
    nodes = (first if isinstance(first, str) else first["nodes"]).count("|") + 1
    return list(itertools.permutations(range(nodes))) if nodes <= 3 else [range(nodes), range(nodes)[::-1]]


def expected(case, node) -> dict[str, Any]:
    """Return the fields of the verdict that a case specifies for a node."""
    then = {**case["then"], **case["then"].get(node, {})}
    return {name: then[name] for name in ("verdict", "code", "restarts", "root") if name in then}
