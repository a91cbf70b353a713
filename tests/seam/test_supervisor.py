"""The Python interface of the supervisor."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from helpers.groups import Group
from helpers.held import held
from helpers.procs import HANG, assert_gone, run_program

from elasticrs import _core

# The command substitution returns when the daemon, which has a session of its own, closes the pipe.
LEAVE_A_DAEMON = "x=$(setsid sh -c 'echo x; exec sleep 1234 >/dev/null' &)"


def start_failure(group, *commands, **process):
    """Start workers, expect this to fail, and return the failure."""
    with pytest.raises(AssertionError):
        group.start(*commands, **process)
    failure = group.events[-1]
    assert isinstance(failure, _core.StartFailed)
    return failure


def test_nonexistent_cpus_fail_the_start_with_a_clear_error(group):
    assert "CPUs" in start_failure(group, ["true"], cpus=[60000]).message
    with pytest.raises(ValueError, match=r"^cpus "):
        _core.ProcessSpec(0, ["true"], env={}, cpus=[])


def test_siblings_are_signalled_while_python_holds_the_gil(group):
    reader, writer = os.pipe()
    pids = group.start(["sleep", "100"], ["sleep", "100"], pass_fds=[writer])
    os.close(writer)
    os.kill(pids[0], signal.SIGKILL)
    # PyDLL keeps the GIL, so no Python code can run until the sibling has exited and the pipe is closed.
    assert ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1) == 0
    os.close(reader)
    assert group.end().outcome == "failed"


def test_other_threads_run_while_a_thread_waits_for_an_event(group):
    ran = threading.Event()
    thread = threading.Thread(target=lambda: (ran.set(), group.supervisor.stop(_core.StopPolicy(9, 0))))
    group.start(["sleep", "100"])
    thread.start()
    assert group.end().outcome == "stopped"
    assert ran.is_set()
    thread.join()


def test_a_readable_watched_descriptor_wakes_the_waiting_thread(group):
    reader, writer = os.pipe()
    group.supervisor.watch_fd(reader)
    threading.Timer(0, os.write, (writer, b"x")).start()
    ready = group.supervisor.next_event(HANG)
    assert isinstance(ready, _core.FdReady)
    assert ready.fd == reader
    group.supervisor.unwatch_fd(reader)
    assert group.supervisor.next_event(0) is None
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: _core.ProcessSpec(0, [], env={}), "argv"),
        (lambda: _core.ProcessSpec(0, ["a\0b"], env={}), "NUL"),
        (lambda: _core.ProcessSpec(0, ["a"], env={"A=B": "c"}), "A=B"),
        (lambda: _core.StopPolicy(0, 1.0), "0 .*signal"),
        (lambda: _core.StopPolicy(15, float("nan")), "grace must be"),
        (lambda: _core.StopPolicy(15, -1.0), "grace must be"),
        (lambda: _core.LogStream(0, "x", 3, b""), "^to must be"),
        (lambda: _core.check_limits(10**7), "10000000 processes"),
        (lambda: _core.check_limits(1, 10**9), "1 worker and 1000000000 log files .*1000000065"),
        (
            lambda: _core.GroupSpec(
                [_core.ProcessSpec(1, ["a"], env={})], on_failure=_core.StopPolicy(15, 1.0)
            ),
            "local ranks",
        ),
    ],
)
def test_invalid_supervisor_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_closed_descriptor_cannot_be_passed_to_workers(group):
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError, match=f"pass descriptor {reader}") as caught:
        group.start(["true"], pass_fds=[reader])
    assert caught.value.errno == errno.EBADF


def test_a_closed_supervisor_refuses_requests(group):
    group.supervisor.close()
    group.supervisor.close()
    with pytest.raises(_core.SupervisorError, match="has ended"):
        group.supervisor.stop(_core.StopPolicy(15, 1.0))


def test_a_nursery_process_that_cannot_be_started_raises_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(_core.SupervisorError, match="nursery"):
        _core.Supervisor(in_interpreter=True)


def test_a_python_interpreter_can_serve_as_the_nursery_process():
    group = Group(_core.Supervisor(in_interpreter=True))
    group.start(["sh", "-c", f"{LEAVE_A_DAEMON}; exit 3"], ["sleep", "100"])
    ended = group.end()
    assert ended.outcome == "failed"
    assert len(ended.ended) == 1
    group.supervisor.close()


def run_python(program: str, *, expect: int = 0) -> str:
    """Run a Python program in a separate process, and return its output."""
    done = run_program([sys.executable, "-c", textwrap.dedent(program)])
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_ctrl_c_interrupts_the_wait_and_leaves_the_supervisor_usable():
    printed = run_python("""
        import os, signal, threading
        from elasticrs import _core
        s = _core.Supervisor()
        go = threading.Event()
        threading.Thread(target=lambda: go.wait() and os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            go.set()
            s.next_event()
        except KeyboardInterrupt:
            print("interrupted", s.next_event(0))
        s.close()
    """)
    assert printed == "interrupted None\n"


def test_a_forked_child_cannot_use_or_harm_the_supervisor():
    printed = run_python("""
        import os
        from elasticrs import _core
        s = _core.Supervisor()
        spec = _core.ProcessSpec(0, ["sleep", "100"], env=dict(os.environ))
        s.start(_core.GroupSpec([spec], on_failure=_core.StopPolicy(15, 1.0)))
        assert isinstance(s.next_event(), _core.GroupStarted)
        child = os.fork()
        if child == 0:
            try:
                s.stop(_core.StopPolicy(9, 0.0))
            except _core.SupervisorError as e:
                print(f"refused: {e}", flush=True)
            del s
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        assert s.next_event(0) is None, "the worker lives"
        s.close()
        print(os.getpid())
    """)
    refused, pid = printed.splitlines()
    assert refused.startswith("refused: ")
    assert refused.endswith(f" pid {pid}")


def test_a_client_of_an_agent_refuses_requests_in_a_forked_child():
    printed = run_python("""
        import os
        from elasticrs import _core
        s = _core.Supervisor()
        server = _core.CoordinationServer([("127.0.0.1", 0)], run_id="a-run")
        client = _core.CoordinationClient("127.0.0.1", server.port, run_id="a-run", supervisor=s)
        child = os.fork()
        if child == 0:
            for request, *arguments in (client.txn, 1, [], []), (client.watch, 2, "a"), (client.unwatch, "a"):
                try:
                    request(*arguments)
                except _core.SupervisorError:
                    print("refused", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        client.txn(3, [], [])
        while not any(getattr(event, "tag", None) == 3 for event in client.take()):
            assert client.wait(20)
        print("answered")
        client.close()
        s.close()
        server.close()
    """)
    assert printed.split() == ["refused"] * 3 + ["answered"]


def test_other_threads_run_while_a_dropped_supervisor_waits_for_its_nursery():
    supervisor = _core.Supervisor()
    owners = [supervisor]
    begins = threading.Event()

    def drop():
        begins.set()
        owners.clear()

    thread = threading.Thread(target=drop)
    nursery = supervisor.nursery_pid
    del supervisor
    with held(nursery):
        thread.start()
        begins.wait()
        # If the other thread kept the GIL, this thread would not run before the nursery has been killed.
        thread.join(0.3)
        assert thread.is_alive()
    thread.join()
    assert_gone([nursery])


def test_an_expired_fence_deadline_kills_the_group_but_reports_no_failure(group):
    group.start(["sh", "-c", "trap '' TERM; sleep 100"], ["sleep", "100"])
    assert group.supervisor.fence_at(3600.0)
    assert group.supervisor.fence_at(0.0)
    group.until(_core.Fenced)
    ended = group.end()
    assert ended.outcome == "stopped"
    exits = [e for e in group.events if isinstance(e, _core.WorkerExited)]
    assert [(e.exitcode, e.sent_signal) for e in exits] == [(-signal.SIGKILL, signal.SIGKILL)] * 2
    assert not any(isinstance(e, _core.FailureSeen) for e in group.events)

    assert not group.supervisor.fence_at(None), "the deadline before had passed"
    group.start(["true"])
    assert group.end().outcome == "succeeded"
    with pytest.raises(ValueError, match="the deadline"):
        group.supervisor.fence_at(float("nan"))


def test_heartbeats_of_adopted_processes_are_watched(group):
    group.supervisor.watch_hangs(None, startup=0.001)
    group.start()
    page, named = _core.heartbeat_page()
    reader, writer = os.pipe()
    with subprocess.Popen(["sleep", "1000"]) as waits:
        try:
            assert named.startswith(f"{page}:")
            with pytest.raises(OSError, match=r"page .*local rank 0"):
                group.supervisor.adopt(0, waits.pid, page_fd=reader)
            with pytest.raises(_core.SupervisorError, match=r"page .*local rank 1"):
                group.supervisor.adopt(1, waits.pid, page_fd=page)
            group.supervisor.adopt(0, waits.pid, page_fd=page)
            assert group.until(_core.WorkerHung).pid == waits.pid
            assert group.end().outcome == "failed"
        finally:
            waits.kill()
            for fd in (page, reader, writer):
                os.close(fd)


def test_an_invalid_duration_of_a_hang_is_refused(group):
    with pytest.raises(ValueError, match="hung_for"):
        group.supervisor.stop(_core.StopPolicy(signal.SIGTERM, 60.0), hung_for=-1.0)
