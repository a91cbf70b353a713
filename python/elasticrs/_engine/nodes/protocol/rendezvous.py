"""Descriptions of a rendezvous, of this node's agent, and of its workers' command. All nodes of a job have to
run the same command, so that independent jobs never merge into one.

- **CMD-1** Two commands are the same if their programs, arguments and users are equal. The Python interpreter
  and the options of the launcher are not compared.
- **CMD-2** The comparison ignores the values of the options in :data:`OF_ONE_NODE`, and words that differ
  only in the name of the node.
- **CMD-3** The record of a command in the store has a limited size. Of a longer command, a digest replaces
  the rest.
"""

from __future__ import annotations

import json
import os
import sys

from elasticrs._engine.job.value import Value, fresh
from elasticrs._engine.nodes.transport.addresses import is_unspecified, shown_endpoint
from elasticrs._engine.workers.process import parse_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs._engine.job.restart_policy import RestartSettings
    from elasticrs._engine.nodes.transport.etcd_site import EtcdSite
    from elasticrs._engine.nodes.transport.settings import Settings


class Rendezvous(Value):
    """Description of a rendezvous: its store, its nodes, and its settings on this node.

    Args:
        backend: ``c10d`` (also for its alias ``elasticrs``), ``static`` or ``etcd``.
        host: host of the endpoint, or of etcd's first endpoint, without brackets.
        port: port of the endpoint; 0 for any free port if this agent hosts the store.
        run_id: name of the job, as given by the user.
        node_rank: rank of this node with ``static``; otherwise ``None``.
        etcd: addresses and settings of etcd; ``None`` for elasticrs's own store.
        config: settings as the user has given them.
        member: prefix of the names of this process's registrations; a random name if ``None``.
        replaces: prefix of the registrations of a dead process that this process replaces.
        clients: number of clients of the store on each node.
        job: name of the job in the store; the run id if ``None``.
        scope: prefix of the keys that the token gives access to; ``None`` for all keys.
        command: command of the workers; ``None`` if it is unknown.
    """

    backend: str
    host: str
    port: int
    _: KW_ONLY
    run_id: str
    min_nodes: int
    max_nodes: int
    settings: Settings
    node_rank: int | None = None
    local_addr: str | None = None
    etcd: EtcdSite | None = None
    config: Mapping[str, object] = fresh(factory=dict)
    member: str | None = None
    replaces: str | None = None
    clients: int = 1
    job: str | None = None
    scope: str | None = None
    command: Command | None = None

    @property
    def needs_no_other_node(self) -> bool:
        return self.max_nodes == 1 and self.command is not None and self.etcd is None

    @property
    def endpoint(self) -> str:
        """Endpoint as ``HOST:PORT`` (IPv6 in brackets), or all endpoints of etcd, separated by commas."""
        return shown_endpoint(self.host, self.port) if self.etcd is None else self.etcd.shown

    @property
    def store(self) -> str:
        return f"the rendezvous store {self.endpoint}" if self.etcd is None else f"etcd at {self.endpoint}"

    @property
    def max_connections(self) -> int:
        """Maximum number of connections to the rendezvous store, with room for stale ones and for tools."""
        return 2 * self.max_nodes * self.clients + 64

    @property
    def is_static(self) -> bool:
        return self.backend == "static"

    @property
    def master_port(self) -> int | None:
        """Port of the workers' store with the back end ``static``; ``None`` if each round has a new one."""
        return self.port if self.is_static else None

    @property
    def given_addr(self) -> str | None:
        """Address that the user gave for this node; with ``static`` and rank 0, the endpoint's host."""
        if self.is_static and self.node_rank == 0 and not is_unspecified(self.host):
            return self.host
        return self.local_addr.strip("[]") if self.local_addr else None

    @property
    def store_lost_timeout(self) -> float:
        """Seconds for which this agent tries to reconnect to a lost store."""
        given = self.settings
        # With ``static``, stopping workers may occupy the store's port for ``settle`` seconds.
        return max(given.store_lost_timeout, given.settle) if self.is_static else given.store_lost_timeout


class ThisAgent(Value):
    """Description of this node's agent and its workers, as input to the rendezvous.

    Args:
        agent: name of this process in all its registrations, random except for the prefix that
            :attr:`Rendezvous.member` gives.
        node: name of this node, for the user and for the order of ranks.
        host: identifier of the host. Agents with the same identifier share their loopback interface.
        fatal_exit_codes: exit codes of workers that end the job, as the user has written them.
        hosts_store: true if this process serves the store, so that it must stay until the job is over.
        fallback_addr: address for other hosts if the connection to the store has a loopback address.
        keeps_workers: true if workers keep running when a round ends. The caller then tells the user about
            rounds.
        health_timeout: seconds that the node check and the wait for free device memory take at most, after
            the workers have stopped.
        why_hosts: why this process serves the store; ``None`` if it does not.
        launch: session or Slurm step in which the user started this agent. Compared only on one host.
    """

    job: str
    agent: str
    node: str
    host: str
    role: str
    nproc: int
    policy: RestartSettings
    hosts_store: bool
    fallback_addr: str | None
    keeps_workers: bool = False
    fatal_exit_codes: str = ""
    health_timeout: float = 0.0
    why_hosts: str | None = None
    launch: str = ""


OF_ONE_NODE = frozenset({
    *("node-rank", "machine-rank", "node-id", "node-index"),
    *("node-name", "node-addr", "hostname", "host-name", "local-addr"),
})  # fmt: skip
"""Names of script options whose values usually differ between the nodes of one job."""

ANY = "*"
"""Placeholder for a value that is not compared."""

MAX_WORD = 200
MAX_WORDS = 3000
"""Maximum size of a command, in bytes of JSON. ``MAX_WORD`` is the maximum for one of its words."""


class Command(Value):
    """Command of a node's workers. ``place`` is the absolute path of the program. It is compared only between
    agents on the same host, because other hosts may keep the job in another folder.
    """

    words: tuple[str, ...]
    place: str
    node: str
    user: int


def command_of(words: Sequence[str], place: str) -> Command:
    return Command(tuple(_bounded(list(_hidden(words)))), _cut(place), os.uname().nodename, os.geteuid())


def command_of_file(path: str, arguments: Sequence[str]) -> Command:
    return command_of([os.path.normpath(path), *arguments], _real(path))


def command_of_python(words: Sequence[str]) -> Command:
    """Return the command that a Python interpreter with these arguments runs, without its own options."""
    found = parse_python(words)
    program = found.program or ""
    if found.kind == "script":
        return command_of_file(program, found.arguments)
    name = program if found.kind == "stdin" else f"-{found.kind} {program}"
    return _command_of_name(name, found.arguments)


def _command_of_name(name: str, arguments: Sequence[str]) -> Command:
    """Return the command of a program that is given by name. Its place includes the current folder, because
    the name may mean another program in another folder.
    """
    return command_of([name, *arguments], os.path.join(_real(os.curdir), name))


def command_of_program(program: str, arguments: Sequence[str]) -> Command:
    """Return the command that runs a program. A name without a folder is looked up in PATH."""
    if os.sep in program:
        return command_of_file(program, arguments)
    return _command_of_name(program, arguments)


def command_of_function(function: Callable[..., object]) -> Command:
    """Return the command of a function. Its arguments are not compared, because they may be any objects."""
    module = getattr(function, "__module__", "")
    name = f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if file and module == "__main__":
        name += f" of {os.path.basename(file)}"
    return command_of([name], os.path.join(_real(file or os.curdir), name))


def difference(ours: Command, theirs: Command, *, is_same_host: bool) -> tuple[str, str] | None:
    """Return two phrases, one for each command, for their first difference; ``None`` if they are the same."""
    if ours.user != theirs.user:
        return f"user {ours.user}", f"user {theirs.user}"
    is_elsewhere = ours.place != theirs.place
    if is_elsewhere and (is_same_host or not _is_same(ours, theirs, 0)):
        program = f"program {ours.words[0]!r}"
        if ours.words[0] == theirs.words[0]:
            return f"{program} at {ours.place!r}", f"the one at {theirs.place!r}"
        return program, repr(theirs.words[0])
    for number in range(1, max(len(ours.words), len(theirs.words))):
        if not _is_same(ours, theirs, number):
            own, other = _word(ours, number), _word(theirs, number)
            return f"argument {number} {_shown(own)}", _shown(other)
    return None


def _shown(word: str | None) -> str:
    return "(none)" if word is None else repr(word)


def _word(command: Command, number: int) -> str | None:
    return command.words[number] if number < len(command.words) else None


def _is_same(ours: Command, theirs: Command, number: int) -> bool:
    own, other = _word(ours, number), _word(theirs, number)
    if own is None or other is None:
        return own == other
    return own == other or _without_name(own, ours.node) == _without_name(other, theirs.node)


def _without_name(text: str, node: str) -> str:
    """Replace a node's full and short host name with a placeholder, wherever they are whole words."""
    for name in filter(None, dict.fromkeys((node, node.partition(".")[0]))):
        start = 0
        while (start := text.find(name, start)) >= 0:
            end = start + len(name)
            is_word = not (text[:start][-1:].isalnum() or text[end : end + 1].isalnum())
            if is_word:
                text = text[:start] + ANY + text[end:]
            start += len(ANY) if is_word else len(name)
    return text


# --- parts of a command ---


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:
        # The working directory was removed, so a relative path cannot be resolved.
        return path


def _hidden(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with a placeholder for the values of options that differ between nodes."""
    hides_next = False
    for word in words:
        option, equals, _ = word.partition("=")
        is_of_node = option.startswith("--") and option[2:].replace("_", "-").lower() in OF_ONE_NODE
        if hides_next and not word.startswith("--"):
            yield ANY
        else:
            yield f"{option}={ANY}" if is_of_node and equals else word
        hides_next = is_of_node and not equals


def _bounded(words: Sequence[str]) -> Iterator[str]:
    left = MAX_WORDS
    for index, word in enumerate(words):
        short = _cut(word)
        left -= _size(short)
        if left < 0:
            yield f"... {len(words) - index} more ({_digest(words[index:])})"
            return
        yield short


def _cut(word: str) -> str:
    if _size(word) <= MAX_WORD:
        return word
    kept = word[: MAX_WORD // 2]
    while _size(kept) > MAX_WORD // 2:
        kept = kept[: len(kept) * 3 // 4]
    return f"{kept}... ({_digest([word])})"


def _size(word: str) -> int:
    return len(json.dumps(word))


def _digest(words: Sequence[str]) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(words).encode("ascii")).hexdigest()[:16]
