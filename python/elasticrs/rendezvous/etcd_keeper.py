"""Runs etcd for a program: ends it and removes its data when the program ends. Started as a script by
:class:`elasticrs.rendezvous.etcd_server.EtcdServer`, on Python's own modules alone.

Arguments: the program's pid, a folder that is removed in the end, and the command. Ends as etcd does, or with
it by SIGTERM.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys

_GRACE_MS = 5000
"""Between SIGTERM and SIGKILL to etcd."""

_PR_SET_PDEATHSIG = 1


def main(parent: int, folder: str, command: list[str]) -> int:
    """Run the command until it ends, the parent ends, or a signal asks for it; return the exit code."""
    stops = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    for signum in stops:
        signal.signal(signum, lambda *_: None)
    program = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 1
    pid = spawn(command)
    poll = select.poll()
    etcd = os.pidfd_open(pid)
    for fd in (etcd, program, reader):
        poll.register(fd, select.POLLIN)
    if all(fd != etcd for fd, _ in poll.poll()):
        end(pid, etcd, _GRACE_MS)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if any(fd == program for fd, _ in poll.poll(0)):
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def spawn(command: list[str], stderr: int | None = None) -> int:
    """Start a program that is killed when the thread that calls this ends.

    Args:
        command: an absolute path, and arguments.
        stderr: where it writes its errors; as this process when ``None``.
    """
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            # Should somebody kill the keeper.
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if stderr is not None:
                os.dup2(stderr, 2)
            if os.getppid() == keeper:
                os.execv(command[0], command)
        finally:
            os._exit(127)
    return pid


def end(pid: int, pidfd: int, grace_ms: int) -> None:
    """End a child, which is not reaped yet; the caller does that."""
    os.kill(pid, signal.SIGTERM)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(grace_ms):
        os.kill(pid, signal.SIGKILL)


def find_program() -> str:
    """Return the path of etcd: that of ``TORCHELASTIC_ETCD_BINARY_PATH``, else of ``etcd`` on ``PATH``.

    Raises:
        FileNotFoundError: there is none; says where to get one.
    """
    given = os.environ.get("TORCHELASTIC_ETCD_BINARY_PATH")
    found = shutil.which(given or "etcd")
    if found is not None:
        return os.path.abspath(found)
    why = f"{given!r} (TORCHELASTIC_ETCD_BINARY_PATH) is no program" if given else "etcd is not in PATH"
    raise FileNotFoundError(
        f"{why}: install it (Debian, Ubuntu: apt-get install etcd-server; others: "
        "https://github.com/etcd-io/etcd/releases), or set TORCHELASTIC_ETCD_BINARY_PATH to its path"
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
