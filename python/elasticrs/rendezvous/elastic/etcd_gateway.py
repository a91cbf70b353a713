"""Requests to hosted etcd members over HTTP: etcd's JSON gateway, and the list of members at the peer port.

Used only for requests that the agents' client in the core does not support. :mod:`http.client` is not used,
because importing it takes longer than the rest of the start.
"""

from __future__ import annotations

import json
import socket
from base64 import b64encode
from typing import TYPE_CHECKING, Any

from elasticrs.rendezvous.elastic.etcd_membership import WORKERS, Entry, Seat
from elasticrs.rendezvous.endpoint import shown_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_OK = 200
_ROOT = "root"
_MOST = 1 << 20
"""Maximum size of an answer, in bytes."""


class GatewayError(Exception):
    """Raised when etcd answers with an error. Contains etcd's error text."""


class Gateway:
    """Sends requests to etcd members.

    Args:
        files: paths of the CA certificates, the certificate and its key, for members that use TLS.
        password: password of the user ``root``, for members that require it.
        workers: password of the workers' user and the prefix of the only keys that it may use; ``None`` if
            there is no such user.

    Raises:
        OSError: a file cannot be read, or its content is invalid.
    """

    def __init__(
        self,
        files: Sequence[str] = (),
        password: str | None = None,
        workers: tuple[str, str] | None = None,
    ) -> None:
        self._context = None
        self._password = password
        self._workers = workers
        self._tokens: dict[Seat, str] = {}
        if files:
            import ssl

            ca, cert, key = files
            self._context = ssl.create_default_context(cafile=ca)
            self._context.load_cert_chain(cert, key)

    def members_at(self, seat: Seat, seconds: float, address: str | None = None) -> tuple[Entry, ...]:
        """Return the members of a cluster, as listed by one of them. This works without a quorum.

        Args:
            seat: seat of the member to ask.
            seconds: timeout, as for :meth:`ask`.
            address: its address, if it is not reached at the seat's host.

        Raises:
            GatewayError: another program answers.
            OSError: no answer in time.
        """
        answer = self._ask(seat, seat.peer_port, "/members", None, seconds, address, "")
        try:
            # Treat an empty list as an error, because a cluster has at least one member.
            return tuple(Entry.read(each) for each in answer or [None])
        except (LookupError, TypeError, ValueError, AttributeError):
            raise GatewayError("another program answers") from None

    def ask(
        self, seat: Seat, path: str, body: dict[str, Any], seconds: float, address: str | None = None
    ) -> Any:
        """Send a request to the JSON gateway of a member, and return its answer.

        Args:
            seat: seat of the member.
            path: path of the request below ``/v3/``.
            body: content of the request.
            seconds: timeout for connecting, for sending, and for each part of the answer.
            address: its address, if it is not reached at the seat's host.

        Raises:
            GatewayError: etcd refuses, or another program answers.
            OSError: no answer.
        """
        if self._password is not None and seat not in self._tokens:
            self._log_in(seat, seconds, address)
        token = self._tokens.get(seat, "")
        try:
            return self._ask(seat, seat.port, f"/v3/{path}", body, seconds, address, token)
        except GatewayError:
            # Log in again before the next request, because the session token may have expired.
            self._tokens.pop(seat, None)
            raise

    def protect(self, seat: Seat, seconds: float, address: str | None = None) -> None:
        """Make the cluster require the password from now on. Do nothing if there is no password.

        Raises:
            GatewayError: etcd refuses, because it has no leader or another password.
            OSError: no answer.
        """
        user = {"name": _ROOT, "password": self._password}
        if self._password is None or self._log_in(seat, seconds, address):
            return
        orders: list[tuple[str, dict[str, Any]]] = [
            ("user/add", user),
            ("role/add", {"name": _ROOT}),
            ("user/grant", {"user": _ROOT, "role": _ROOT}),
            *self._workers_orders(),
            ("enable", {}),
        ]
        for path, body in orders:
            try:
                self._ask(seat, seat.port, f"/v3/auth/{path}", body, seconds, address, "")
            except GatewayError:  # noqa: PERF203 -- there are few
                # Ignore the error, because the agent of another seat may have done this first. The login
                # below fails if the password is not set.
                continue
        if not self._log_in(seat, seconds, address):
            raise GatewayError("no password could be set")

    def _workers_orders(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the requests that create the workers' user, whose role only allows keys with one prefix."""
        if self._workers is None:
            return []
        password, prefix = self._workers
        first = prefix.encode(errors="surrogateescape")
        # Increase the last byte by one to get the end of the key range. The byte cannot overflow, because
        # UTF-8 has no byte 0xff.
        last = first[:-1] + bytes([first[-1] + 1])
        keys = {"key": b64encode(first).decode(), "range_end": b64encode(last).decode()}
        return [
            ("user/add", {"name": WORKERS, "password": password}),
            ("role/add", {"name": WORKERS}),
            ("role/grant", {"name": WORKERS, "perm": {"permType": "READWRITE", **keys}}),
            ("user/grant", {"user": WORKERS, "role": WORKERS}),
        ]

    def is_protected(self, seats: Iterable[Seat], seconds: float) -> bool | None:
        """Return true if the members require any password; ``None`` if no member answers."""
        found = None
        for seat in seats:
            try:
                if not self._log_in(seat, seconds, None):
                    return False
                found = True
            except GatewayError as error:  # noqa: PERF203 -- there are few
                found = found or "authentication failed" in str(error) or None
            except OSError:
                continue
        return found

    def find_foreign(self, seats: Iterable[Seat], label: str, seconds: float) -> Seat | None:
        """Return the first cluster address (seat) that answers, if the etcd there belongs to another job.

        Returns ``None`` if that etcd belongs to this job, or if no seat answers.
        """
        for seat in seats:
            try:
                answer = self._ask(seat, seat.port, "/v3/cluster/member/list", {}, seconds, None, "")
                names = [str(each["name"]) for each in answer["members"]]
            except (OSError, GatewayError, LookupError, TypeError):
                continue
            return None if any(name.startswith(f"{label}-") for name in names) else seat
        return None

    def is_healthy(self, seat: Seat, seconds: float, address: str) -> bool:
        """Return true if a member serves clients, which it does when its cluster has a quorum.

        Raises:
            GatewayError: the member has no leader, or another program answers.
            OSError: no answer in time, because the member has not started completely, or has exited.
        """
        answer = self._ask(seat, seat.port, "/health", None, seconds, address, "")
        return isinstance(answer, dict) and answer.get("health") == "true"

    def misfit(self, error: OSError) -> str | None:
        """Return why a certificate was rejected, or ``None`` if the error has another cause."""
        if self._context is None:
            return None
        import ssl

        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate does not fit: {error.verify_message}"
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            why = error.reason.rpartition("ALERT_")[2].replace("_", " ").lower()
            return f"it refuses this node's certificate: {why}"
        return None

    def _log_in(self, seat: Seat, seconds: float, address: str | None) -> bool:
        """Log in; return false if the member does not require a password (yet)."""
        body = {"name": _ROOT, "password": self._password}
        try:
            answer = self._ask(seat, seat.port, "/v3/auth/authenticate", body, seconds, address, "")
        except GatewayError as error:
            if "not enabled" in str(error):
                return False
            raise
        self._tokens[seat] = str(answer["token"])
        return True

    def _ask(
        self,
        seat: Seat,
        port: int,
        path: str,
        body: dict[str, Any] | None,
        seconds: float,
        address: str | None,
        token: str,
    ) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        # Use HTTP 1.0, because a server may answer an HTTP 1.1 request in chunks.
        method, host = "GET" if body is None else "POST", shown_endpoint(seat.host, port)
        head = (
            f"{method} {path} HTTP/1.0\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            f"{f'Authorization: {token}' if token else 'Accept: */*'}\r\n\r\n"
        )
        with self._connection(address or seat.host, port, seat.host, seconds) as sock:
            sock.sendall(head.encode("ascii", "replace") + data)
            status, content = _answer(sock)
        try:
            answer, code = json.loads(content), int(status[1])
        except (ValueError, IndexError):
            raise GatewayError("another program answers") from None
        if code != _OK:
            why = answer.get("error") or answer.get("message") if isinstance(answer, dict) else None
            raise GatewayError(str(why or f"status {code}"))
        return answer

    def _connection(self, address: str, port: int, name: str, seconds: float) -> socket.socket:
        sock = socket.create_connection((address, port), seconds)
        if self._context is None:
            return sock
        # `wrap_socket` closes the socket if the handshake fails.
        return self._context.wrap_socket(sock, server_hostname=name)


def _answer(sock: socket.socket) -> tuple[list[bytes], bytes]:
    """Read an HTTP answer. Return the words of its status line, and its body."""
    with sock.makefile("rb") as answered:
        status = answered.readline(_MOST).split()
        length = _MOST
        while (line := answered.readline(_MOST).strip().lower()) != b"":
            name, _, value = line.partition(b":")
            if name == b"content-length" and value.strip().isdigit():
                length = min(_MOST, int(value))
        return status, answered.read(length)
