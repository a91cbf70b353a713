"""The agent monitors the program that runs its etcd member."""

import os
import select
import signal
import subprocess
import sys

import pytest
from helpers.procs import HANG
from helpers.rendezvous import rendezvous

import elasticrs
from elasticrs.rendezvous.elastic import etcd_host
from elasticrs.rendezvous.elastic.etcd_host import EtcdHost
from elasticrs.rendezvous.elastic.etcd_site import EtcdSite
from elasticrs.rendezvous.etcd_host_program import Member, Orders
from elasticrs.rendezvous.etcd_process import reason

ROOT = os.path.dirname(elasticrs.__path__[0])


def wait_for(fd):
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(HANG * 1000)


def test_an_etcd_host_program_that_exits_slowly_does_not_block_the_agent(monkeypatch):
    monkeypatch.setattr(etcd_host, "_PROGRAM", "import os, signal; os.close(1); signal.pause()")
    site = EtcdSite((("localhost", 2379),))
    host = EtcdHost(rendezvous("localhost", 2379, "etcd", etcd=site))
    pipe = host.fd
    wait_for(pipe)
    assert host.take() == []
    # The program has closed its pipe but is still running, so the agent now waits for its exit.
    assert host.fd not in (None, pipe)
    assert host.take() == []
    os.kill(host._program.pid, signal.SIGKILL)
    wait_for(host.fd)
    ((kind, text),) = host.take()
    assert (kind, host.fd) == ("say", None)
    assert "exit code -9" in text
    assert host.start_again()
    host.close()


def run(parent, orders):
    command = [sys.executable, "-I", "-S", "-c", etcd_host._PROGRAM, str(parent), ROOT]
    return subprocess.run(command, input=orders, capture_output=True, timeout=HANG, check=False)


@pytest.mark.parametrize("orders", [b"", b'{"seats": [["localhost", 23', b'{"seats": []}'])
def test_truncated_orders_end_the_etcd_host_program_silently(orders):
    found = run(os.getpid(), orders)
    assert (found.returncode, found.stdout, found.stderr) == (1, b"", b"")


def test_a_killed_agent_ends_the_etcd_host_program_silently():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for parent in (ended.pid, 1):
        found = run(parent, b"")
        assert (found.returncode, found.stdout, found.stderr) == (1, b"", b"")


WARNING = '{"level":"warn","ts":"2026","caller":"x.go:1","msg":"took too long","error":"deadline"}'
FATAL = '{"level":"fatal","msg":"discovery failed","error":"already bootstrapped","stacktrace":"x"}'


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([FATAL, WARNING], "discovery failed: already bootstrapped"),
        ([WARNING], "took too long: deadline"),
        ([WARNING, "panic: out of range", "[]"], "panic: out of range"),
        (['{"level":"warn"}'], reason([])),
    ],
)
def test_the_failure_reason_of_etcd_is_shown_without_json(lines, expected):
    assert reason(lines) == expected
    assert "{" not in reason(lines)


def test_files_in_the_etcd_folder_are_created_only_under_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    seats = [["127.0.0.1", 1, 2, "http"]]
    member = Member(Orders(seats, "job", None, [], None, None, "", 1.0))
    found = []

    class Guard:
        """A lock that records which files exist whenever it is acquired."""

        def __enter__(self):
            found.append(sorted(path.name for path in tmp_path.rglob("*")))

        def __exit__(self, *_):
            pass

    member._guard = Guard()
    try:
        assert member._claim(0)
        member._mine, member._address = 0, "127.0.0.1"
        member._start("/bin/true", "data")
        folder = os.path.basename(member._folder.path)
        assert found == [[], sorted([folder, "lock"])]
        assert os.path.isdir(member._folder.data("data"))
    finally:
        member._etcd.reap()
        member._folder.release(keep=False)
        os.close(member._news)
