"""The stacks of a worker that computes are asked for again and again, and the worker survives."""

import json
import os
import subprocess
import sys

import pytest
from helpers.procs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = 10_000

BUSY = """
import sys, threading
from elasticrs._engine.inside.flight import answer_with_record

def work(depth):
    # Calls, exceptions and generators make and drop frames all the time.
    try:
        return sum(work(depth - 1) for _ in range(2)) if depth else 1 // 0
    except ZeroDivisionError:
        return 1

sys.setswitchinterval(0.0001)  # for more switches between the threads, and answers within the test's time
answer_with_record()
threading.Thread(target=lambda: [work(6) for _ in iter(int, 1)], daemon=True).start()
print("UP", flush=True)
while True:
    work(6)
"""


def opens(requests):
    """Ask for a stack. Return false while the thread is still busy with an earlier request."""
    try:
        os.close(os.open(requests, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_ten_thousand_requests_do_not_kill_a_busy_worker(tmp_path):
    error_file, record = tmp_path / "error.json", tmp_path / "error.json.flight"
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}
    worker = subprocess.Popen([sys.executable, "-c", BUSY], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "UP\n"
        functions = set()
        for _ in range(REQUESTS):
            record.unlink(missing_ok=True)
            wait_until(lambda: opens(f"{error_file}.flight_requests") or worker.poll() is not None)
            wait_until(lambda: record.exists() or worker.poll() is not None)
            assert worker.poll() is None
            header = json.loads(record.read_text().splitlines()[0])
            functions.update(function for _, _, function in header["stack"])
        assert functions >= {"work", "<module>"}
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
