"""One end of a connection. It reads commands from standard input, one per line, and prints a line about each
of them.

Arguments: `serve` or `connect`, an address, a port. Commands: `send TEXT`, `peek SECONDS` (is there something
to read?), `receive`, `ask TEXT` (send, and wait for as much to come back), `echo` (until the other side
ends), `send-bulk COUNT SEED` (and end this side), `receive-bulk` (to the end), `close`.
"""

import hashlib
import os
import random
import select
import socket
import sys
import time


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def obey(connection: socket.socket, words: list[str]) -> str:
    match words:
        case ["send", text]:
            connection.sendall(text.encode())
            return "SENT"
        case ["peek", seconds]:
            return "THERE" if select.select([connection], [], [], float(seconds))[0] else "NOTHING"
        case ["receive"]:
            return f"RECEIVED {connection.recv(1 << 16)!r}"
        case ["ask", text]:
            began = time.monotonic()
            connection.sendall(text.encode())
            answer = connection.recv(len(text), socket.MSG_WAITALL)
            return f"ANSWER {answer.decode()} after {time.monotonic() - began:.3f}"
        case ["echo"]:
            while received := connection.recv(1 << 16):
                connection.sendall(received)
            return "ECHOED"
        case ["send-bulk", count, seed]:
            data = random.Random(seed).randbytes(int(count))
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return f"BULK {count} {hashlib.sha256(data).hexdigest()}"
        case ["receive-bulk"]:
            data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            return f"BULK {len(data)} {hashlib.sha256(data).hexdigest()}"
        case ["close"]:
            connection.close()
            return "CLOSED"
    return f"no such command: {words}"


def main(role: str, address: str, port: str) -> None:
    if role == "serve":
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, int(port)), family=family)
        say("LISTENING")
        connection, _ = listener.accept()
    else:
        connection = socket.create_connection((address, int(port)))
    with connection:
        say("CONNECTED")
        for line in sys.stdin:
            try:
                say(obey(connection, line.split()))
            except OSError as error:
                say(f"{type(error).__name__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
