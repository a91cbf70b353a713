"""Program that runs one member of an etcd cluster hosted by the agents of a job.

The agent starts it through :class:`elasticrs.rendezvous.elastic.etcd_host.EtcdHost`, and sends the
configuration as the first line of standard input. The program claims a seat, which is one of the job's
endpoints on this machine, and runs etcd with the data of that seat. Every line that it prints is a JSON array
for the agent.

- **MEMBER-1** etcd stops when the agent exits for any reason. Its data are kept, so that an agent that is
  restarted on this node continues as the same member.
- **MEMBER-2** At the end of the job, the member keeps running until no agent has a session, or until a
  majority of the members are down. Then the data folder is removed. If sessions remain after
  ``close_timeout``, the data are kept, because the job may still be running on other nodes.
- **MEMBER-3** If etcd exits by itself, the program reports the reason to the agent, and exits with code 1.
  The agent then restarts the program with the same data.
- **MEMBER-4** All operations that may block run on one thread. Another thread watches the agent.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import threading
import time
from typing import Any, NoReturn

from elasticrs.job.value import Value
from elasticrs.rendezvous.elastic import etcd_membership as membership
from elasticrs.rendezvous.elastic.etcd_gateway import Gateway, GatewayError
from elasticrs.rendezvous.elastic.etcd_membership import Entry, Seat, View
from elasticrs.rendezvous.elastic.hosting import SystemResolver, listening_address
from elasticrs.rendezvous.endpoint import shown_endpoint
from elasticrs.rendezvous.etcd_folder import Folder
from elasticrs.rendezvous.etcd_keeper import find_program, watch
from elasticrs.rendezvous.etcd_process import EtcdProcess, options, trouble_with

_TICK = 0.05
_DOUBT = 2.0
"""Seconds for which a configuration error must persist before it is reported."""

_QUESTION = 1.5
"""Timeout for one response from etcd, in seconds."""

_SHORT_QUESTION = 0.5
"""Timeout for a response from this node's etcd member, in seconds. The timeout is short, because etcd accepts
connections before it can respond, and may no longer respond at the end of the job.
"""

_FOREVER = 86400.0
_GRACE, _SHORT_GRACE = 2.0, 0.3
"""Seconds between SIGTERM and SIGKILL when etcd is stopped. ``_SHORT_GRACE`` applies once the job is over."""

_RETRY = 1.0
_LONG = 10.0
"""Seconds after which a member that has no quorum polls the other members less often."""


class Orders(Value):
    """Configuration that the agent sends to this program.

    Args:
        seats: host, client port, peer port and scheme of each seat.
        label: prefix of the names of this job's members.
        bind_addr: address to listen on; the address of the seat if ``None``.
        files: paths of the CA certificates, this node's certificate and its key. Empty without TLS.
        password: password of etcd's user ``root``. ``None`` if clients need no password.
        workers: see :class:`~elasticrs.rendezvous.elastic.etcd_gateway.Gateway`.
        prefix: prefix of the keys that represent agents' sessions.
        close_timeout: seconds to wait at the end of the job for other agents to close their sessions.
    """

    seats: list[list[Any]]
    label: str
    bind_addr: str | None
    files: list[str]
    password: str | None
    workers: tuple[str, str] | None
    prefix: str
    close_timeout: float


class _AgentExits(Exception):  # noqa: N818 -- not an error
    """Raised when the agent has announced that it is exiting."""


class _EtcdExited(Exception):  # noqa: N818 -- handled here; the text says why
    """Raised if etcd exited unexpectedly."""


def tell(kind: str, text: str) -> None:
    """Send a message to the agent. Messages of kind ``say`` and ``refused`` are shown to the user. A message
    of kind ``exited`` says why etcd exited.
    """
    try:
        os.write(1, json.dumps([kind, text]).encode() + b"\n")
    except OSError:
        # Ignore the error: the agent has exited, and the thread that watches the agent handles its exit.
        return


class Member:
    """Runs one etcd member: claims a seat (one of the job's endpoints), starts etcd, joins the cluster, and
    finally stops etcd.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._seats = tuple(Seat(*each) for each in orders.seats)
        self._gateway = Gateway(orders.files, orders.password, orders.workers)
        self._mine = -1
        self._address = ""
        self._folder: Folder | None = None
        self._etcd = EtcdProcess()
        self._guard = threading.Lock()
        self._news = os.eventfd(0, os.EFD_CLOEXEC)
        self._order = ""
        self._belongs = self._is_confirmed = False
        self._looks_since = time.monotonic()
        self._unfit: dict[int, float] = {}
        self._told: set[int] = set()

    # --- the thread that watches the agent ---

    def listen(self, agent: int, signals: int) -> None:
        """Wait for a command from the agent, the agent's exit, or a signal, and act on it."""
        poll = select.poll()
        for fd in (0, agent, signals):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            said = os.read(0, 4096) if ready == [0] else b""
            if not said or not self._belongs:
                # Exit immediately, without waiting for the main thread, because the main thread may be
                # blocked in a name lookup.
                with self._guard:
                    self._finish()
                    os._exit(0)
            self._order = said.decode().split()[-1]
            os.eventfd_write(self._news, 1)

    def _finish(self) -> None:
        """Stop etcd, and remove the data folder if it is no longer needed."""
        self._etcd.end(_SHORT_GRACE if self._order == "over" else _GRACE)
        if self._folder is not None:
            self._folder.release(keep=self._folder.has_joined() and not self._is_confirmed)
            self._folder = None

    # --- the thread that runs the member ---

    def live(self) -> int:
        """Run the member until the agent exits. Return 1 if etcd exited first, and 0 otherwise. Return 0 at
        once if no seat (endpoint of the job) is on this machine.
        """
        try:
            if self._take_seat():
                self._host()
                return 1
        except _AgentExits:
            if self._order == "over":
                self._await_confirmation()
        finally:
            with self._guard:
                self._finish()
        return 0

    def _host(self) -> None:
        """Run etcd until it exits."""
        try:
            program = find_program()
        except FileNotFoundError as error:
            self._refuse(f"this node cannot host a member of etcd: {error}")
        try:
            self._join(program)
            self._stay()
        except _EtcdExited as error:
            left = sum(answer is not None for answer in self._look())
            tell("exited", f"this node's member of etcd exited: {error}; {self._left_of(left)}")
        self._pause(_RETRY)

    def _left_of(self, left: int) -> str:
        seats, most = len(self._seats), membership.majority(self._seats)
        return f"{left} of {seats} members are left, and {most} of them must be up"

    def _refuse(self, why: str) -> NoReturn:
        tell("refused", why)
        self._stay()

    def _stay(self) -> NoReturn:
        while True:
            self._pause(_FOREVER)

    def _pause(self, seconds: float) -> None:
        """Wait until the agent sends a command, etcd exits, or ``seconds`` have elapsed.

        Raises:
            _AgentExits: the agent exits.
            _EtcdExited: etcd has exited.
        """
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        if self._etcd.fd is not None:
            poll.register(self._etcd.fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(int(seconds * 1000))]
        if self._news in ready:
            os.eventfd_read(self._news)
        if self._order:
            raise _AgentExits
        if self._etcd.fd in ready:
            with self._guard:
                code = self._etcd.reap()
            raise _EtcdExited(f"{self._etcd.last_words()} (exit code {code})")

    # --- claiming a seat ---

    def _take_seat(self) -> bool:
        """Claim the first free seat (endpoint of the job) on this machine, and wait for one if necessary.
        Return false if the machine has no seat.
        """
        while True:
            is_here, is_known = False, True
            for index, seat in enumerate(self._seats):
                try:
                    address = listening_address(seat.host, SystemResolver())
                except OSError:
                    # Retry later, because in a container cluster a host name may not resolve until its
                    # container runs.
                    is_known = False
                    continue
                if address is None:
                    continue
                is_here = True
                if self._claim(index):
                    self._mine, self._address = index, self._orders.bind_addr or address
                    self._gateway.addresses[seat] = _reached(self._address)
                    self._check_ports(seat)
                    return True
            if is_known and not is_here:
                return False
            # Retry, because another agent of this job on this machine may be running the endpoint's etcd
            # member, and may exit later.
            self._pause(_TICK)

    def _claim(self, index: int) -> bool:
        try:
            # Hold the guard, so that the program cannot exit between the creation of the folder and this
            # assignment. Otherwise, the folder would be left behind.
            with self._guard:
                self._folder = Folder.claim(self._orders.label, self._seats, index)
        except OSError as error:
            self._refuse(f"this node cannot keep the data of a member of etcd: {error}")
        return self._folder is not None

    def _check_ports(self, seat: Seat) -> None:
        """Wait until the client and peer ports of this node's etcd member are free. If that takes too long,
        report a configuration error and do not start the member.
        """
        deadline = time.monotonic() + _DOUBT
        for port in (seat.port, seat.peer_port):
            while (why := trouble_with(self._address, port)) is not None:
                if time.monotonic() > deadline:
                    where = shown_endpoint(self._address, port)
                    self._refuse(
                        self._foreign_member(seat)
                        or f"this node cannot host a member of etcd at {where}: {why}; choose other ports in "
                        "--rdzv-endpoint (or another peer_port) on all nodes"
                    )
                self._pause(_TICK)

    def _foreign_member(self, seat: Seat) -> str | None:
        try:
            answer = self._gateway.members_at(seat, _QUESTION)
        except (OSError, GatewayError):
            return None
        return membership.misfit(self._seats, self._orders.label, self._mine, answer)

    # --- joining the cluster ---

    def _join(self, program: str) -> None:
        """Start etcd, and wait until the member is part of a cluster with a quorum.

        Raises:
            _AgentExits: the agent exits.
            _EtcdExited: etcd has exited.
        """
        assert self._folder is not None
        begun, refused_since = time.monotonic(), None
        # A member that has joined its cluster before must follow the end-of-job procedure, even if it has not
        # rejoined yet.
        had_joined = self._belongs = self._folder.has_joined()
        while not self._is_healthy():
            view = self._view(self._look())
            step = membership.next_step(view)
            now = time.monotonic()
            refused_since = (refused_since or now) if isinstance(step, membership.Refuse) else None
            if isinstance(step, membership.Adopt | membership.Lost):
                self._discard(view)
            if isinstance(step, membership.Adopt):
                self._start(program, step.incarnation)
            elif isinstance(step, membership.Create):
                self._start(program, os.urandom(8).hex())
            elif isinstance(step, membership.Stay) and self._etcd.fd is None:
                self._start(program, str(view.held))
            elif isinstance(step, membership.Lost):
                tell(
                    "say",
                    "this node's member of etcd cannot rejoin, because its data are gone: "
                    f"{self._left_of(step.left)}",
                )
                self._stay()
            elif isinstance(step, membership.Refuse) and now - (refused_since or now) > _DOUBT:
                self._refuse(step.why)
            self._pause(_TICK if now - begun < _LONG else _RETRY)
        self._folder.note_joined()
        self._protect()
        self._belongs = True
        seat = self._seats[self._mine]
        if had_joined:
            tell("say", f"the member of etcd at {shown_endpoint(seat.host, seat.port)} is back with its data")
        for path in self._folder.remove_others():
            tell("say", f"removed {path}, the data of an etcd that an earlier job hosted here")

    def _discard(self, view: View) -> None:
        """Stop this etcd member, and remove its data if it has any."""
        assert self._folder is not None
        if view.held is None:
            return
        with self._guard:
            self._etcd.end(_GRACE)
        if view.has_joined:
            tell(
                "say",
                f"discarded this node's data of an earlier etcd in {self._folder.path}, because the nodes of "
                "most endpoints no longer have theirs",
            )
        self._folder.discard(view.held)

    def _view(self, answers: list[tuple[Entry, ...] | None]) -> View:
        assert self._folder is not None
        if self._etcd.fd is not None:
            try:
                answers[self._mine] = self._gateway.members_at(self._seats[self._mine], _QUESTION)
            except (OSError, GatewayError):
                answers[self._mine] = None
        return View(
            self._seats,
            self._mine,
            self._orders.label,
            answers,
            self._folder.held(),
            self._folder.has_joined(),
            time.monotonic() - self._looks_since,
        )

    def _look(self) -> list[tuple[Entry, ...] | None]:
        """Request the member lists from all other seats (endpoints of the job) in parallel. The result is
        ``None`` for a seat that does not answer.
        """
        answers: list[tuple[Entry, ...] | None] = [None] * len(self._seats)
        unfit: dict[int, str] = {}

        def ask(index: int) -> None:
            try:
                answers[index] = self._gateway.members_at(self._seats[index], _QUESTION)
            except GatewayError:
                return
            except OSError as error:
                why = self._gateway.misfit(error)
                if why is not None:
                    unfit[index] = why

        threads = [
            threading.Thread(target=ask, args=(index,), daemon=True)
            for index in range(len(self._seats))
            if index != self._mine
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _QUESTION)
        self._report_certificates(dict(unfit))
        # Return a copy, because a thread that timed out may still write to the original list.
        return list(answers)

    def _report_certificates(self, unfit: dict[int, str]) -> None:
        """Report each member whose certificate has been rejected for more than :data:`_DOUBT` seconds, with
        the reason. Report a member only once.
        """
        now = time.monotonic()
        self._unfit = {index: self._unfit.get(index, now) for index in unfit}
        for index in [index for index, since in self._unfit.items() if now - since > _DOUBT]:
            if index not in self._told:
                self._told.add(index)
                seat = self._seats[index]
                tell(
                    "say",
                    "cannot connect to the member of etcd at "
                    f"{shown_endpoint(seat.host, seat.peer_port)}: {unfit[index]}; on all nodes, ca_cert and "
                    "ssl_cert in --rdzv-conf must come from one authority, and each certificate must be "
                    "valid for its host in --rdzv-endpoint",
                )

    def _protect(self) -> None:
        """Make the cluster require the job's password, if the job has one. Retry until this succeeds."""
        while True:
            try:
                return self._gateway.protect(self._seats[self._mine], _QUESTION)
            except (OSError, GatewayError, LookupError):  # noqa: PERF203 -- it waits anyway
                self._pause(_TICK)

    def _start(self, program: str, incarnation: str) -> None:
        assert self._folder is not None
        seat, label = self._seats[self._mine], self._orders.label
        listen = [seat.url_at(self._address, port) for port in (seat.port, seat.peer_port)]
        data = self._folder.data(incarnation)
        command = [
            *(program, "--name", membership.name_of(label, incarnation, self._mine)),
            *("--data-dir", data, *options(self._orders.files)),
            *("--listen-client-urls", listen[0], "--advertise-client-urls", seat.url),
            *("--listen-peer-urls", listen[1], "--initial-advertise-peer-urls", seat.peer_url),
            *("--initial-cluster-token", membership.cluster_token(label, incarnation)),
            *("--initial-cluster", membership.initial_cluster(self._seats, label, incarnation)),
        ]
        with self._guard:
            # Create the data folder while holding the lock, because another thread may be removing the parent
            # folder.
            os.makedirs(data, mode=0o700, exist_ok=True)
            self._etcd.start(command, self._folder.log, self._folder.lock)

    def _is_healthy(self) -> bool:
        """Return true if this node's etcd member can serve clients, which requires a quorum."""
        if self._etcd.fd is None:
            return False
        try:
            return self._gateway.is_healthy(self._seats[self._mine], _SHORT_QUESTION)
        except (OSError, GatewayError):
            # The request failed, so the member is not healthy. etcd may not be listening yet, may have no
            # leader at the moment, or may have exited.
            return False

    # --- the end of the job ---

    def _await_confirmation(self) -> None:
        """Wait until no agent needs this member, but at most ``close_timeout`` seconds."""
        deadline = time.monotonic() + self._orders.close_timeout
        while not self._is_confirmed and time.monotonic() < deadline:
            self._is_confirmed = self._has_no_sessions()
            time.sleep(_TICK / 2)

    def _has_no_sessions(self) -> bool:
        """Return true if no agent has an etcd session. Also return true if a majority of the members are
        down, because no session can exist without a quorum.
        """
        names = (self._orders.prefix + end for end in ("~sessions/", "~sessions0"))
        first, last = (base64.b64encode(name.encode(errors="surrogateescape")).decode() for name in names)
        body = {"key": first, "range_end": last, "count_only": True}
        try:
            found = self._gateway.ask(self._seats[self._mine], "kv/range", body, _SHORT_QUESTION)
            return int(found.get("count", 0)) == 0
        except (OSError, GatewayError):
            # Add 1 for this member, because only the other members were asked.
            up = 1 + sum(answer is not None for answer in self._look())
            return up < membership.majority(self._seats)


def _reached(address: str) -> str:
    """Return the address at which a client on this machine reaches a server that listens on ``address``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def main() -> int:
    """Run an etcd member. Return the exit code."""
    watched = watch(int(sys.argv[1]))
    if watched is None:
        return 1
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()
    if not line.endswith(b"\n"):
        # Exit, because the agent died before it had sent the complete configuration.
        return 1
    try:
        member = Member(Orders(**json.loads(line)))
    except OSError as error:
        tell("refused", f"this node cannot host a member of etcd: its certificates cannot be used: {error}")
        return 0
    threading.Thread(target=member.listen, args=watched, daemon=True).start()
    return member.live()
