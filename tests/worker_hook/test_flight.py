"""Tests for the thread that writes a worker's flight record, in real processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from helpers.procs import HANG, reap_adopted, wait_gone, wait_until

from elasticrs._engine.inside import flight
from elasticrs._engine.supervise.hang_diagnosis import look_for_late
from elasticrs._engine.workers.plan import hook_environment

# A fake of torch's modules, whose flight record has more entries than the worker keeps.
TORCH = """
    import json, os, sys, types
    c10d = types.ModuleType("torch._C._distributed_c10d")
    entries = [{"record_id": number} for number in range(500)]
    c10d._dump_fr_trace_json = lambda **options: json.dumps({"version": "2.10", "entries": entries}).encode()
    sys.modules[c10d.__name__] = c10d
    c10d_of_python = types.ModuleType("torch.distributed.distributed_c10d")
    members = {1: {1: 1, 0: 0}, 2: {5: 0}}
    c10d_of_python._world = types.SimpleNamespace(pg_names={1: "0", 2: "dp"}, pg_group_ranks=members)
    sys.modules[c10d_of_python.__name__] = c10d_of_python
"""

START = "from elasticrs._engine.inside.flight import answer_with_record; answer_with_record()"
UP = "print('UP', flush=True)"
REST = "sys.stdin.read()"


@pytest.fixture
def error_file(tmp_path):
    return tmp_path / "error.json"


@pytest.fixture
def worker(error_file):
    """Return a function that starts a worker with the given source and waits until the worker has written a
    line.
    """
    started = []

    def start(*source, **env):
        whole = {
            **os.environ,
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "ELASTICRS_HEARTBEAT": "9:9:9",
            **env,
        }
        text = "\n".join(map(textwrap.dedent, source))
        process = subprocess.Popen(
            [sys.executable, "-c", text], env=whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        process.said = process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def request(error_file):
    """Request the flight record as the agent does, and return its lines."""
    record = error_file.with_name("error.json.flight")
    record.unlink(missing_ok=True)
    wait_until(lambda: opens(error_file))
    wait_until(record.exists)
    return [json.loads(line) for line in record.read_text().splitlines()]


def opens(error_file):
    """Send a request for the flight record. Return false if no thread waits for requests."""
    try:
        descriptor = os.open(f"{error_file}.flight_requests", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    os.close(descriptor)
    return True


def test_each_request_gets_the_newest_entries_the_groups_and_the_stack(worker, error_file):
    # The record contains the stack of the main thread, although another thread writes the record.
    wait = f"import threading\ndef wait_here():\n    {UP}\n    {REST}\nwait_here()"
    process = worker(TORCH, START, wait)
    for _ in range(3):
        header, record = request(error_file)
        assert (header["is_waiting"], header["groups"]) == (True, {"0": [0, 1], "dp": [5]})
        assert [function for _, _, function in header["stack"]] == ["wait_here", "<module>"]
        numbers = [entry["record_id"] for entry in record["entries"]]
        assert numbers == list(range(500 - flight.MAX_ENTRIES, 500))
    output, _ = process.communicate("")
    assert (process.returncode, output) == (0, "")


CALLS = """
    call = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "is_p2p": False}
    entries = [{**call, "collective_seq_id": at, "op_id": at, "time_created_ns": at} for at in range(5000)]
"""


@pytest.mark.parametrize(
    ("calls", "size", "recorders"),
    [(CALLS, "2000", {0: True}), (CALLS, "0", {0: False}), ("", "2000", {})],
    ids=["on", "off", "damaged"],
)
def test_a_search_for_late_ranks_knows_whether_torch_records_their_calls(
    worker, error_file, calls, size, recorders
):
    worker(TORCH, calls, START, UP, REST, TORCH_FR_BUFFER_SIZE=size)
    paths = SimpleNamespace(error_files={0: str(error_file)})
    attempt = SimpleNamespace(paths=paths, exits={}, global_ranks=lambda: {0: 0})
    wait_until(lambda: opens(error_file))
    look = wait_until(lambda: look_for_late(attempt, HANG), lambda look: look.recorders == recorders)
    assert look.late == {}
    if recorders == {0: True}:
        header, _ = request(error_file)
        assert [row[2] for row in header["arrivals"]] == list(range(5000 - flight.MAX_ARRIVALS, 5000))


@pytest.mark.parametrize(
    ("error", "start", "is_kept"),
    [
        ("ConnectionResetError", START, True),
        ("ValueError", START, False),
        ("ConnectionResetError", "", False),
    ],
)
def test_a_worker_that_has_lost_a_peer_writes_its_record_itself(worker, error_file, error, start, is_kept):
    process = worker(TORCH, start, UP, f"raise {error}", **hook_environment({}))
    process.communicate("")
    kept = error_file.with_name("error.json.flight_at_exit")
    assert kept.exists() is is_kept
    if is_kept:
        header, _ = map(json.loads, kept.read_text().splitlines())
        assert header["groups"] == {"0": [0, 1], "dp": [5]}
        # The record of an earlier process of this rank is of no use.
        worker(START, UP)
        assert not kept.exists()


@pytest.mark.parametrize(
    ("state", "retired", "is_waiting"),
    [
        ("completed", False, False),
        ("scheduled", True, False),
        ("scheduled", False, True),
        ("started", False, True),
    ],
)
def test_the_record_says_whether_a_collective_is_pending(worker, error_file, state, retired, is_waiting):
    entries = f"[{{'state': 'completed', 'retired': True}}, {{'state': {state!r}, 'retired': {retired}}}]"
    source = TORCH.replace('[{"record_id": number} for number in range(500)]', entries)
    process = worker(source, START, UP, REST)
    header, _ = request(error_file)
    assert header["is_waiting"] == is_waiting
    process.communicate("")


@pytest.mark.parametrize(
    ("source", "env", "reason"),
    [
        ("import sys", {}, "no_torch"),
        (TORCH + "    del c10d._dump_fr_trace_json", {}, "off"),
        (TORCH, {"TORCH_FR_BUFFER_SIZE": "0"}, "off"),
        (TORCH + "    c10d._dump_fr_trace_json = lambda **options: 1 / 0", {}, "damaged"),
        (TORCH + "    c10d._dump_fr_trace_json = lambda **options: '[]'", {}, "damaged"),
        (TORCH + "    del c10d_of_python._world", {}, "damaged"),
    ],
)
def test_a_worker_without_a_flight_record_reports_the_reason(worker, error_file, source, env, reason):
    process = worker(source, START, UP, REST, **env)
    (header,) = request(error_file)
    assert header["no_record"] == reason
    assert [function for _, _, function in header["stack"]] == ["<module>"]
    process.communicate("")
    assert process.returncode == 0


@pytest.mark.parametrize(
    "env", [{"ELASTICRS_TRACEBACKS": "0"}, {"TORCHELASTIC_ERROR_FILE": ""}], ids=["off", "no agent"]
)
def test_no_thread_is_started_if_nobody_can_ask(worker, error_file, env):
    threads = "print(len(os.listdir('/proc/self/task')), flush=True)"
    process = worker("import os, sys", START, threads, REST, **env)
    assert process.said == "1\n"
    assert not os.path.exists(f"{error_file}.flight_requests")


def test_no_fifo_is_created_next_to_a_device(worker):
    worker("import sys", START, UP, REST, TORCHELASTIC_ERROR_FILE="/dev/null")
    assert not os.path.exists("/dev/null.flight_requests")


def test_the_waiting_thread_holds_no_descriptor(worker, error_file):
    process = worker(TORCH, START, START, UP, REST)
    request(error_file)
    wait_until(lambda: sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"])
    assert len(os.listdir(f"/proc/{process.pid}/task")) == 2


def test_a_forked_child_does_not_answer_for_its_parent(worker, error_file):
    fork = """
        child = os.fork()
        if child:
            print(child, flush=True)
            os.wait()
        sys.stdin.read()
    """
    process = worker("import os, sys", START, fork)
    wait_until(lambda: opens(error_file))
    process.kill()
    process.wait()
    assert os.path.exists(f"/proc/{process.said.strip()}")
    assert not opens(error_file)
    process.stdin.close()
    assert wait_gone(int(process.said))
    reap_adopted()


def test_a_forked_child_that_takes_over_the_heartbeats_answers_requests(worker, error_file):
    # The parent forks when its thread waits for the parent's FIFO. A thread that opened the path later would
    # wait for the FIFO of the child.
    fork = """
        (thread,) = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
        openat = {"x86_64": "257", "aarch64": "56"}[os.uname().machine]
        while open(f"/proc/self/task/{thread}/syscall").read().split()[0] != openat:
            pass
        if os.fork():
            os.wait()
            os._exit(0)
        c10d._dump_fr_trace_json = lambda **options: json.dumps({"entries": [{"record_id": os.getpid()}]})
    """
    process = worker(TORCH, START, fork, START, "print(os.getpid(), flush=True)", REST)
    _, record = request(error_file)
    assert record["entries"] == [{"record_id": int(process.said)}]
    process.stdin.close()
    assert process.wait(HANG) == 0


def test_signals_awaited_by_the_program_are_not_delivered_to_the_flight_thread(worker):
    source = """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
        print("UP", flush=True)
        print(int(signal.sigwait({signal.SIGTERM})), int(signal.sigwait({signal.SIGUSR1})))
    """
    process = worker("import sys", START, source)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert (process.returncode, output) == (0, f"{signal.SIGTERM:d} {signal.SIGUSR1:d}\n")


def test_the_thread_exits_if_its_fifo_is_replaced(worker, error_file):
    """The thread exits if a regular file replaces its FIFO."""
    process = worker(TORCH, START, UP, REST)
    request(error_file)
    requests = error_file.with_name("error.json.flight_requests")
    requests.rename(error_file.with_name("fifo"))
    requests.write_text("")
    error_file.with_name("error.json.flight").unlink()
    # The thread still waits on the renamed FIFO. This request makes it open the path again, which is now a
    # regular file.
    os.close(os.open(error_file.with_name("fifo"), os.O_WRONLY))
    wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/task")) == 1)
    output, _ = process.communicate("")
    assert (process.returncode, output) == (0, "")
