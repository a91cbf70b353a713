"""Timer servers without an agent: over a ``multiprocessing`` queue, over a FIFO, and written by a user."""

import logging
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from helpers import procs
from helpers.procs import HANG, run_program
from helpers.said import says

from elasticrs import timer

TORCH_CLIENT = """
    import os, signal, sys
    from torch.distributed.elastic import timer
    print(os.getpid(), flush=True)
    with timer.expires(after=60, scope="outer", client=timer.FileTimerClient(sys.argv[1])):
        with timer.expires(after=0, scope="inner", client=timer.FileTimerClient(sys.argv[1], signal=15)):
            signal.pause()
"""


LOCAL = """
    import multiprocessing, signal, sys, threading
    from elasticrs import timer

    def hang(requests, released):
        timer.configure(timer.LocalTimerClient(requests))
        with timer.expires(after=60):
            released.set()
        with timer.expires(after=0.01):
            signal.pause()

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        requests, released = context.Queue(), context.Event()
        server = timer.LocalTimerServer(requests, max_interval=60)
        server.start()
        worker = context.Process(target=hang, args=(requests, released))
        worker.start()
        worker.join()
        print(worker.exitcode, released.is_set(), server._watchdog_thread.is_alive())
        server.stop()
        print([thread.name for thread in threading.enumerate() if thread.name == "LocalTimerServer"])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_hung_multiprocessing_process_is_killed(tmp_path, method):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(LOCAL))
    before = [child.pid for child in procs.children()]
    done = run_program([sys.executable, script, method])
    # Reap multiprocessing's helper processes, which outlive their program by a moment and are adopted by this
    # process.
    procs.reap_adopted(keep=before)
    assert done.stdout == "-9 True True\n[]\n", done.stderr


def test_a_local_server_kills_only_descendants():
    server = timer.LocalTimerServer(queue.Queue())
    for pid in (os.getpid(), os.getppid(), 1, -1, 0, 2**40):
        assert server._reap_worker(pid), "done: there is nobody to kill"


RECYCLED = """
    import os, queue, subprocess, sys, time
    from elasticrs import timer
    from elasticrs.timer.local_timer import LocalTimerRequest

    def start():
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def end(process):
        process.stdin.close()
        process.wait()

    def turn(server, *requests):
        server.register_timers(list(requests))
        for pid in server.get_expired_timers(time.time()):
            assert server._reap_worker(pid)

    server = timer.LocalTimerServer(queue.Queue())
    first = start()
    later, due = time.time() + 1000, time.time() - 1
    started = int(open(f"/proc/{first.pid}/stat").read().rpartition(")")[2].split()[19])
    turn(server, LocalTimerRequest(first.pid, "held", later, started))
    end(first)
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(first.pid - 1))
    second = start()
    assert second.pid == first.pid
    server._timers[first.pid, "held"].expiration_time = due
    turn(server)
    # Read after the first one has ended and the second one has come.
    turn(server, LocalTimerRequest(first.pid, "late", due, started))
    print(second.poll())
    end(second)
    third = start()
    turn(server, timer.TimerRequest(third.pid, "its own", due))
    print(third.wait())
    third.stdin.close()
    server.stop()
"""


@pytest.mark.privileged
def test_a_process_without_its_main_thread_still_counts_as_running():
    from elasticrs.timer.local_timer import descends_from_us

    with subprocess.Popen([sys.executable, "-c", procs.HEADLESS], stdout=subprocess.PIPE) as headless:
        headless.stdout.readline()
        assert descends_from_us(headless.pid)
        headless.kill()
        assert procs.wait_gone(headless.pid)
        assert not descends_from_us(headless.pid)


def test_a_process_with_a_reused_pid_is_not_killed():
    namespace = ("unshare", "--pid", "--fork", "--mount-proc")
    done = run_program([*namespace, sys.executable, "-c", textwrap.dedent(RECYCLED)])
    assert done.stdout == "None\n-9\n", done.stderr


@pytest.mark.parametrize("step", [-10_000, 10_000])
def test_a_wall_clock_jump_neither_expires_nor_delays_a_timer(monkeypatch, step):
    server = timer.LocalTimerServer(queue.Queue())
    wall = time.time
    server.register_timers([timer.TimerRequest(1, "before", wall() + 100)])
    monkeypatch.setattr(time, "time", lambda: wall() + step)
    server.register_timers([timer.TimerRequest(1, "after", wall() + step + 100)])
    assert server.get_expired_timers(server._now()) == {}
    assert len(server.get_expired_timers(server._now() + 101)[1]) == 2


class UsersServer(timer.TimerServer):
    """A server as users would write it from torch's documentation."""

    def __init__(self, requests):
        super().__init__(timer.MultiprocessingRequestQueue(requests), max_interval=0.01)
        self.timers = {}
        self.reaped = queue.Queue()

    def register_timers(self, timer_requests):
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self.timers.pop(key, None)
            else:
                self.timers[key] = request

    def clear_timers(self, worker_ids):
        self.timers = {key: value for key, value in self.timers.items() if key[0] not in worker_ids}

    def get_expired_timers(self, deadline):
        expired = {}
        for request in self.timers.values():
            if request.expiration_time <= deadline:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _reap_worker(self, worker_id):
        self.reaped.put(worker_id)
        if worker_id == "fails":
            raise RuntimeError("counts as done")
        return True


def test_a_user_defined_timer_server_runs():
    requests = queue.Queue()
    server = UsersServer(requests)
    requests.put(timer.TimerRequest("late", "a", time.time() - 1))
    requests.put(timer.TimerRequest("fails", "a", time.time() - 1))
    requests.put(timer.TimerRequest("early", "a", time.time() + 1000))
    server.start()
    assert {server.reaped.get(timeout=HANG), server.reaped.get(timeout=HANG)} == {"late", "fails"}
    server._stop_signaled = True
    server._watchdog_thread.join(HANG)
    assert list(server.timers) == [("early", "a")]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "fifo")


@pytest.fixture
def events():
    return queue.Queue()


@pytest.fixture
def server(path, events):
    server = timer.FileTimerServer(path, "run", log_event=lambda name, request: events.put((name, request)))
    server.start()
    yield server
    server.stop()
    assert not os.path.lexists(path)
    assert not [thread for thread in threading.enumerate() if thread.name == "FileTimerServer"]


def next_of(events, name):
    while (event := events.get(timeout=HANG))[0] != name:
        pass
    return event[1]


def test_the_timer_client_of_torch_is_served(server, path, events, torch_programs):
    client = torch_programs.run(textwrap.dedent(TORCH_CLIENT), path)
    assert client.returncode == -signal.SIGTERM
    request = next_of(events, "kill worker process")
    assert (request.worker_pid, request.scope_id, request.signal) == (int(client.stdout), "inner", 15)


def test_records_of_other_processes_and_junk_are_refused(server, path, events, caplog):
    victim = subprocess.Popen(["sleep", "1000"])
    record = timer.FileTimerRequest
    with open(path, "w") as fifo, caplog.at_level(logging.WARNING):
        fifo.write("junk\n" * 1000 + "x" * 10_000 + "\n")
        # Use SIGCONT, which does no harm if a record is accepted by mistake.
        strangers = (os.getpid(), os.getppid(), -victim.pid)
        fifo.writelines(record(pid, "a", 1.0, signal.SIGCONT).to_json() + "\n" for pid in strangers)
        fifo.write('{"version": 1, "pid"' + record(victim.pid, "told", 1.0, 0).to_json() + "\n")
    # The first accepted record is the timer without a signal.
    assert next_of(events, "timer expired").scope_id == "told"
    assert victim.poll() is None
    says(caplog.text, "refused", "not a timer")
    says(caplog.text, "refused", "descendant")
    assert len(caplog.records) <= 4
    with open(path, "w") as fifo:
        fifo.write(record(victim.pid, "kill", 1.0, 9).to_json() + "\n")
    assert victim.wait(HANG) == -signal.SIGKILL


def test_a_fifo_that_other_users_may_read_is_an_error_and_is_kept(path):
    os.mkfifo(path)
    os.chmod(path, 0o640)
    with pytest.raises(FileExistsError):
        timer.FileTimerServer(path, "run")
    assert os.path.exists(path)
    os.chmod(path, 0o600)
    timer.FileTimerServer(path, "run").stop()
    assert not os.path.exists(path)


def test_an_unused_server_stops_at_once_and_removes_its_fifo(path, events):
    server = timer.FileTimerServer(path, "run", max_interval=1000)
    server.start()
    server.stop()
    server.stop()
    assert not os.path.lexists(path)
    other = timer.FileTimerServer(path, "run")
    with pytest.raises(OSError, match="another timer"):
        timer.FileTimerServer(path, "run")
    other.stop()


def test_run_once_handles_all_waiting_records(path):
    server = timer.FileTimerServer(path, "run")
    server.start()
    client = timer.FileTimerClient(path)
    child = subprocess.Popen(["sleep", "1000"])
    client._send_request(timer.FileTimerRequest(child.pid, "a", time.time() + 1000, 9))
    server.run_once()
    assert list(server._timers) == [(child.pid, "a")]
    assert server._request_count == 1
    child.kill()
    child.wait()
