"""Run the rendezvous store as a separate process: ``python -m elasticrs.store``.

Prints its address once it accepts connections. The exit code is 0 after SIGTERM, SIGINT or SIGHUP, 1 after an
internal error or if its state cannot be read or written, and 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from elasticrs._engine.job.config import DEFAULT_PORT
from elasticrs._engine.nodes.transport.coordination import Server, raise_descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

GRACE = 15.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m elasticrs.store", description="Serve a coordination store.")
    parser.add_argument("--host", default="", help="address to listen on (default: all, IPv4 and IPv6)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: any free port (default: 29400)")
    parser.add_argument("--run-id", help="serve only this run (default: any)")
    parser.add_argument("--token-file", help="token that clients must present (default: $ELASTICRS_TOKEN)")
    parser.add_argument("--max-connections", type=int, help="limit of connections (default: 16384)")
    parser.add_argument(
        "--max-mib",
        type=int,
        default=256,
        help="memory limit for the data of all clients, in MiB (default: 256)",
    )
    parser.add_argument("--state", metavar="FILE", help="save the state in this file, and continue from it")
    parser.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help=f"with --state: seconds that the store may be away before nodes give up (default: {GRACE:.0f})",
    )
    return parser


def _token(parser: argparse.ArgumentParser, path: str | None) -> bytes | None:
    if path is None:
        return os.environ.get("ELASTICRS_TOKEN", "").encode(errors="surrogateescape") or None
    try:
        with open(path, "rb") as file:
            # Strip only line ends, as agents do, because both sides must use exactly the same token.
            token = file.read().rstrip(b"\r\n")
    except OSError as error:
        parser.error(f"cannot read the token: {error.strerror}: {path}")
    if not token:
        parser.error(f"the token file is empty: {path}")
    return token


def _serve(server: Server, stop: socket.socket) -> signal.Signals | None:
    poll = select.poll()
    poll.register(stop, select.POLLIN)
    poll.register(server.fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        # Write the store's messages to stderr first, because a signal may end the store at the first poll.
        _say_notices(server)
        if stop.fileno() in ready:
            return signal.Signals(stop.recv(1)[0])
        if server.has_ended:
            return None


def _say_notices(server: Server) -> None:
    for line in server.take_notices():
        _say(line)


def _say(line: str) -> None:
    try:
        # Write without a buffer. Otherwise, the interpreter would flush the buffer at exit and fail again.
        os.write(2, f"elasticrs store: {line}\n".encode(errors="backslashreplace"))
    except OSError:
        # Continue if stderr was closed, because the store must still notify its clients.
        return


def _signals() -> list[signal.Signals]:
    """Return the signals that stop the server. SIGHUP is left out if it is ignored, as under ``nohup``."""
    stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if stays else [signal.SIGHUP])]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the store until a signal arrives. Return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not 0 <= args.port <= 65535:
        parser.error(f"--port must be between 0 and 65535, got {args.port}")
    if args.max_mib <= 0 or (args.max_connections is not None and args.max_connections <= 0):
        parser.error("--max-mib and --max-connections must be positive")
    if max(args.max_mib << 20, args.max_connections or 0) >= 1 << 63:
        parser.error("--max-mib and --max-connections are too large")
    if args.state == "":
        parser.error("--state needs the name of a file")
    if args.grace is not None and not (args.state and 0 < args.grace <= 3600):
        parser.error("--grace needs --state, and between 0 and 3600 seconds")
    limits = {} if args.max_connections is None else {"max_connections": args.max_connections}
    token = _token(parser, args.token_file)
    stop, wake = socket.socketpair()
    with stop, wake:
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        for signum in _signals():
            signal.signal(signum, lambda *_: None)
        # Each client needs a file descriptor.
        raise_descriptor_limit()
        has_state = bool(args.state) and os.path.exists(args.state) and os.path.getsize(args.state) > 0
        try:
            server = Server(
                [(args.host, args.port)],
                run_id=args.run_id,
                token=token,
                max_bytes=args.max_mib << 20,
                state=args.state,
                grace=args.grace or GRACE,
                **limits,
            )
        except RuntimeError as error:
            _say(str(error))
            return 1
        except (OSError, ValueError) as error:
            parser.error(str(error.strerror if isinstance(error, OSError) and error.strerror else error))
        host = f"[{args.host}]" if ":" in args.host else args.host or "*"
        print(f"elasticrs store: serving at {host}:{server.port}", flush=True)
        if args.state:
            _say(f"{'continuing from' if has_state else 'starting with an empty state in'} {args.state}")
        try:
            ended_by = _serve(server, stop)
            if ended_by is None:
                return 1
            _say(f"{ended_by.name}: closing (sessions: {server.sessions()})")
        finally:
            server.close()
            # Write the last messages to stderr. The store may have failed to save its state when it closed.
            _say_notices(server)
            signal.set_wakeup_fd(-1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
