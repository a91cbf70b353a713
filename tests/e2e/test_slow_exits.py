"""Slow exits of workers. The agent waits while an exit makes progress, and reports an exit that it cuts
short.
"""

import json
import re
import signal
import textwrap

import pytest

pytestmark = pytest.mark.beyond_torchrun

SAVES = {
    "writes": """
        for _ in range(30):
            select.select([], [], [], 0.1)
            with open(os.environ["RANK"] + ".partial", "a") as file:
                file.write("x")
    """,
    "computes": """
        for _ in range(30):
            # A third of the time is enough to count as progress.
            select.select([], [], [], 0.06)
            end = time.process_time() + 0.03
            while time.process_time() < end:
                sum(range(10000))
    """,
    "child": """
        subprocess.run(["/bin/sh", "-c", "for i in $(seq 30); do sleep 0.1; echo $i >> child; done"])
    """,
}
"""Code that a rank runs during its exit. It takes several times as long as ``--exit-timeout``."""

PROGRAM = """
    import atexit, os, select, signal, subprocess, time
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    reader, writer = os.pipe()
    def save():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        exec({save!r})
        with open(f"saved.{{rank}}", "w") as file:
            file.write("whole")
    def lose_peer(*_):
        raise ConnectionError("the peer is gone")
    if attempt == 0:
        if rank == {saves}:
            atexit.register(save)
        {body}
    os.write(1, b"DONE\\n")
"""
RAISES = """
        if rank == 1:
            raise {error}("no such batch")
        os.read(reader, 1)
"""
SURVIVES = """
        if rank == 0:
            signal.signal(signal.SIGTERM, lose_peer)
            open("here", "w").close()
            os.read(reader, 1)
        while not os.path.exists("here"):
            select.select([], [], [], 0.01)
        os._exit(3)
"""


def program(body, saves, save, error="ValueError"):
    source = PROGRAM.replace("{body}", body.strip().replace("{error}", error))
    return source.format(saves=saves, save=textwrap.dedent(save))


@pytest.mark.parametrize(
    ("how", "error", "told"),
    [
        *[(how, "ValueError", "raised ValueError; stopping") for how in SAVES],
        # A connection error may be caused by the failure of another rank, so the other ranks are not stopped
        # immediately.
        ("writes", "ConnectionError", "still exiting; stopping"),
    ],
)
def test_a_rank_that_raised_may_exit_slowly_while_it_makes_progress(
    launch, worker_script, tmp_path, how, error, told
):
    script = worker_script(program(RAISES, 1, SAVES[how], error))
    launched = launch("--nproc-per-node=2", "--exit-timeout=1", script).exits(1)
    assert (tmp_path / "saved.1").read_text() == "whole"
    assert re.search(told, launched.stderr)
    report = launched.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in report
    assert "exitcode  : 1 " in report
    assert f"{error}: no such batch" in report
    assert "hung" not in launched.stderr
    assert "rank 0 (SIGTERM)" in launched.stderr


@pytest.mark.parametrize("how", SAVES)
def test_a_stopped_rank_that_raised_may_save_while_it_makes_progress(launch, worker_script, tmp_path, how):
    script = worker_script(program(SURVIVES, 0, SAVES[how]))
    launched = launch("--nproc-per-node=2", "--exit-timeout=1", "--max-restarts=1", script).exits(0)
    assert (tmp_path / "saved.0").read_text() == "whole"
    assert launched.stdout.count("DONE\n") == 2
    assert "killed" not in launched.stderr


def test_a_restart_does_not_wait_for_a_stopped_rank_that_raised_and_stalls(launch, worker_script, tmp_path):
    script = worker_script(program(SURVIVES, 0, "os.read(reader, 1)"))
    # If the restart waited for this --shutdown-timeout, the test would time out.
    options = ("--exit-timeout=2", "--shutdown-timeout=3000", "--max-restarts=1")
    launched = launch("--nproc-per-node=2", *options, script).exits(0)
    assert launched.stdout.count("DONE\n") == 2
    assert re.search(r"\brank 0\b.*no progress", launched.stderr)
    assert not (tmp_path / "saved.0").exists()


def messages_of_kills(events):
    recorded = [json.loads(text) for text in events.read_text().splitlines()]
    killed = [event for event in recorded if event["name"] == "kill worker process"]
    return [json.loads(event["metadata"]["metadata"])["message"] for event in killed]


@pytest.mark.parametrize("on_failure", ["restart", "replace"])
def test_a_slow_exit_beyond_the_shutdown_timeout_is_not_reported_as_stalled(
    launch, worker_script, tmp_path, on_failure
):
    save = """
        while True:
            select.select([], [], [], 0.05)
            with open("partial", "a") as file:
                file.write("x")
    """
    script = worker_script(program(RAISES, 1, save))
    events = tmp_path / "events"
    options = ("--exit-timeout=1", "--shutdown-timeout=2", f"--event-log-handler=file:{events}")
    launched = launch("--nproc-per-node=2", f"--on-failure={on_failure}", *options, script).exits(1)
    assert re.search(r"\brank 1\b.*still exiting 2 s .*--exit-timeout", launched.stderr)
    assert "no progress" not in launched.stderr
    assert "after SIGTERM and" not in launched.stderr
    assert ["still exiting" in message for message in messages_of_kills(events)] == [True]


def test_workers_killed_after_the_shutdown_timeout_are_reported(launch, worker_script, tmp_path):
    script = worker_script("""
        import os, signal
        reader, writer = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.read(reader, 1))
        os.write(1, b"HERE\\n")
        while True:
            os.read(reader, 1)
    """)
    events = tmp_path / "events"
    options = ("--nproc-per-node=2", "--shutdown-timeout=1", f"--event-log-handler=file:{events}")
    launched = launch(*options, script)
    launched.wait_for_lines("HERE", 2)
    launched.signal(signal.SIGTERM)
    assert launched.wait() != 0
    assert re.search(r"ranks 0, 1 .*\b1 s after SIGTERM\b", launched.stderr)
    assert "(--shutdown-timeout)" in launched.stderr
    assert ["1 s after SIGTERM" in message for message in messages_of_kills(events)] == [True, True]
