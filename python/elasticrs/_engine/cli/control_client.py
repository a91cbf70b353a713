"""Finds the agents of jobs on this machine, and sends requests of ``elasticctl`` to their Unix sockets."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import stat
import struct
from contextlib import closing, suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticrs._engine.job.config import CONTROL_FOLDERS, control_folder_from
from elasticrs._engine.process.other_processes import read_state
from elasticrs._engine.supervise.observe.status_text import why_stuck
from elasticrs._engine.supervise.run.orders import DONE, FAILED, NO_JOB, REFUSED, STACKS_LIMIT, USAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

SIGNAL_LIMIT = 90.0
"""Maximum seconds to wait until the ranks have got the signal to save or stop. Agents send it within 60 s."""

ANSWER_LIMIT = 5.0
"""Maximum seconds to wait for an agent's answer."""

_MAX_ANSWER = 64 << 20
_SUFFIX = ".sock"


class Problem(Exception):  # noqa: N818 -- it is a line for the user
    """Raised to end ``elasticctl`` with an exit code. The text tells the user why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Connection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # With Python's own time limit, connecting would fail at once if the socket's queue is full.
        seconds, part = divmod(self.timeout or 0.0, 1)
        limit = struct.pack("ll", int(seconds), int(part * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.sock.connect(self._path)
        self.sock.settimeout(self.timeout)


class Agent(NamedTuple):
    """The agent of a job on this machine. ``path``: its Unix socket. ``status``: the job's status; ``None``
    if the agent does not answer.
    """

    pid: int
    path: str
    status: dict[str, Any] | None

    @property
    def names(self) -> set[str]:
        """Names by which a user can choose this agent's job."""
        job = (self.status or {}).get("job") or {}
        name = str(job.get("name") or "")
        return {str(self.pid), str(job.get("run_id")), name, os.path.basename(name)} - {"", "None"}

    def is_named(self, beginning: str) -> bool:
        return any(name.startswith(beginning) for name in self.names - {str(self.pid)})

    @property
    def title(self) -> str:
        job = (self.status or {}).get("job") or {}
        return f"{os.path.basename(str(job.get('name', '')))} (job {job.get('run_id')}, pid {self.pid})"

    def asked_again(self) -> dict[str, Any]:
        """Return the job's status now. Raises :class:`Problem` if the agent does not answer."""
        try:
            return read_status(self.path)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Problem(FAILED, f"{self.title}: no answer from the agent: {_why(error)}") from None

    def with_others(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return the status with two additions: which ranks of this node are late, and the states of other
        nodes' ranks. The agent gets these states from the other nodes' agents. If the agent's loop is
        stuck, the status says nothing about late ranks, and has no ranks of other nodes. Raises
        :class:`Problem`.
        """
        if not why_stuck(status):
            try:
                answer = self._answer({"do": "others"})
            except Problem:
                status = self.asked_again()
                if not why_stuck(status):
                    raise
            else:
                late = {each["local_rank"]: each for each in answer.get("late") or ()}
                workers = [{**worker, **late.get(worker["local_rank"], {})} for worker in status["workers"]]
                return {**status, "workers": workers, "others": answer.get("others") or []}
        return {**status, "others": []}

    def stacks(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return the call stacks of the ranks, from the agent or, if the agent's loop is stuck, from the
        workers of this node. Raises :class:`Problem`.
        """
        if why_stuck(status):
            return _asked_directly(status)
        answer = self._answer({"do": "stacks"})
        if answer["code"] != DONE:
            raise Problem(int(answer["code"]), f"{self.title}: {answer['message']}")
        return answer

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        for answer in self.ask(order):
            return answer
        raise self.has_ended()

    def has_ended(self) -> Problem:
        return Problem(FAILED, f"{self.title}: the agent has ended before its answer")

    def ask(self, order: dict[str, Any], limit: float | None = None) -> Iterator[dict[str, Any]]:
        """Send an order to the agent, and iterate over the lines of its answer. Raise :class:`Problem` if a
        line does not come within ``limit`` seconds (by default :data:`ANSWER_LIMIT`).
        """
        try:
            with closing(Connection(self.path, limit or ANSWER_LIMIT)) as connection:
                connection.request("POST", "/do", json.dumps(order))
                response = connection.getresponse()
                if response.status != 200:
                    raise Problem(REFUSED, response.read(1000).decode(errors="replace").strip())
                for line in response:
                    yield json.loads(line)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Problem(FAILED, f"{self.title}: no answer from the agent: {_why(error)}") from None


class Outcome:
    """The outcome of a job, which its agent tells when it ends to all clients that receive the texts of its
    status page. A thread receives them.
    """

    def __init__(self, agent: Agent) -> None:
        self._title = agent.title
        self._told: dict[str, Any] = {}
        self._thread = Thread(target=self._receive, args=(_texts(agent.path),), daemon=True)
        self._thread.start()

    def _receive(self, lines: Iterable[bytes]) -> None:
        with suppress(OSError, ValueError, http.client.HTTPException):
            for line in lines:
                if line.startswith(b"data:"):
                    self._told = json.loads(line.removeprefix(b"data:"))["view"] or {}

    def tell(self) -> tuple[int, str]:
        """Return the exit code of ``elasticctl`` and a line about the outcome, after the agent has ended."""
        self._thread.join(ANSWER_LIMIT)
        state, failures = self._told.get("state"), self._told.get("failures") or ()
        ended = f"{self._title} has ended"
        if state in ("succeeded", "stopped"):
            return DONE, f"{ended}: {state}"
        if state != "failed":
            return DONE, ended  # The agent was killed, or already served as many clients as it can.
        return FAILED, f"{ended}: failed{f'; {failures[-1][1]}' if failures else ''}"


def _texts(path: str) -> Iterable[bytes]:
    """Ask an agent to send each new text of its status page. Return the lines that come until it ends."""
    with suppress(OSError, http.client.HTTPException), closing(Connection(path, ANSWER_LIMIT)) as connection:
        connection.request("GET", "/status/stream")
        stream, response = connection.sock, connection.getresponse()
        stream.settimeout(None)
        if response.status == 200:
            return response
    return ()


def read_status(path: str) -> dict[str, Any]:
    """Ask an agent for its job's status. Raises ``OSError``, ``ValueError`` and ``HTTPException``."""
    with closing(Connection(path, ANSWER_LIMIT)) as connection:
        connection.request("GET", "/status")
        response = connection.getresponse()
        content = response.read(_MAX_ANSWER)
        if response.status != 200:
            raise ValueError(content[:1000].decode(errors="replace").strip())
        status = json.loads(content)
    if not isinstance(status, dict):
        raise ValueError("its status is no JSON object")
    return status


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def find(tell: Callable[[str], object], wanted: str | None = None) -> list[Agent]:
    """Return this user's agents on this machine, sorted by pid. If one of them has the pid ``wanted``, return
    only this one. If a killed agent has left its socket, remove the socket, and ``tell`` the user. Raises
    :class:`Problem` if another user owns the folder of the sockets.
    """
    folder = control_folder_from(os.environ)
    try:
        if os.geteuid() != 0:
            _check_folder(folder)
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX)) if folder else []
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Problem(REFUSED, f"{folder}: {error.strerror}") from None
    if f"{wanted}{_SUFFIX}" in names:
        # Do not ask the other agents, because an agent that is stuck would delay the answer.
        names = [f"{wanted}{_SUFFIX}"]
    killed: list[str] = []
    found = [_agent(os.path.join(folder, name), killed) for name in names]
    if len(killed) == 1:
        pid = os.path.basename(killed[0]).removesuffix(_SUFFIX)
        tell(f"agent {pid} was killed: removed the socket that it has left, {killed[0]}")
    elif killed:
        tell(f"removed the sockets of {len(killed)} agents that were killed")
    return sorted(agent for agent in found if agent is not None)


def _check_folder(path: str) -> None:
    """Raise ``OSError`` unless ``path`` is a folder that only this user can use."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"the folder belongs to user {found.st_uid}", path)
    if found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "other users can open the folder (chmod 700)", path)


def _agent(path: str, killed: list[str]) -> Agent | None:
    name = os.path.basename(path).removesuffix(_SUFFIX)
    if not name.isdecimal():
        return None
    pid = int(name)
    try:
        return Agent(pid, path, read_status(path))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None  # The job has just ended.
        if error.errno == errno.ECONNREFUSED:
            os.unlink(path)
            killed.append(path)
            return None
        return Agent(pid, path, None)
    except (ValueError, http.client.HTTPException):
        return Agent(pid, path, None)


def choose(agents: Sequence[Agent], wanted: str | None) -> Agent:
    """Return the agent of the job that the user means by ``wanted``: its run id or script, or the start of
    one, or the agent's pid; ``None``: the only job. Raises :class:`Problem` unless exactly one job fits.
    """
    found = [agent for agent in agents if wanted is None or wanted in agent.names]
    if wanted and not found:
        found = [agent for agent in agents if agent.is_named(wanted)]
    if len(found) == 1:
        return found[0]
    shown = [_listed(agent) for agent in found or agents]
    listed = "; ".join(shown[:20]) + ("" if len(shown) <= 20 else f"; and {len(shown) - 20} more")
    if found:
        raise Problem(USAGE, f"{len(found)} jobs on this machine, choose one with --job PID: {listed}")
    if agents:
        raise Problem(NO_JOB, f"no job {wanted!r} on this machine; there is {listed}")
    raise Problem(NO_JOB, no_jobs())


def _listed(agent: Agent) -> str:
    if agent.status is None:
        return f"pid {agent.pid}"
    group = agent.status["group"] or {}
    nodes = group.get("world_size", 1)
    return agent.title + (f" with group rank {group['rank']} of {nodes} nodes" if nodes > 1 else "")


def no_jobs() -> str:
    """Say that this user has no job on this machine, and which other users may have some."""
    mine = "no job of this user on this machine"
    root, prefix = os.path.split(CONTROL_FOLDERS)
    others = [name.removeprefix(prefix) for name in os.listdir(root) if name.startswith(prefix)]
    uids = sorted(int(uid) for uid in others if uid.isdecimal() and int(uid) != os.geteuid())
    if not uids:
        return mine
    whose = f"user{'s' if len(uids) > 1 else ''} {', '.join(map(str, uids[:10]))}"
    return f"{mine}; there may be jobs of {whose}, which only they and root can reach"


def why_silent(pid: int) -> str:
    """Return why an agent does not answer, as far as ``/proc`` shows it."""
    if read_state(pid) in ("T", "t"):
        return f"agent {pid} is stopped by a signal: kill -CONT {pid} continues it"
    return f"agent {pid} does not answer: {what_to_do(pid)}"


def what_to_do(pid: int) -> str:
    """Return the commands with which the user can inspect a hung agent and kill its job."""
    return f"py-spy dump --pid {pid} shows where it is, and kill -9 {pid} ends the job"


def _asked_directly(status: dict[str, Any]) -> dict[str, Any]:
    """Get the call stacks of this node's workers without their agent. Raises :class:`Problem`."""
    from elasticrs._engine.supervise.attempt import Attempt
    from elasticrs._engine.supervise.hang_diagnosis import told_stacks, where_running
    from elasticrs._engine.workers.event_log import Adopted
    from elasticrs._engine.workers.logs import LogPaths
    from elasticrs._engine.workers.plan import Plan, WorkerRanks

    workers = [each for each in status["workers"] if each["state"] != "EXITED" and each["rank"] is not None]
    if not workers:
        raise Problem(REFUSED, "no workers are running on this node")
    group, count = status["group"], len(workers)
    ranks = [
        WorkerRanks("", at, each["rank"], group["rank"], 0, count, group["workers"], group["world_size"], 0)
        for at, each in enumerate(workers)
    ]
    files = LogPaths(error_files={at: _error_file(each["pid"]) for at, each in enumerate(workers)})
    attempt = Attempt(status["round"], status["restarts"], Plan(ranks, "", 0), paths=files)
    attempt.append(Adopted([each["pid"] for each in workers]))
    answer = told_stacks([where_running(attempt, STACKS_LIMIT)], group["workers"])
    elsewhere = group["workers"] - len(status["workers"]) if group["world_size"] > 1 else 0
    return {**answer, "not_asked": elsewhere}


def _error_file(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    except OSError:
        return ""  # The worker has just exited.
    return os.fsdecode(variables.get(b"TORCHELASTIC_ERROR_FILE", b""))
