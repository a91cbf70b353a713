"""Session between this agent and the rendezvous store, and the store itself if this agent hosts it."""

from __future__ import annotations

import errno
import os
from functools import partial

from elasticrs._engine.failures.failure import Clock
from elasticrs._engine.job.value import Record
from elasticrs._engine.nodes import hosting
from elasticrs._engine.nodes.protocol.records import WORKERS_STORES, Keys
from elasticrs._engine.nodes.protocol.rendezvous import ThisAgent
from elasticrs._engine.nodes.transport.addresses import is_unspecified, packed
from elasticrs._engine.nodes.transport.coordination import (
    Client,
    Connected,
    ConnectionLost,
    NativeSession,
    Notice,
    Put,
    Server,
    Txn,
)
from elasticrs._engine.process.background_call import BackgroundCall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.nodes.protocol.records import Head
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.nodes.transport.coordination import Request, StoreEvent
    from elasticrs._engine.nodes.transport.store import Store


_REMEDIES = {
    "refused": "nothing is listening there (yet): is the agent on that node running, and do all nodes have "
    "the same --rdzv-endpoint?",
    "unreachable": "is the address right, and is there a route to that node?",
    "not_ours": "choose another port with --rdzv-endpoint HOST:PORT on all nodes",
    "run": "give all nodes of a job the same --rdzv-id, and each job a port of its own",
    "token": "give all nodes the same token (ELASTICRS_TOKEN, or token_file=PATH in --rdzv-conf)",
    "version": "install the same release of elasticrs on all nodes",
    "other": "start the job again",
}
"""Advice to the user, by the kind of connection loss."""
_REMEDIES_OF_ETCD = {
    "refused": "nothing is listening there (yet): does etcd run, and is --rdzv-endpoint right?",
    "unreachable": "is the address right, and is there a route to it?",
    "closed": "is that etcd's port for clients, and do protocol and ssl_cert in --rdzv-conf match etcd?",
    "not_ours": "--rdzv-endpoint must name members of an etcd of version 3.4 or later (port 2379)",
    "tls": "protocol, ca_cert, ssl_cert and ssl_cert_key in --rdzv-conf must match etcd",
    "denied": "user and password_file in --rdzv-conf must be those of a user who may read and write all "
    "keys that start with {prefix!r} (etcd_prefix)",
    "limit": "free space in etcd (alarm NOSPACE: compact, defragment, disarm)",
}
_BY_HAND = (
    ("--rdzv-endpoint HOST:PORT", "--master-port PORT"),
    ("--rdzv-endpoint", "--master-addr and --master-port"),
)
"""Options that messages to the user recommend, each with the option to name instead for ``static``."""

_CALL_TIMEOUT = 1.0
"""Seconds to wait for a name lookup or for a store's reply. The next attempt to connect tries again."""

_BEFORE_MEETING = ("refused", "unreachable")
"""Kinds of connection loss that suggest a wrong endpoint if this agent has never been connected."""


_ANY_RUN = ""
"""Run id that only a store for all jobs accepts. An agent's store silently closes the connection."""


class CannotHost(Exception):  # noqa: N818 -- a statement, told to the user
    """Raised with a message to the user if this agent cannot host the store although it must."""


class KeptState(Record):
    """State that an agent keeps if it runs several jobs: their number, and the open store that has them."""

    runs: int = 0
    server: Server | None = None

    def is_needed(self) -> bool:
        return self.server is not None and self.server.sessions() > 0

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


class RendezvousStore:
    """An agent's connection to the rendezvous store, with at most one session at a time. Without a
    ``supervisor``, a separate thread serves the store. ``kept`` belongs to an agent that runs several times,
    each time with another job. ``found`` is the result of :func:`.hosting.decide_hosting`. If it is ``None``,
    the constructor calls that function, which may raise :class:`.UsageError`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        supervisor: _core.Supervisor | None,
        kept: KeptState | None = None,
        found: hosting.Hosting | None = None,
    ) -> None:
        self._resolver = hosting.SystemResolver()
        if found is None:
            found = self._ask(partial(hosting.decide_hosting, rendezvous, self._resolver), None)
        self._hosting: hosting.Hosting = found
        self._kept = kept
        self.job = rendezvous.job or rendezvous.run_id
        # Name of the job whose lease in etcd holds the keys that outlive a session, the same for all runs.
        # Workers use another job name, because they cannot attach keys to the agents' lease.
        self._lasting = self.job
        if kept is not None:
            kept.runs += 1
            if kept.runs > 1:
                self.job += f"#{kept.runs}"
        self._rendezvous = rendezvous
        self._supervisor = supervisor
        self._server: Server | None = None
        self._session: NativeSession | None = None
        self._met: tuple[bytes, int] | None = None
        self._may_decide_again = False
        self._has_met = False
        self._clock = Clock(0, None)
        self._shared: Store | None = None
        self._notices: list[Notice] = []
        self._led_to: tuple[str, int] | None = None
        # With ``static``, open the nodes' shared store before the round: during it, workers use the port.
        self._shares_early = rendezvous.is_static and (kept is not None or supervisor is None)

    @staticmethod
    def _ask(question: Callable[[], Any], seconds: float | None) -> Any:
        """Call a function that may block, and return its result; ``None`` after ``seconds``."""
        asked = BackgroundCall(question)
        try:
            return asked.take() if asked.wait(seconds) else None
        finally:
            asked.close()

    @property
    def hosts(self) -> bool:
        return self._server is not None

    @property
    def doubt(self) -> str | None:
        """Warning to the user about hosting the store on this machine."""
        return self._hosting.doubt

    @property
    def fd(self) -> int | None:
        """File descriptor that is readable when :meth:`take` has events; ``None`` without a session."""
        return self._session.fd if self._session is not None else None

    @property
    def clock(self) -> Clock:
        estimate = self._session.clock() if self._session is not None else None
        if estimate is not None:
            self._clock = Clock(*estimate)
        return self._clock

    def host_if_possible(self) -> None:
        """Serve the store if this agent may host it and the port is free, or raise :class:`CannotHost`."""
        if not self._hosting.may_host:
            return
        if self._kept is not None and self._kept.server is not None:
            self._server, self._kept.server = self._kept.server, None
            self._lead_workers(None)
            return
        try:
            self._server = self._serve()
            self._lead_workers(None)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not self._hosting.is_explicit:
                # The port is taken, probably by another agent that hosts the store. Become a client.
                self._host_alone()
                return
            option, other = "--rdzv-endpoint HOST:PORT", ""
            if self._rendezvous.is_static:
                option, other = "--master-port", " (is another agent with --node-rank 0 here?)"
            raise CannotHost(
                f"the rendezvous store cannot {error.strerror or error}{other}; choose another port with "
                f"{option} on all nodes"
            ) from error

    def _serve(self) -> Server:
        return Server(
            # An empty host makes the server listen on all IPv4 and IPv6 interfaces.
            [("" if each == hosting.ANY_ADDRESS[0] else each, port) for each, port in self._hosting.listen],
            run_id=self._rendezvous.run_id,
            token=self._rendezvous.settings.token,
            max_connections=self._rendezvous.max_connections,
            # Do not serve a store kept for later runs in the supervisor's thread, which may end earlier.
            supervisor=self._supervisor if self._kept is None else None,
        )

    def _host_alone(self) -> None:
        """Serve the store at a free port, because the endpoint's port is taken and this job needs no other
        node. Do nothing if a store for all jobs uses the endpoint's port, because an agent that waits in that
        store may later replace this one.
        """
        if not self._rendezvous.needs_no_other_node or self._ask(self._is_store_of_all_jobs, _CALL_TIMEOUT):
            return
        self._hosting = self._hosting.replaced(listen=hosting.ANY_PORT)
        try:
            self._server = self._serve()
        except OSError as error:
            raise CannotHost(f"the rendezvous store cannot {error.strerror or error}") from error
        self._notices.append(Notice(
            f"{self._rendezvous.endpoint} is in use, probably by another job: this job has one node and needs"
            f" no other, so its rendezvous uses port {self._server.port}"
        ))  # fmt: skip

    def _is_store_of_all_jobs(self) -> bool:
        from elasticrs._engine.nodes.transport.store import DistNetworkError, connect

        host, port, token = self._rendezvous.host, self._rendezvous.port, self._rendezvous.settings.token
        try:
            connect(host, port, _ANY_RUN, token=token, connect_timeout=_CALL_TIMEOUT).close()
        except DistNetworkError:
            return False
        return True

    def follow(self, head: Head | None) -> None:
        """Make the rendezvous store hosted here forward workers' connections to the workers' store of the
        round in ``head``. Some scripts need this, because they set ``MASTER_ADDR`` and ``MASTER_PORT`` to the
        endpoint of the rendezvous.
        """
        address = workers_store(head)
        if address != self._led_to:
            self._lead_workers(address)

    def _lead_workers(self, address: tuple[str, int] | None) -> None:
        # Do nothing with the back end `static`, because its workers use the port of the endpoint in any case.
        if self._server is not None and not self._rendezvous.is_static:
            self._led_to = address
            # In a job of one node, serve only the workers of this agent, because the job has no others.
            agent = os.getpid() if self._rendezvous.max_nodes == 1 else None
            self._server.lead_workers(address, agent)

    def announce_workers_store(self, agent: str, head: Head | None) -> None:
        """Tell a store for all jobs the address of the round's workers' store; see :meth:`follow`. Do nothing
        in a worker, because its token gives no access to the keys for that.
        """
        address = workers_store(head)
        rendezvous = self._rendezvous
        is_own_store = rendezvous.etcd is None and not rendezvous.is_static and rendezvous.job is None
        if address is None or self._server is not None or not is_own_store:
            return
        # Ignore the reply, because by default workers connect to the workers' store directly.
        put = Put(f"{WORKERS_STORES}{agent}", f"{address[0]} {address[1]}".encode(), True)
        self.send(Txn(0, [], [put]))

    def connect(self, *, same: bool = False) -> ConnectionLost | None:
        """Start to connect to the rendezvous store. :meth:`take` returns the result, except for a failure
        that is known immediately, which is returned here. Until this agent has connected once, every attempt
        except the first decides again whether this agent hosts the store. With ``same``, connect only to the
        store of the previous connection, or to one that continues with its state.
        """
        self.disconnect()
        if self._supervisor is not None:
            # No workers are left, so the nursery, which starts workers, may close its copy of the connection.
            self._supervisor.release_connection()
        if self._may_decide_again and self._server is None and self._rendezvous.etcd is None:
            question = partial(hosting.decide_again, self._hosting, self._rendezvous, self._resolver)
            self._hosting = self._ask(question, _CALL_TIMEOUT) or self._hosting
            try:
                self.host_if_possible()
            except CannotHost as error:
                return ConnectionLost("cannot_host", str(error))
        if self._shares_early:
            from elasticrs._engine.nodes.transport.store import DistNetworkError

            try:
                self.close_shared_store()
                self._shared = self._open_store("")
            except DistNetworkError:
                # Go on: the next step opens the agent's own connection. If that fails too, it reports why.
                self._shared = None
        try:
            self._session = self._connected(self._met if same else None)
        except OSError as error:
            return ConnectionLost("unreachable", f"no connection to {self._rendezvous.store}: {error}")
        if self._supervisor is not None:
            self._supervisor.watch_fd(self._session.fd)
        return None

    def _connected(self, met: tuple[bytes, int] | None) -> NativeSession:
        settings, supervisor = self._rendezvous.settings, self._supervisor
        # Without a supervisor, the agent itself reads the connection now and then, perhaps late. A limit for
        # the time between two reads would then end healthy sessions.
        stall_timeout = settings.stall_timeout if supervisor is not None else None
        more: dict[str, Any]
        if self._rendezvous.etcd is not None:
            more = {"links": (Keys(self.job).prefix.strip("/"), self.fallback_addr)}
        else:
            lease = {"interval": settings.keep_alive_interval, "attempts": settings.keep_alive_max_attempt}
            more = {**lease, "resume": True, "met": met}
        return NativeSession(self._client(stall_timeout=stall_timeout, supervisor=supervisor, **more))

    def _client(self, **more: Any) -> Client:
        rendezvous, connect_timeout = self._rendezvous, self._rendezvous.settings.connect_timeout
        if rendezvous.etcd is not None:
            return rendezvous.etcd.client(self._lasting, connect_timeout=connect_timeout, **more)
        return Client(
            *self.address,
            run_id=rendezvous.run_id,
            token=rendezvous.settings.token,
            scope=rendezvous.scope,
            connect_timeout=connect_timeout,
            **more,
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of elasticrs's own store for clients on this machine."""
        if self._server is None:
            return self._rendezvous.host, self._rendezvous.port
        address = self._hosting.listen[0][0]
        if is_unspecified(address):
            # Prefer IPv4 for workers, because programs expect it unless the endpoint is an IPv6 address.
            is_v4 = packed(address) == bytes(4) or self._rendezvous.host in ("localhost", "127.0.0.1")
            address = "127.0.0.1" if is_v4 else "::1"
        return address, self._server.port

    def disconnect(self) -> None:
        if self._session is not None:
            if self._supervisor is not None:
                self._supervisor.unwatch_fd(self._session.fd)
            self._met = self._session.met or self._met
            self._session.close()
            self._session = None

    def take(self) -> list[StoreEvent]:
        """Return the events that have arrived since the previous call. Never blocks."""
        if self._session is None:
            return []
        events: list[StoreEvent] = [*self._notices]
        self._notices.clear()
        for event in self._session.take():
            if isinstance(event, ConnectionLost):
                # A new decision on hosting would look the name up again, which is slow after a failed lookup.
                self._may_decide_again = not self._has_met and event.kind != "resolve"
                events.append(ConnectionLost(event.kind, self._explained(event)))
            elif isinstance(event, Connected) and self._shares_early and self._shared is None:
                # Reconnect, to open also the store that the nodes share. That failed before this connection,
                # probably because the store was not listening yet.
                self.disconnect()
                return [ConnectionLost("unreachable", f"only one connection to {self._rendezvous.endpoint}")]
            else:
                self._has_met = True
                events.append(event)
        return events

    def this_agent(self, **workers: Any) -> ThisAgent:
        """Describe this agent. ``workers`` are the arguments of :class:`.ThisAgent` about its workers."""
        member = self._rendezvous.member
        return ThisAgent(
            job=self.job,
            agent=os.urandom(8).hex() if member is None else f"{member}.{os.urandom(4).hex()}",
            node=node_name(),
            host=hosting.host_identity(),
            hosts_store=self.hosts,
            fallback_addr=self.fallback_addr,
            why_hosts=self.why_hosts,
            launch=launch_of(os.environ),
            **workers,
        )

    @property
    def fallback_addr(self) -> str | None:
        return self._hosting.fallback

    @property
    def why_hosts(self) -> str | None:
        return self._hosting.reason if self.hosts else None

    def _explained(self, lost: ConnectionLost) -> str:
        etcd = self._rendezvous.etcd
        if etcd is not None:
            is_passing = self._has_met and lost.kind in (*_BEFORE_MEETING, "closed")
            hint = "" if is_passing else _REMEDIES_OF_ETCD.get(lost.kind, "").format(prefix=etcd.prefix)
            return f"{lost.message}; {hint}" if hint else lost.message
        if lost.kind == "resolve":
            return hosting.unresolved(self._rendezvous, self._hosting.trouble or lost.message)
        todo = None if lost.kind in _BEFORE_MEETING and self._has_met else _REMEDIES.get(lost.kind)
        if todo is not None and self._rendezvous.is_static:
            for option, by_hand in _BY_HAND:
                todo = todo.replace(option, by_hand)
        return lost.message if todo is None else f"{lost.message}; {todo}"

    def send(self, request: Request) -> None:
        """Send a request to the store. Do nothing without a connection to it. Any thread may call this."""
        if (session := self._session) is not None:
            session.send(request)

    def is_needed(self) -> bool:
        if self._server is None:
            return False
        own = (self._session is not None) + (self._shared is not None)
        return self._server.sessions() > own

    def open_shared_store(self, round: int) -> Store:  # noqa: A002 -- the field's own word
        """Open the store for user data of a round on a new connection, and close the connection of the
        previous round. With ``static``, one connection serves all rounds. Keys of other rounds are not
        visible. Raises :class:`DistNetworkError`.
        """
        prefix = Keys(self.job).store(round)
        if self._shares_early and self._shared is not None:
            return self._shared.with_prefix(prefix)
        self.close_shared_store()
        self._shared = self._open_store(prefix)
        return self._shared

    def open_job_store(self) -> Store:
        """Open a store that the job's processes share across rounds, or raise :class:`DistNetworkError`."""
        return self._open_store(Keys(self.job).job_store)

    def _open_store(self, prefix: str) -> Store:
        from elasticrs._engine.nodes.transport.store import connected

        return connected(self._client(stall_timeout=None), prefix)

    def close_shared_store(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def stop_listening(self) -> None:
        """Stop accepting connections, so that workers can use the port. Existing connections stay open."""
        if self._server is not None:
            self._server.stop_listening()

    def listen_again(self) -> None:
        """Accept connections to this agent's store again, or raise :class:`OSError` if the port is taken."""
        if self._server is not None:
            self._server.listen_again()

    @property
    def may_stay(self) -> bool:
        """True if the store can stay open for the agent's next run."""
        return self._kept is not None

    def close(self, *, stays: bool = False) -> None:
        """Close all connections and, unless it ``stays`` for the next run, this agent's store. Idempotent."""
        self.close_shared_store()
        self.disconnect()
        if self._kept is not None and stays:
            self._kept.server, self._server = self._server, None
        if self._server is not None:
            self._server.close()
            self._server = None


def workers_store(head: Head | None) -> tuple[str, int] | None:
    """Return the address of the workers' store in the running round; ``None`` if no round is running."""
    return head.master if head is not None and head.state == "RUNNING" else None


def launch_of(environ: Mapping[str, str]) -> str:
    """Return an identifier of this process's launch: its Slurm step, or else its session."""
    step = environ.get("SLURM_STEP_ID")
    return f"session {os.getsid(0)}" if step is None else f"step {environ.get('SLURM_JOB_ID')}.{step}"


def node_name() -> str:
    return os.uname().nodename
