"""The store where nodes meet: the session with it, and the store itself where it is ours and hosted here.

Effects only.
"""

from __future__ import annotations

import errno
import os
import time
from functools import partial

from elasticrs.host.background_call import Asked
from elasticrs.host.clock import Clock
from elasticrs.job.value import Record
from elasticrs.rendezvous.elastic import hosting
from elasticrs.rendezvous.elastic.addresses import is_unspecified, packed
from elasticrs.rendezvous.elastic.keys import Keys
from elasticrs.rendezvous.elastic.rendezvous import ThisAgent
from elasticrs.rendezvous.endpoint import shown_endpoint
from elasticrs.store.coordination import Connected, ConnectionLost
from elasticrs.store.session import Client, NativeSession, Server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elasticrs import _core
    from elasticrs.rendezvous.elastic.etcd_host import EtcdHost
    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous
    from elasticrs.store import Store
    from elasticrs.store.coordination import Request, StoreEvent


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
"""What the user can do, by the kind of loss."""
_REMEDIES_OF_ETCD = {
    "refused": "nothing is listening there (yet): does etcd run, and is --rdzv-endpoint right?",
    "unreachable": "is the address right, and is there a route to it?",
    "closed": "is that etcd's port for clients, and are protocol and ssl_cert in --rdzv-conf what it wants?",
    "not_ours": "--rdzv-endpoint has to name members of an etcd of version 3.4 or later (port 2379)",
    "tls": "protocol, ca_cert, ssl_cert and ssl_cert_key in --rdzv-conf have to fit etcd",
    "denied": "user and password_file in --rdzv-conf have to be those of a user who may read and write all "
    "keys that begin with {prefix!r} (etcd_prefix)",
    "limit": "etcd has to have space (alarm NOSPACE: compact, defragment, disarm)",
}
"""The same with etcd."""
_REMEDIES_OF_HOSTED = {
    "refused": "the agents of most endpoints have to be up: {most} of {seats}",
    "denied": _REMEDIES["token"],
}
"""What differs where the agents host it."""
_BY_HAND = (
    ("--rdzv-endpoint HOST:PORT", "--master-port PORT"),
    ("--rdzv-endpoint", "--master-addr and --master-port"),
)
"""The options that say the same with ranks by hand."""

_PATIENCE = 1.0
"""Seconds for a question about a name that was known a moment ago; the next attempt asks again."""

_DOUBT = 2.0
"""Seconds for which another job's etcd has to answer at an endpoint before this is a configuration error."""

_BEFORE_MEETING = ("refused", "unreachable")
"""Kinds that speak against the endpoint as long as nobody has been met there."""


class CannotHost(Exception):  # noqa: N818 -- a statement, told to the user
    """The agent was told to host the store, and cannot; the text says why and what to do."""


class Home(Record):
    """What outlasts one run of an agent: the store, where it is hosted here, has the jobs of all runs."""

    runs: int = 0
    server: Server | None = None
    etcd: EtcdHost | None = None

    def is_needed(self) -> bool:
        """True if the store that is hosted here may have others who use it; call :meth:`leave` first."""
        if self.etcd is not None:
            self.etcd.take()
            return self.etcd.fd is not None
        return self.server is not None and self.server.sessions() > 0

    def leave(self) -> None:
        """Say that no run follows."""
        if self.etcd is not None:
            self.etcd.leave("succeeded")

    def close(self) -> None:
        """End the store. Idempotent."""
        for store in (self.server, self.etcd):
            if store is not None:
                store.close()
        self.server = self.etcd = None


class MeetingPoint:
    """The store where the nodes meet; one session with it at a time.

    Args:
        rendezvous: where the store is.
        supervisor: whose runtime thread serves; an own thread when ``None``.
        home: of an agent that may run several times, each time a job of its own.
        found: what :func:`.hosting.look_up` says; asked for here when ``None``.

    Raises:
        UsageError: an endpoint that makes no sense on this machine.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        supervisor: _core.Supervisor | None,
        home: Home | None = None,
        found: hosting.Found | None = None,
    ) -> None:
        self._resolver = hosting.SystemResolver()
        if found is None:
            found = self._ask(partial(hosting.look_up, rendezvous, self._resolver), None)
        self._found: hosting.Found = found
        self._hosting = found.hosting
        self._home = home
        self.job = rendezvous.job or rendezvous.run_id
        """The name of the job in the store."""
        # Name of the job whose lease holds long-lived keys in etcd. Workers use their own job's name,
        # because they may not attach keys to the agents' lease.
        self._lasting = self.job
        if home is not None:
            home.runs += 1
            if home.runs > 1:
                self.job += f"#{home.runs}"
        self._rendezvous = rendezvous
        self._supervisor = supervisor
        self._server: Server | None = None
        self._etcd: EtcdHost | None = None
        self._session: NativeSession | None = None
        self._met: tuple[bytes, int] | None = None
        self._may_decide_again = False
        self._has_met = False
        self._foreign_since: float | None = None
        self._clock = Clock(0, None)
        self._shared: Store | None = None
        # Once a round runs, its workers have the port: there is no connecting any more.
        self._shares_early = rendezvous.is_static and (home is not None or supervisor is None)

    @staticmethod
    def _ask(question: Callable[[], Any], seconds: float | None) -> Any:
        """The answer; ``None`` when it takes longer."""
        asked = Asked(question)
        try:
            return asked.take() if asked.wait(seconds) else None
        finally:
            asked.close()

    @property
    def hosts(self) -> bool:
        """True if the store runs in this process."""
        return self._server is not None

    @property
    def doubt(self) -> str | None:
        """What is odd about hosting the store here, for the user."""
        return self._hosting.doubt

    @property
    def fd(self) -> int | None:
        """Readable when :meth:`take` has something."""
        return self._session.fd if self._session is not None else None

    @property
    def etcd_fd(self) -> int | None:
        """Readable when :meth:`take_from_etcd` has something; ``None`` where no member of etcd is hosted."""
        return self._etcd.fd if self._etcd is not None else None

    def take_from_etcd(self) -> list[tuple[str, str]]:
        """Return the messages of the program that hosts etcd, and restart that program if it was killed.

        See :meth:`.etcd_host.EtcdHost.take`.
        """
        if self._etcd is None:
            return []
        fd, news = self._etcd.fd, self._etcd.take()
        if fd is not None and self._etcd.fd != fd:
            if self._supervisor is not None:
                self._supervisor.unwatch_fd(fd)
            if self._etcd.fd is not None or self._etcd.start_again():
                self._watch_etcd()
        return news

    def _watch_etcd(self) -> None:
        if self._supervisor is not None and self.etcd_fd is not None:
            self._supervisor.watch_fd(self.etcd_fd)

    @property
    def clock(self) -> Clock:
        """The store's wall clock, as well as it is known."""
        estimate = self._session.clock() if self._session is not None else None
        if estimate is not None:
            self._clock = Clock(*estimate)
        return self._clock

    def host_if_possible(self) -> None:
        """Serve the store when this agent may and the port is free.

        Raises:
            CannotHost: it was told to, and cannot.
        """
        if self._rendezvous.etcd is not None and self._rendezvous.etcd.seats:
            self._host_etcd()
        if not self._hosting.may_host:
            return
        if self._home is not None and self._home.server is not None:
            self._server, self._home.server = self._home.server, None
            return
        settings, listen = self._rendezvous.settings, self._hosting.listen
        try:
            self._server = Server(
                # The server's word for all interfaces of both families.
                [("" if address == hosting.ANY_ADDRESS[0] else address, port) for address, port in listen],
                run_id=self._rendezvous.run_id,
                token=settings.token,
                max_connections=self._rendezvous.max_connections,
                # It may have to outlast the supervisor.
                supervisor=self._supervisor if self._home is None else None,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not self._hosting.is_explicit:
                # Another agent of this machine was faster, or another program has the port: its answer tells.
                return
            option, other = "--rdzv-endpoint HOST:PORT", ""
            if self._rendezvous.is_static:
                option, other = "--master-port", " (is another agent with --node-rank 0 here?)"
            raise CannotHost(
                f"the rendezvous store cannot {error.strerror or error}{other}; choose another port with "
                f"{option} on all nodes"
            ) from error

    def _host_etcd(self) -> None:
        from elasticrs.rendezvous.elastic.etcd_host import EtcdHost

        if self._home is not None and self._home.etcd is not None:
            self._etcd, self._home.etcd = self._home.etcd, None
        else:
            self._etcd = EtcdHost(self._rendezvous)
        self._watch_etcd()

    def connect(self, *, same: bool = False) -> ConnectionLost | None:
        """Begin to connect; :class:`Connected` or :class:`ConnectionLost` comes out of :meth:`take`.

        Until there has been a connection, who hosts the store is decided again before each attempt but the
        first.

        Args:
            same: the store has to be the one that was met before, or one that goes on with its state.
        """
        self.disconnect()
        if self._supervisor is not None:
            # Nothing of a session that was lost runs here any more: now its connection may end.
            self._supervisor.release_connection()
        if self._may_decide_again and self._server is None and self._rendezvous.etcd is None:
            question = partial(hosting.decide_again, self._hosting, self._rendezvous, self._resolver)
            self._hosting = self._ask(question, _PATIENCE) or self._hosting
            try:
                self.host_if_possible()
            except CannotHost as error:
                return ConnectionLost("cannot_host", str(error))
        if self._shares_early:
            from elasticrs.store import DistNetworkError

            try:
                self.close_shared_store()
                self._shared = self._open_store("")
            except DistNetworkError:
                # The connection of the agent itself, which comes next, tells why, if it fails as well.
                self._shared = None
        if (obstacle := self._obstacle()) is not None:
            return obstacle
        try:
            self._session = self._connected(self._met if same else None)
        except OSError as error:
            return ConnectionLost("unreachable", f"no connection to {self._rendezvous.store}: {error}")
        if self._supervisor is not None:
            self._supervisor.watch_fd(self._session.fd)
        return None

    def _obstacle(self) -> ConnectionLost | None:
        """Return why a session with hosted etcd may not start now; ``None`` if it may.

        A session may not start if an endpoint is used by another job's etcd, or if the members do not require
        the job's password yet, because such a session would end as soon as they do.
        """
        etcd = self._rendezvous.etcd
        if etcd is None or not etcd.seats or self._has_met:
            return None
        from elasticrs.rendezvous.elastic.etcd_gateway import Gateway
        from elasticrs.rendezvous.elastic.etcd_membership import foreign, label_of

        label = label_of(self._rendezvous.run_id, etcd.prefix, self._rendezvous.settings.token)
        store, seconds = self._rendezvous.store, _PATIENCE / len(etcd.seats)
        away = ConnectionLost("refused", f"{store} is not there yet; {self._hint('refused')}")

        def ask() -> ConnectionLost | bool:
            try:
                gateway = Gateway(etcd.files, etcd.password)
            except OSError:
                # Allow the session to start. It will report which certificate or key file is invalid.
                return True
            seat = gateway.find_foreign(etcd.seats, label, seconds)
            if seat is not None:
                # Treat another job's etcd as a final error only if it stays, because it may belong to an
                # earlier job and be about to exit.
                since = self._foreign_since = self._foreign_since or time.monotonic()
                kind = "not_ours" if time.monotonic() - since > _DOUBT else "refused"
                return ConnectionLost(kind, foreign(shown_endpoint(seat.host, seat.port)))
            self._foreign_since = None
            is_protected = etcd.password is None or gateway.is_protected(etcd.seats, seconds)
            if is_protected is False:
                text = f"{store} serves those without a token (yet); {_REMEDIES['token']}"
                return ConnectionLost("refused", text)
            return is_protected or away

        answer = self._ask(ask, 3 * _PATIENCE)
        if answer is None:
            answer = etcd.password is None or away
        return None if answer is True else answer

    def _connected(self, met: tuple[bytes, int] | None) -> NativeSession:
        settings, supervisor = self._rendezvous.settings, self._supervisor
        if self._rendezvous.etcd is not None:
            return NativeSession(
                self._rendezvous.etcd.client(
                    self._lasting,
                    connect_timeout=settings.connect_timeout,
                    stall_timeout=settings.stall_timeout if supervisor is not None else None,
                    supervisor=supervisor,
                    links=(Keys(self.job).prefix.strip("/"), self.fallback_address()),
                )
            )
        host, port = self.address
        client = Client(
            host,
            port,
            run_id=self._rendezvous.run_id,
            token=settings.token,
            scope=self._rendezvous.scope,
            interval=settings.keep_alive_interval,
            attempts=settings.keep_alive_max_attempt,
            connect_timeout=settings.connect_timeout,
            # An agent that polls has no say between its calls: it may well be busy with its workers.
            stall_timeout=settings.stall_timeout if supervisor is not None else None,
            supervisor=supervisor,
            resume=True,
            met=met,
        )
        return NativeSession(client)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of a store of ours, for clients on this machine."""
        if self._server is None:
            return self._rendezvous.host, self._rendezvous.port
        address = self._hosting.listen[0][0]
        if is_unspecified(address):
            address = "127.0.0.1" if packed(address) == bytes(4) else "::1"
        return address, self._server.port

    def disconnect(self) -> None:
        """Close the connection; what it still had to say is dropped."""
        if self._session is not None:
            if self._supervisor is not None:
                self._supervisor.unwatch_fd(self._session.fd)
            self._met = self._session.met or self._met
            self._session.close()
            self._session = None

    def take(self) -> list[StoreEvent]:
        """What has come from the store since the last call; never blocks."""
        if self._session is None:
            return []
        events: list[StoreEvent] = []
        for event in self._session.take():
            if isinstance(event, ConnectionLost):
                # Asking for a name may take long: it is known when the client, which asks on a thread of its
                # own, has got further than that.
                self._may_decide_again = not self._has_met and event.kind != "resolve"
                events.append(ConnectionLost(event.kind, self._explained(event)))
            elif isinstance(event, Connected) and self._shares_early and self._shared is None:
                # The port came back between the two.
                self.disconnect()
                return [ConnectionLost("unreachable", f"no second connection to {self._rendezvous.endpoint}")]
            else:
                self._has_met = True
                events.append(event)
        return events

    def wait(self, timeout: float | None) -> bool:
        """Block until :meth:`take` has something, without a loop that watches :attr:`fd`."""
        return self._session is not None and self._session.wait(timeout)

    def this_agent(self, *, role: str, nproc: int, max_restarts: int) -> ThisAgent:
        """Return what the machine has to know of this agent, and of this node's workers, when it begins."""
        member = self._rendezvous.member
        return ThisAgent(
            self.job,
            os.urandom(8).hex() if member is None else f"{member}.{os.urandom(4).hex()}",
            node_name(),
            hosting.host_identity(),
            role,
            nproc,
            max_restarts,
            self.hosts,
            self.fallback_address(),
        )

    def fallback_address(self) -> str | None:
        """Where other machines reach this node when its end of the connection is a loopback one."""
        if self._hosting is self._found.hosting:
            return self._found.fallback
        # Not told to host, it has a name that others know: nobody is asked.
        return hosting.fallback_address(self._rendezvous, self._hosting, self._resolver)

    def _explained(self, lost: ConnectionLost) -> str:
        etcd = self._rendezvous.etcd
        if etcd is not None:
            is_passing = self._has_met and lost.kind in (*_BEFORE_MEETING, "closed")
            hint = "" if is_passing else self._hint(lost.kind)
            return f"{lost.message}; {hint}" if hint else lost.message
        if lost.kind == "resolve":
            return hosting.unresolved(self._rendezvous, self._hosting.trouble or lost.message)
        todo = None if lost.kind in _BEFORE_MEETING and self._has_met else _REMEDIES.get(lost.kind)
        if todo is not None and self._rendezvous.is_static:
            for option, by_hand in _BY_HAND:
                todo = todo.replace(option, by_hand)
        return lost.message if todo is None else f"{lost.message}; {todo}"

    def _hint(self, kind: str) -> str:
        """What the user of etcd can do about a loss; may be empty."""
        etcd = self._rendezvous.etcd
        assert etcd is not None
        todo = _REMEDIES_OF_ETCD.get(kind, "")
        if etcd.seats:
            todo = _REMEDIES_OF_HOSTED.get(kind, todo)
        most, seats = len(etcd.seats) // 2 + 1, len(etcd.seats)
        return todo.format(prefix=etcd.prefix, most=most, seats=seats)

    def send(self, request: Request) -> None:
        """Send a request; dropped without a session, whose loss is told of anyway."""
        if self._session is not None:
            self._session.send(request)

    def leave(self, outcome: str) -> None:
        """End the session, so that a member of etcd that is hosted here may go when it is the last one."""
        if self._etcd is not None:
            self.close_shared_store()
            self.disconnect()
            self._etcd.leave(outcome)

    def is_needed(self) -> bool:
        """True if others use the store that is hosted here; call :meth:`leave` first."""
        if self._etcd is not None:
            return self._etcd.fd is not None
        if self._server is None:
            return False
        own = (self._session is not None) + (self._shared is not None)
        return self._server.sessions() > own

    def open_shared_store(self, round: int) -> Store:  # noqa: A002 -- the field's own word
        """Open a store for users, shared by the nodes of a round, on a connection of its own; an earlier
        round's is closed.

        With ``static`` the connection is the one that was made before the round: nothing is closed. What was
        put in another round is not seen.

        Raises:
            DistNetworkError: no connection.
        """
        prefix = Keys(self.job).store(round)
        if self._shares_early and self._shared is not None:
            return self._shared.with_prefix(prefix)
        self.close_shared_store()
        self._shared = self._open_store(prefix)
        return self._shared

    def open_job_store(self) -> Store:
        """Open a store that all processes of the job share, independent of rounds. The caller closes it.

        Raises:
            DistNetworkError: no connection.
        """
        return self._open_store(Keys(self.job).job_store)

    def _open_store(self, prefix: str) -> Store:
        from elasticrs.store import connect
        from elasticrs.store.store import connected

        settings, etcd = self._rendezvous.settings, self._rendezvous.etcd
        if etcd is not None:
            return connected(etcd.client(self._lasting, connect_timeout=settings.connect_timeout), prefix)
        host, port = self.address
        return connect(
            host,
            port,
            self._rendezvous.run_id,
            prefix=prefix,
            token=settings.token,
            scope=self._rendezvous.scope,
            connect_timeout=settings.connect_timeout,
        )

    def close_shared_store(self) -> None:
        """Close what :meth:`open_shared_store` has opened. Idempotent."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def stop_listening(self) -> None:
        """Lend the port: connections go on, new ones are refused."""
        if self._server is not None:
            self._server.stop_listening()

    def listen_again(self) -> None:
        """Take the port back.

        Raises:
            OSError: another program has it.
        """
        if self._server is not None:
            self._server.listen_again()

    @property
    def may_stay(self) -> bool:
        """True if the store may go on without this session: there is a home for it."""
        return self._home is not None

    def close(self, *, stays: bool = False) -> None:
        """End the connections and the store, unless that stays for the next run (:attr:`may_stay`).
        Idempotent.
        """
        self.close_shared_store()
        self.disconnect()
        if self._supervisor is not None and self.etcd_fd is not None:
            self._supervisor.unwatch_fd(self.etcd_fd)
        if self._home is not None and stays:
            self._home.server, self._home.etcd = self._server, self._etcd
            self._server = self._etcd = None
        for store in (self._server, self._etcd):
            if store is not None:
                store.close()
        self._server = self._etcd = None


def node_name() -> str:
    """The name under which this node appears in messages, and by which ranks are ordered."""
    return os.uname().nodename
