"""HTTP requests to hosted etcd members: to the JSON gateway, and to the peer port for the member list.

Other requests use the etcd client of the core. This module does not use :mod:`http.client`, because importing
it takes longer than the rest of the startup.
"""

from __future__ import annotations

import enum
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
"""Maximum size of a response, in bytes."""


class EtcdError(enum.Enum):
    """Errors of etcd that callers handle. Each value consists of a gRPC code and a text. etcd defines both in
    its API package ``rpctypes``, and they are the same in all versions.
    """

    AUTH_DISABLED = (9, "etcdserver: authentication is not enabled")
    AUTH_FAILED = (3, "etcdserver: authentication failed, invalid user ID or password")

    @classmethod
    def of(cls, answer: dict[str, Any]) -> EtcdError | None:
        """Return the error in a gateway's response. Return ``None`` if the response contains no error that
        this class defines.
        """
        try:
            return cls((answer.get("code"), answer.get("message") or answer.get("error")))
        except ValueError:
            return None


class GatewayError(Exception):
    """Raised when etcd responds with an error, or when the responding program is not etcd.

    Args:
        message: text of the error.
        error: the error of etcd; ``None`` if :class:`EtcdError` does not contain it.
    """

    def __init__(self, message: str, error: EtcdError | None = None) -> None:
        super().__init__(message)
        self.error = error


class Gateway:
    """Sends requests to etcd members.

    Args:
        files: paths of the CA certificates, the certificate and its key, for members that use TLS.
        password: password of the user ``root``, for members that require it.
        workers: password of the etcd user for workers, and the prefix of the keys that this user may access;
            ``None`` if workers have no user of their own.

    Attributes:
        addresses: addresses to connect to, by seat. For other seats, it is the host of the seat.

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
        self.addresses: dict[Seat, str] = {}
        if files:
            import ssl

            ca, cert, key = files
            self._context = ssl.create_default_context(cafile=ca)
            self._context.load_cert_chain(cert, key)

    def members_at(self, seat: Seat, seconds: float) -> tuple[Entry, ...]:
        """Request the list of cluster members from one member. This works even without a quorum.

        Args:
            seat: seat (host and ports) of the member to which the request is sent.
            seconds: timeout, as for :meth:`ask`.

        Raises:
            GatewayError: the program at the address is not etcd.
            OSError: the member did not respond in time.
        """
        answer = self._ask(seat, "/members", seconds, port=seat.peer_port)
        try:
            # Treat an empty list as an error, because a cluster has at least one member.
            return tuple(Entry.read(each) for each in answer or [None])
        except (LookupError, TypeError, ValueError, AttributeError):
            raise GatewayError("another program answers") from None

    def ask(self, seat: Seat, path: str, body: dict[str, Any], seconds: float) -> Any:
        """Send a request to the JSON gateway of a member, and return its response.

        Args:
            seat: seat (host and ports) of the member.
            path: path of the request below ``/v3/``.
            body: content of the request.
            seconds: timeout for connecting, for sending, and for each part of the response.

        Raises:
            GatewayError: etcd rejected the request, or the program at the address is not etcd.
            OSError: the member did not respond.
        """
        if self._password is not None and seat not in self._tokens:
            self._log_in(seat, seconds)
        try:
            return self._ask(seat, f"/v3/{path}", seconds, body)
        except GatewayError:
            # Discard the session token, because it may have expired. The next request then logs in again.
            self._tokens.pop(seat, None)
            raise

    def protect(self, seat: Seat, seconds: float) -> None:
        """Make the etcd cluster require a password from now on. Do nothing if no password is configured.

        Raises:
            GatewayError: etcd rejected a request, for example because it has no leader, or its password is a
                different one.
            OSError: the member did not respond.
        """
        user = {"name": _ROOT, "password": self._password}
        if self._password is None or self._log_in(seat, seconds):
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
                self._ask(seat, f"/v3/auth/{path}", seconds, body)
            except GatewayError:  # noqa: PERF203 -- there are few
                # Ignore the error, because the agent of another seat may have sent the same request first. If
                # the password is still not set, the login below fails.
                continue
        if not self._log_in(seat, seconds):
            raise GatewayError("no password could be set")

    def _workers_orders(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the requests that create the etcd user for workers. This user may access only keys with a
        certain prefix.
        """
        if self._workers is None:
            return []
        password, prefix = self._workers
        first = prefix.encode(errors="surrogateescape")
        # The end of the key range is the prefix with its last byte incremented. The byte cannot overflow,
        # because 0xff does not occur in UTF-8.
        last = first[:-1] + bytes([first[-1] + 1])
        keys = {"key": b64encode(first).decode(), "range_end": b64encode(last).decode()}
        return [
            ("user/add", {"name": WORKERS, "password": password}),
            ("role/add", {"name": WORKERS}),
            ("role/grant", {"name": WORKERS, "perm": {"permType": "READWRITE", **keys}}),
            ("user/grant", {"user": WORKERS, "role": WORKERS}),
        ]

    def is_protected(self, seats: Iterable[Seat], seconds: float) -> bool | None:
        """Return true if the etcd members require a password, and false if they do not. Return ``None`` if no
        member responds.
        """
        found = None
        for seat in seats:
            try:
                if not self._log_in(seat, seconds):
                    return False
                found = True
            except GatewayError as error:  # noqa: PERF203 -- there are few
                found = found or error.error is EtcdError.AUTH_FAILED or None
            except OSError:
                continue
        return found

    def find_foreign(self, seats: Iterable[Seat], label: str, seconds: float) -> Seat | None:
        """Return the first responding endpoint if it belongs to another job's etcd. Return ``None`` if it
        belongs to this job's etcd, or if no endpoint responds.
        """
        for seat in seats:
            try:
                answer = self._ask(seat, "/v3/cluster/member/list", seconds, {})
                names = [str(each["name"]) for each in answer["members"]]
            except (OSError, GatewayError, LookupError, TypeError):
                continue
            return None if any(name.startswith(f"{label}-") for name in names) else seat
        return None

    def is_healthy(self, seat: Seat, seconds: float) -> bool:
        """Return true if an etcd member can serve clients, which requires a quorum of members.

        Raises:
            GatewayError: the member has no leader, or the program at the address is not etcd.
            OSError: the member did not respond in time, because it is still starting or has exited.
        """
        answer = self._ask(seat, "/health", seconds)
        return isinstance(answer, dict) and answer.get("health") == "true"

    def misfit(self, error: OSError) -> str | None:
        """Return the reason why a TLS certificate was rejected; ``None`` if the error has another cause."""
        if self._context is None:
            return None
        import ssl

        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate was rejected: {error.verify_message}"
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            why = error.reason.rpartition("ALERT_")[2].replace("_", " ").lower()
            return f"it rejected this node's certificate: {why}"
        return None

    def _log_in(self, seat: Seat, seconds: float) -> bool:
        """Log in to an etcd member. Return false if the member currently requires no password."""
        body = {"name": _ROOT, "password": self._password}
        try:
            answer = self._ask(seat, "/v3/auth/authenticate", seconds, body)
        except GatewayError as error:
            if error.error is EtcdError.AUTH_DISABLED:
                return False
            raise
        self._tokens[seat] = str(answer["token"])
        return True

    def _ask(
        self, seat: Seat, path: str, seconds: float, body: dict[str, Any] | None = None, port: int = 0
    ) -> Any:
        """Send a request to an etcd member, to its client port if ``port`` is 0."""
        port, token = port or seat.port, self._tokens.get(seat)
        data = b"" if body is None else json.dumps(body).encode()
        # Use HTTP/1.0, because a response to HTTP/1.1 may use chunked encoding.
        method, host = "GET" if body is None else "POST", shown_endpoint(seat.host, port)
        head = (
            f"{method} {path} HTTP/1.0\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            f"{f'Authorization: {token}' if token else 'Accept: */*'}\r\n\r\n"
        )
        with self._connection(seat, port, seconds) as sock:
            sock.sendall(head.encode("ascii", "replace") + data)
            status, content = _answer(sock)
        try:
            answer, code = json.loads(content), int(status[1])
        except (ValueError, IndexError):
            raise GatewayError("another program answers") from None
        if code != _OK:
            answer = answer if isinstance(answer, dict) else {}
            why = answer.get("error") or answer.get("message") or f"status {code}"
            raise GatewayError(str(why), EtcdError.of(answer))
        return answer

    def _connection(self, seat: Seat, port: int, seconds: float) -> socket.socket:
        sock = socket.create_connection((self.addresses.get(seat, seat.host), port), seconds)
        if self._context is None:
            return sock
        # Do not close the socket after a failed handshake, because `wrap_socket` already does so.
        return self._context.wrap_socket(sock, server_hostname=seat.host)


def _answer(sock: socket.socket) -> tuple[list[bytes], bytes]:
    """Read an HTTP response. Return its status line as a list of words, and its body."""
    with sock.makefile("rb") as answered:
        status = answered.readline(_MOST).split()
        length = _MOST
        while (line := answered.readline(_MOST).strip().lower()) != b"":
            name, _, value = line.partition(b":")
            if name == b"content-length" and value.strip().isdigit():
                length = min(_MOST, int(value))
        return status, answered.read(length)
