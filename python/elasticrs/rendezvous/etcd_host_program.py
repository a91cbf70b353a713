"""The program under which one member of an etcd runs that the agents of a job host.

:class:`elasticrs.rendezvous.elastic.etcd_host.EtcdHost` starts it and says on the first line of its standard
input what to do. It finds a seat, makes or joins the cluster, starts etcd again when that ends, and in the
end waits until nobody needs it. What it prints, one JSON object per line, is for the agent.

- **MEMBER-1** When the agent ends, however that happens, etcd ends and its data are removed. etcd is told to
  end, so that a leader hands over first.
- **MEMBER-2** An agent that leaves a job which goes on takes its member out of the cluster. At the end of
  the job a member stays until no agent has a session any more, or most members have gone.
- **MEMBER-3** A host whose etcd ends again and again takes its member out of the cluster, so that nobody
  counts on it, and tries again later, a few times.
- **MEMBER-4** One thread does all that takes long. Another one hears of the agent's end meanwhile.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from elasticrs._value import Value
from elasticrs.rendezvous.elastic import etcd_membership as membership
from elasticrs.rendezvous.elastic.etcd_gateway import Gateway, GatewayError
from elasticrs.rendezvous.elastic.etcd_membership import Entry, Seat, View
from elasticrs.rendezvous.elastic.hosting import SystemResolver, listening_address
from elasticrs.rendezvous.endpoint import shown_endpoint
from elasticrs.rendezvous.etcd_keeper import find_program
from elasticrs.rendezvous.etcd_process import EtcdProcess, options, trouble_with

_TICK = 0.05
_PATIENCE = 5.0
"""Seconds before a seat that does not answer is empty, or a cluster that nobody speaks for is gone."""

_DOUBT = 2.0
"""Seconds before what may pass is told as a mistake."""

_EVERY = 20
"""Ticks between two looks at seats of which nothing is expected."""

_QUESTION = 1.5
"""Seconds for one answer of etcd."""

_GRACE_MS, _SHORT_GRACE_MS = 2000, 300

_LAST_QUESTION = 0.5
"""The same in the end, when others may have gone already."""

_LEAVING = 8.0
"""Seconds to be taken out of the cluster: an election may have to be waited for."""

_FUTILE = 2.0
"""Seconds without most members after which that is not waited for."""

_RETRY = 1.0
_SHORT = 10.0
"""Seconds; an etcd that ends sooner is not helped by being started again with its data."""

_MOST_SHORT = 3
_REST = 60.0
"""Seconds before the next try after so many short ones; each rest is twice as long as the one before."""

_MOST_RESTS = 5


class Orders(Value):
    """What the agent says at the start.

    Args:
        seats: host, port and port for peers of each.
        label: of the members of this job.
        bind_addr: where to listen; ``None``: at the seat's address.
        files: of the authorities, this node's certificate and its key; empty without TLS.
        password: of the user of etcd; ``None``: everybody is served.
        folder: for data and log, made and removed here.
        prefix: of the keys of sessions.
        close_timeout: seconds to wait for the sessions of others in the end.
        has_voted: an earlier program of this agent may have had a voter at the seat.
        gives_up: only take that one out of the cluster.
    """

    seats: list[list[Any]]
    label: str
    bind_addr: str | None
    files: list[str]
    password: str | None
    folder: str
    prefix: str
    close_timeout: float
    has_voted: bool = False
    gives_up: bool = False


class _Asked(Exception):  # noqa: N818 -- no error
    """The agent has said that it ends."""


class _Ended(Exception):  # noqa: N818 -- told of, not raised to anybody else
    """etcd has ended by itself; the text says why."""


def tell(kind: str, text: str) -> None:
    """Tell the agent something: ``say`` or ``refused``, and a line for the user."""
    try:
        os.write(1, json.dumps([kind, text]).encode() + b"\n")
    except OSError:
        # It has ended, which is heard of elsewhere.
        return


class Member:
    """One member, from the search for its seat to its end."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._seats = tuple(Seat(*each) for each in orders.seats)
        self._gateway = Gateway(orders.files, orders.password)
        self._mine = -1
        self._address = ""
        self._claim: socket.socket | None = None
        self._etcd = EtcdProcess(os.path.join(orders.folder, "etcd.log"))
        self._guard = threading.Lock()
        self._news = os.eventfd(0, os.EFD_CLOEXEC)
        self._order = self._name = ""
        self._belongs = self._is_voter = False
        self._has_voted = orders.has_voted
        self._heard: dict[int, float] = {}
        self._unfit: dict[int, float] = {}
        self._told: set[int] = set()
        self._can_be_out = False
        self._futile_at = 0.0
        self._data = os.path.join(orders.folder, "data")

    # --- the thread that listens ---

    def listen(self, agent: int, signals: int) -> None:
        """Hear what the agent says, or that it has ended, or a signal."""
        poll = select.poll()
        for fd in (0, agent, signals):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            said = os.read(0, 4096) if ready == [0] else b""
            if not said or not self._belongs:
                # Nobody waits for this member. The other thread may wait for a name server.
                self._abandon()
            self._order = said.decode().split()[-1]
            os.eventfd_write(self._news, 1)

    def _abandon(self) -> NoReturn:
        with self._guard:
            self._end()
            shutil.rmtree(self._orders.folder, ignore_errors=True)
            os._exit(0)

    # --- the thread that works ---

    def live(self) -> None:
        """Be a member until the agent says otherwise."""
        try:
            if not self._take_seat():
                return
            rests = _MOST_RESTS if self._orders.gives_up else 0
            while rests < _MOST_RESTS:
                self._run(_REST * 2**rests if rests + 1 < _MOST_RESTS else None)
                rests += 1
            self._give_up()
        except _Asked:
            self._say_goodbye()
        finally:
            with self._guard:
                self._end()
                shutil.rmtree(self._orders.folder, ignore_errors=True)

    def _run(self, rest: float | None) -> None:
        """Be a member until etcd has ended too often; then have none, for so many seconds or for good."""
        shorts = 0
        while shorts < _MOST_SHORT:
            begun = time.monotonic()
            try:
                self._join()
                self._stay()
            except _Ended as error:
                shorts = shorts + 1 if time.monotonic() - begun < _SHORT else 1
                known = f"this node's member of etcd has ended: {error}"
            if shorts < _MOST_SHORT:
                tell("say", f"{known}; it is started again")
                if shorts > 1 or not self._is_voter:
                    self._forget()
                self._pause(_RETRY)
        self._forget()
        if rest is None:
            return tell("refused", f"{known}; this node has none any more")
        tell("refused", f"{known}; this node has none for now, and tries again in {rest:g} s")
        return self._rest(rest)

    def _stay(self) -> NoReturn:
        while True:
            self._pause(3600)

    def _rest(self, seconds: float) -> None:
        """Do nothing but take what is listed at this seat out of the cluster."""
        end = time.monotonic() + seconds
        while not self._is_out() and time.monotonic() < end:
            self._pause(_RETRY)
        self._pause(max(0.0, end - time.monotonic()))

    def _give_up(self) -> NoReturn:
        while True:
            self._rest(3600)

    def _pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            _Asked: the agent ends.
            _Ended: etcd has ended.
        """
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        if self._etcd.fd is not None:
            poll.register(self._etcd.fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(int(seconds * 1000))]
        if self._news in ready or self._order:
            raise _Asked
        if ready:
            with self._guard:
                code = self._etcd.reap()
            raise _Ended(f"{self._etcd.last_words()} (exit code {code})")

    # --- a seat ---

    def _take_seat(self) -> bool:
        """Find the first seat of this machine that no other agent has; false if there is none here."""
        begun = time.monotonic()
        while True:
            is_here, is_known = False, True
            for index, seat in enumerate(self._seats):
                try:
                    address = listening_address(seat.host, SystemResolver())
                except OSError:
                    # In a cluster names appear after the containers do.
                    is_known = False
                    continue
                if address is None:
                    continue
                is_here = True
                if self._claimed(seat):
                    self._mine, self._address = index, self._orders.bind_addr or address
                    return self._is_free(seat)
            if is_known and not is_here:
                return False
            # Another agent of this machine may end.
            self._pause(_RETRY if time.monotonic() - begun > _PATIENCE else _TICK)

    def _claimed(self, seat: Seat) -> bool:
        # A name of the network namespace, like the port; it goes with this process.
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0elasticrs/etcd/{shown_endpoint(seat.host, seat.port)}")
        except OSError:
            sock.close()
            return False
        self._claim = sock
        return True

    def _is_free(self, seat: Seat) -> bool:
        """True once the ports of the seat can be listened on."""
        deadline = time.monotonic() + _DOUBT
        for port in (seat.port, seat.peer_port):
            while (why := trouble_with(self._address, port)) is not None:
                if time.monotonic() > deadline:
                    where = shown_endpoint(self._address, port)
                    tell(
                        "refused",
                        f"this node cannot host a member of etcd at {where}: {why}; choose other ports in "
                        "--rdzv-endpoint (or another peer_port) on all nodes",
                    )
                    self._stay()
                self._pause(_TICK)
        return True

    # --- into the cluster ---

    def _join(self) -> None:
        """Make the cluster, or become a member of it.

        Raises:
            _Asked: the agent ends.
            _Ended: etcd has ended.
        """
        program = _program()
        if program is None:
            self._give_up()
        if os.path.isdir(self._data):
            # Nothing was forgotten: the same member goes on.
            self._start(program, "new", self._name, membership.initial_cluster(self._view([])))
            return self._await_own()
        os.makedirs(self._orders.folder, mode=0o700, exist_ok=True)
        own: int | None = None
        refused_since, heard_at = None, time.monotonic()
        while True:
            answers, hidden = self._look()
            view = self._view(answers, own, hidden)
            step = membership.next_step(view)
            now = time.monotonic()
            if any(answer is not None for answer in answers):
                heard_at = now
            is_cut_off = own is not None and now - heard_at > _PATIENCE
            refused_since = (refused_since or now) if isinstance(step, membership.Refuse) else None
            if isinstance(step, membership.Bootstrap):
                self._is_voter = True
                name = membership.name_of(view.label, view.mine)
                self._start(program, "new", name, membership.initial_cluster(view))
                return self._await_own()
            if isinstance(step, membership.Belongs):
                return self._has_joined()
            if isinstance(step, membership.StartOver) or is_cut_off:
                self._forget()
                own, heard_at = None, now
            elif isinstance(step, membership.Add):
                own = self._add(program, view)
            elif isinstance(step, membership.Remove):
                self._change(view, "remove", {"ID": str(step.id)})
            elif isinstance(step, membership.Promote):
                self._change(view, "promote", {"ID": str(step.id)})
            elif isinstance(step, membership.Refuse) and now - (refused_since or now) > _DOUBT:
                tell("refused", step.why)
                self._stay()
            self._pause(_TICK)

    def _view(
        self,
        answers: list[tuple[Entry, ...] | None],
        own: int | None = None,
        hidden: frozenset[int] = frozenset(),
    ) -> View:
        now = time.monotonic()
        gone = {index for index, at in self._heard.items() if now - at > _PATIENCE}
        label, has_voted = self._orders.label, self._has_voted
        return View(self._seats, self._mine, label, answers, own, hidden, frozenset(gone), has_voted)

    def _look(self) -> tuple[list[tuple[Entry, ...] | None], frozenset[int]]:
        """Ask all other seats at once; also returns where somebody may be who does not answer."""
        answers: list[tuple[Entry, ...] | None] = [None] * len(self._seats)
        hidden: set[int] = set()
        unfit: dict[int, str] = {}

        def question(index: int) -> None:
            try:
                answers[index] = self._gateway.members_at(self._seats[index], _QUESTION)
            except (GatewayError, ConnectionRefusedError):
                return
            except OSError as error:
                hidden.add(index)
                why = self._gateway.misfit(error)
                if why is not None:
                    unfit[index] = why

        threads = [
            threading.Thread(target=question, args=(index,), daemon=True)
            for index in range(len(self._seats))
            if index != self._mine
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _QUESTION)
        now = time.monotonic()
        for index, answer in enumerate(answers):
            if answer is not None or index not in self._heard:
                self._heard[index] = now
        self._tell_of(dict(unfit), now)
        return answers, frozenset(hidden)

    def _tell_of(self, unfit: dict[int, str], now: float) -> None:
        """Say once of each seat why no connection with it can be, when that lasts."""
        self._unfit = {index: self._unfit.get(index, now) for index in unfit}
        for index in [index for index, since in self._unfit.items() if now - since > _DOUBT]:
            if index not in self._told:
                self._told.add(index)
                seat = self._seats[index]
                tell(
                    "say",
                    f"no connection with the member of etcd at {shown_endpoint(seat.host, seat.peer_port)}: "
                    f"{unfit[index]}; on all nodes ca_cert and ssl_cert in --rdzv-conf have to be of one "
                    "authority, and each certificate for the host in --rdzv-endpoint",
                )

    def _add(self, program: str, view: View) -> int | None:
        seat = self._seats[self._mine]
        answer = self._change(view, "add", {"peerURLs": [seat.peer_url], "isLearner": True})
        if answer is None:
            return None
        own = Entry.read(answer["member"])
        entries = [Entry.read(each) for each in answer["members"]]
        name = membership.learner_name(view.label, own.id)
        self._start(program, "existing", name, membership.initial_cluster(view, entries))
        return own.id

    def _change(self, view: View, what: str, body: dict[str, Any]) -> Any:
        """Ask the members in turn for a change; ``None`` if none carries it out."""
        for index, answer in enumerate(view.answers):
            if answer is None or index == self._mine:
                continue
            seat = self._seats[index]
            try:
                return self._gateway.ask(seat, f"cluster/member/{what}", body, _QUESTION)
            except (OSError, GatewayError):
                # No leader, not in sync yet, carried out already: what is there is looked at next.
                continue
        return None

    def _await_own(self) -> None:
        """Wait until this member has taken part in a cluster with a quorum."""
        seat = self._seats[self._mine]
        for turn in itertools.count():
            if self._orders.files and turn % _EVERY == 0:
                # What is wrong with certificates would be in etcd's log alone.
                self._look()
            try:
                entries = self._own_list()
            except (OSError, GatewayError):
                entries = ()
            if any(entry.has_published and seat.peer_url in entry.peer_urls for entry in entries):
                break
            self._pause(_TICK)
        self._belongs = True
        self._protect(seat)

    def _protect(self, seat: Seat) -> None:
        while True:
            try:
                return self._gateway.protect(seat, _QUESTION, _reached(self._address))
            except (OSError, GatewayError, LookupError):  # noqa: PERF203 -- it waits anyway
                self._pause(_TICK)

    def _has_joined(self) -> None:
        self._belongs = self._is_voter = True
        seat = self._seats[self._mine]
        tell("say", f"the member of etcd at {shown_endpoint(seat.host, seat.port)} belongs to the cluster")

    # --- etcd ---

    def _end(self) -> None:
        """End etcd, if it runs, under the guard; sooner when nobody is served any more."""
        self._etcd.end(_SHORT_GRACE_MS if self._order == "over" else _GRACE_MS)

    def _start(self, program: str, state: str, name: str, initial: str) -> None:
        self._name, seat = name, self._seats[self._mine]
        listen = [seat.url_at(self._address, port) for port in (seat.port, seat.peer_port)]
        command = [
            *(program, "--name", name),
            *("--data-dir", self._data, *options(self._orders.files)),
            *("--listen-client-urls", listen[0], "--advertise-client-urls", seat.url),
            *("--listen-peer-urls", listen[1], "--initial-advertise-peer-urls", seat.peer_url),
            *("--initial-cluster-token", self._orders.label),
            *("--initial-cluster-state", state, "--initial-cluster", initial),
        ]
        with self._guard:
            self._etcd.start(command)

    def _forget(self) -> None:
        with self._guard:
            self._end()
        shutil.rmtree(self._data, ignore_errors=True)
        self._has_voted |= self._is_voter
        self._belongs = self._is_voter = False

    # --- the end ---

    def _say_goodbye(self) -> None:
        if self._order == "leave":
            self._futile_at = time.monotonic() + _FUTILE
            self._until(_LEAVING, self._has_left)
        else:
            self._until(self._orders.close_timeout, self._is_alone)

    def _until(self, seconds: float, is_done: Any) -> None:
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            time.sleep(_TICK / 2)

    def _has_left(self) -> bool:
        """Hand over, and take this member out of the cluster; true if that has been done, or cannot be."""
        is_out = self._is_out()
        if self._can_be_out:
            self._futile_at = time.monotonic() + _FUTILE
        return is_out or time.monotonic() > self._futile_at

    def _is_out(self) -> bool:
        """Take one step out of the cluster; true if that was the last one."""
        answers, hidden = self._look()
        if self._etcd.fd is not None:
            with suppress(OSError, GatewayError):
                answers[self._mine] = self._own_list()
        view = self._view(answers, hidden=hidden)
        step = membership.next_step_out(view)
        if isinstance(step, membership.Remove):
            if self._etcd.fd is not None:
                self._hand_over(view, step.id)
            self._change(view, "remove", {"ID": str(step.id)})
        self._can_be_out = not isinstance(step, membership.Wait)
        return isinstance(step, membership.Out)

    def _hand_over(self, view: View, goes: int) -> None:
        """Let another member lead if the one that goes does: no election is waited for then."""
        with suppress(OSError, GatewayError, LookupError):
            heirs = membership.heirs(view)
            if heirs and int(self._own("maintenance/status", {})["leader"]) == goes:
                self._own("maintenance/transfer-leadership", {"targetID": str(min(heirs))})

    def _is_alone(self) -> bool:
        names = (self._orders.prefix + end for end in ("~sessions/", "~sessions0"))
        first, last = (base64.b64encode(name.encode(errors="surrogateescape")).decode() for name in names)
        body = {"key": first, "range_end": last, "count_only": True}
        try:
            return int(self._own("kv/range", body).get("count", 0)) == 0
        except (OSError, GatewayError):
            return self._is_useless()

    def _is_useless(self) -> bool:
        """True if most members have gone: then nobody is served."""
        answers, _ = self._look()
        # This one answers as well.
        return 2 * (1 + sum(answer is not None for answer in answers)) <= len(self._seats)

    def _own_list(self) -> tuple[Entry, ...]:
        return self._gateway.members_at(self._seats[self._mine], _QUESTION, _reached(self._address))

    def _own(self, path: str, body: dict[str, Any]) -> Any:
        seat = self._seats[self._mine]
        return self._gateway.ask(seat, path, body, _LAST_QUESTION, _reached(self._address))


def _program() -> str | None:
    try:
        return find_program()
    except FileNotFoundError as error:
        tell("refused", f"this node cannot host a member of etcd: {error}")
        return None


def _reached(address: str) -> str:
    """Where a server that listens on an address is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def main() -> int:
    """Run a member; return the exit code."""
    parent = int(sys.argv[1])
    agent = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 1
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()
    if not line:
        return 1
    try:
        member = Member(Orders(**json.loads(line)))
    except OSError as error:
        tell("refused", f"this node cannot host a member of etcd: its certificates cannot be used: {error}")
        return 0
    threading.Thread(target=member.listen, args=(agent, reader), daemon=True).start()
    member.live()
    return 0
