"""Questions to etcd by HTTP: its gateway for JSON, and what members tell each other.

Only for what the agents' client in the core does not do: members that come and go. Without
:mod:`http.client`, whose import takes longer than all the rest of a start.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from elasticrs.rendezvous.elastic.etcd_membership import Entry, Seat
from elasticrs.rendezvous.endpoint import shown_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_OK = 200
_ROOT = "root"
_MOST = 1 << 20
"""Bytes of an answer."""


class GatewayError(Exception):
    """etcd has answered with an error; the text is its own."""


class Gateway:
    """Asks members.

    Args:
        files: of the authorities, the certificate and its key, for members that speak TLS.
        password: of the user ``root``, for members that serve nobody else.

    Raises:
        OSError: a file cannot be read, or holds something else.
    """

    def __init__(self, files: Sequence[str] = (), password: str | None = None) -> None:
        self._context = None
        self._password = password
        self._tokens: dict[Seat, str] = {}
        if files:
            import ssl

            ca, cert, key = files
            self._context = ssl.create_default_context(cafile=ca)
            self._context.load_cert_chain(cert, key)

    def members_at(self, seat: Seat, seconds: float, address: str | None = None) -> tuple[Entry, ...]:
        """Return the members of the cluster of a seat's member; of one without a quorum those that it is to
        have.

        Args:
            seat: of the member.
            seconds: as for :meth:`ask`.
            address: where it is reached, if not at its host.

        Raises:
            GatewayError: another program answers.
            OSError: nobody does, in time.
        """
        answer = self._ask(seat, seat.peer_port, "/members", None, seconds, address, "")
        try:
            # One member at least.
            return tuple(Entry.read(each) for each in answer or [None])
        except (LookupError, TypeError, ValueError, AttributeError):
            raise GatewayError("another program answers") from None

    def ask(
        self, seat: Seat, path: str, body: dict[str, Any], seconds: float, address: str | None = None
    ) -> Any:
        """Ask the gateway of a member, and return what the answer says.

        Args:
            seat: of the member.
            path: what to ask for, below ``/v3/``.
            body: the question.
            seconds: for each of: to connect, to send, and each part of the answer.
            address: where it is reached, if not at its host.

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
            # It may have run out.
            self._tokens.pop(seat, None)
            raise

    def protect(self, seat: Seat, seconds: float, address: str | None = None) -> None:
        """From now on have the cluster serve only those who know the password; nothing if there is none.

        Raises:
            GatewayError: etcd refuses: it has no leader, or another password.
            OSError: no answer.
        """
        user = {"name": _ROOT, "password": self._password}
        if self._password is None or self._log_in(seat, seconds, address):
            return
        for path, body in (
            ("user/add", user),
            ("role/add", {"name": _ROOT}),
            ("user/grant", {"user": _ROOT, "role": _ROOT}),
            ("enable", {}),
        ):
            try:
                self._ask(seat, seat.port, f"/v3/auth/{path}", body, seconds, address, "")
            except GatewayError:  # noqa: PERF203 -- there are few
                # Another seat was faster: what counts is that it can be logged in.
                continue
        if not self._log_in(seat, seconds, address):
            raise GatewayError("no password could be set")

    def is_protected(self, seats: Iterable[Seat], seconds: float) -> bool | None:
        """True if a member asks for a password, be it another one, and none serves those without; ``None`` if
        no member answers.
        """
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

    def misfit(self, error: OSError) -> str | None:
        """Return why two certificates do not fit, if that is what an error says."""
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
        """False if a password is not asked for (yet)."""
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
        # Of version 1.0, so that the answer comes whole.
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
        # Closes it if this fails.
        return self._context.wrap_socket(sock, server_hostname=name)


def _answer(sock: socket.socket) -> tuple[list[bytes], bytes]:
    """The words of the status line, and the content, which may end before the connection does."""
    with sock.makefile("rb") as answered:
        status = answered.readline(_MOST).split()
        length = _MOST
        while (line := answered.readline(_MOST).strip().lower()) != b"":
            name, _, value = line.partition(b":")
            if name == b"content-length" and value.strip().isdigit():
                length = min(_MOST, int(value))
        return status, answered.read(length)
