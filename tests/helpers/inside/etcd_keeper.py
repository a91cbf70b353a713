"""Runs the members of an etcd cluster as child processes, which do not outlive it.

The first line of output is ``ready``. Commands, one JSON object per line:

- `start`: `name`, `argv`, `log`: run a member; what it writes is appended to that file. Returns its `pid`.
- `signal`: `name`, `number`: send it a signal; after SIGKILL its end is waited for.
- `state`: `name`: returns its `code`, `null` while it runs.
"""

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1

prctl = ctypes.CDLL(None).prctl
members: dict[str, subprocess.Popen[bytes]] = {}


def end_with_keeper() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(name: str, argv: list[str], log: str) -> dict[str, Any]:
    with open(log, "ab") as out:
        members[name] = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=end_with_keeper,  # noqa: PLW1509 -- there is one thread
        )
    return {"pid": members[name].pid}


def send_signal(name: str, number: int) -> dict[str, Any]:
    members[name].send_signal(number)
    return {"code": members[name].wait()} if number == signal.SIGKILL else {}


def state(name: str) -> dict[str, Any]:
    return {"code": members[name].poll()}


DO: dict[str, Callable[..., dict[str, Any]]] = {
    "start": start,
    "signal": send_signal,
    "state": state,
}


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(DO[command.pop("do")](**command)), flush=True)
    for member in members.values():
        member.kill()
    for member in members.values():
        member.wait()


if __name__ == "__main__":
    main()
