"""Stop of the other ranks when a rank raises an exception. The launcher does not wait until that rank has
exited.
"""

import json
import re
import sys

import pytest

pytestmark = pytest.mark.beyond_torchrun

WAITS = """
    import atexit, os, signal, sys
    def stopped(*_):
        print("STOPPED", flush=True)
        with open("fifo", "w"):
            os._exit(0)
    def flush():
        with open("fifo") as file:
            file.read()
        print("FLUSHED", flush=True)
    # Rank 1 fails when rank 0 handles SIGTERM, and exits when rank 0 has got it.
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, stopped)
        os.mkfifo("partial")
        os.rename("partial", "fifo")
        while True:
            signal.pause()
    while not os.path.exists("fifo"):
        signal.sigtimedwait([], 0.01)
    atexit.register(flush)
"""


@pytest.mark.parametrize(
    ("ends", "raised", "told"),
    [
        ("raise ValueError('no such batch')", "ValueError.*", [r"exitcode +: 1 ", "no such batch"]),
        ("sys.exit(7)", "SystemExit", [r"exitcode +: 7 "]),
        ("sys.exit('bad lr')", "SystemExit", ["SystemExit: bad lr"]),
    ],
)
def test_the_siblings_are_stopped_while_the_rank_that_raised_may_finish(
    launch, worker_script, ends, raised, told
):
    limits = ("--exit-timeout=60", "--shutdown-timeout=3000")
    launched = launch("--nproc-per-node=2", *limits, worker_script(f"{WAITS}    {ends}\n")).exits(1)
    assert launched.stdout.split() == ["STOPPED", "FLUSHED"]
    begin, _, report = launched.stderr.partition("Root Cause")
    assert re.search(f"rank 1 .* raised {raised}; stopping the other rank", begin)
    for text in (r"rank +: 1\b", *told):
        assert re.search(text, report)


def test_ranks_that_raise_at_the_same_time_fail_with_an_exception(launch, worker_script):
    script = worker_script("""
        import os
        raise ValueError("rank " + os.environ["RANK"])
    """)
    launched = launch("--nproc-per-node=2", script).exits(1)
    report = launched.stderr.partition("Root Cause")[2]
    assert re.search("ValueError: rank [01]", report)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups need Python 3.11")
def test_the_same_member_of_a_group_is_named_everywhere(launch, worker_script, tmp_path):
    script = worker_script("""
        import os, signal
        from elasticrs.errors import NonRetryable
        class BadConfig(NonRetryable): pass
        if os.environ["RANK"] == "1":
            members = [ValueError("b"), KeyError("a"), BadConfig("lr"), ConnectionResetError()]
            raise ExceptionGroup("several", members)
        signal.pause()
    """)
    report = tmp_path / "report.json"
    launched = launch("--nproc-per-node=2", f"--report={report}", "--max-restarts=2", script).exits(1)
    assert re.search("rank 1 .* raised BadConfig", launched.stderr)
    document = json.loads(report.read_text())
    assert document["verdict"] == "permanent"
    assert re.search(r"BadConfig: lr \(\S+:\d+\), and 3 more", document["headline"])
    assert re.search("BadConfig: lr", launched.stderr.splitlines()[-1])


def test_a_rank_that_raised_and_exits_with_0_has_failed(launch, worker_script):
    script = worker_script("""
        import atexit, os, signal
        if os.environ["RANK"] == "1":
            atexit.register(os._exit, 0)
            raise ValueError("no such batch")
        while True:
            signal.pause()
    """)
    launched = launch("--nproc-per-node=2", script).exits(1)
    assert "no such batch" in launched.stderr.partition("Root Cause")[2]


def test_an_exception_in_a_child_that_the_worker_handles_stops_nobody(launch, worker_script, tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text("raise ValueError('handled')\n")
    script = worker_script(f"""
        import os, subprocess, sys
        from elasticrs._engine.workers.plan import hook_environment
        argv = [sys.executable, {str(failing)!r}]
        assert subprocess.run(argv, env=hook_environment(os.environ)).returncode == 1
        print("WENT ON")
    """)
    launched = launch("--nproc-per-node=2", script).exits(0)
    assert launched.stdout.count("WENT ON") == 2


def test_a_warm_worker_runs_the_callbacks_of_preloaded_modules_before_it_leaves(
    launch, worker_script, tmp_path
):
    (tmp_path / "own_library.py").write_text(
        "import atexit, os\natexit.register(lambda: os.write(1, b'OF THE MODULE\\n'))\n"
        "class Holder:\n    def __del__(self, write=os.write): write(1, b'TORN DOWN\\n')\n"
    )
    script = worker_script("""
        import atexit, own_library
        holder = own_library.Holder()
        atexit.register(print, "OF THE SCRIPT", flush=True)
        raise ValueError
    """)
    launched = launch("--warm=own_library", script, env={"PYTHONPATH": str(tmp_path)}).exits(1)
    assert launched.stdout.splitlines() == ["OF THE SCRIPT", "OF THE MODULE"]
    assert "cold" not in launched.stderr


SLOW = """
    import atexit, os, signal
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1" and life == "0":
        atexit.register(signal.sigtimedwait, [], 0.3)
        raise EOFError
    if life == "0" and "REPLACES" not in os.environ:
        signal.pause()
"""


def since(line):
    """Return the duration in a line, in seconds. The line contains a text such as ``, 14.3 ms after`` or
    ``in 14.3 ms``.
    """
    number, unit = re.search(r"(?:, |in )([\d.]+) (ms|s)\b", line).groups()
    return float(number) / (1000 if unit == "ms" else 1)


def run_slow(launch, worker_script, tmp_path, *options, **env):
    """Run a job whose rank 1 raises an exception and exits 0.3 s later. Return its messages and events."""
    events = tmp_path / "events"
    known = ("--nproc-per-node=2", "--max-restarts=1", f"--event-log-handler=file:{events}")
    launched = launch(*known, *options, worker_script(SLOW), env=env).exits(0)
    return launched.stderr, [json.loads(line) for line in events.read_text().splitlines()]


def test_a_restart_is_timed_from_the_exception(launch, worker_script, tmp_path):
    told, events = run_slow(launch, worker_script, tmp_path)
    (line,) = re.findall(".*attempt 1 is running.*", told)
    assert since(line) >= 0.3
    (running,) = [each["metadata"] for each in events if each["name"] == "attempt running"]
    assert json.loads(running["metadata"])["phases_ms"]["exiting"] >= 300
    assert running["duration_ms"] >= 300


def test_a_replacement_is_timed_from_the_exception(launch, worker_script, tmp_path):
    told, events = run_slow(launch, worker_script, tmp_path, "--on-failure=replace", REPLACES="1")
    (line,) = re.findall(".*replaced by pid.*", told)
    assert since(line) >= 0.3
    times = {
        state: max(each["timestamp"] for each in events if each["name"].endswith(f".{state}"))
        for state in ("FAILED", "START")
    }
    assert times["START"] - times["FAILED"] >= 300
