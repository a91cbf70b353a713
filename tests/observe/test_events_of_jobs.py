"""The events of whole jobs, each validated against the documented schema."""

import json
import os
import re
import signal
import sys

import pytest
from helpers.launcher import LAUNCHERS, Launched, clean_environment
from helpers.nodes import meeting
from helpers.packages import install
from helpers.said import says
from helpers.schema import schemas

EVENT, INNER = schemas("events.md")
RUNNING = "attempt running"

FAILS_ONCE = """
    import os, sys
    sys.exit(3 if os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10" else 0)
"""
FAILS_AND_HANGS = """
    import os, signal, sys
    if os.environ["RANK"] == "1":
        raise ValueError("no")
    signal.pause()
"""


def read(lines):
    events = [json.loads(line) for line in lines]
    for event in events:
        EVENT.validate(event)
        INNER.validate(json.loads(event["metadata"]["metadata"]))
    return events


def names(events):
    prefix = "torchelastic.worker.status."
    return [f"{event['source']} {event['name'].removeprefix(prefix)}" for event in events]


def is_ours(event):
    """Return true if torch does not emit this event: a restart, the end of a worker in the attempt before it,
    or the end of a failed job.
    """
    has_ended = event["metadata"]["state"] in ("FAILED", "TERMINATED") and event["source"] == "WORKER"
    is_new = event["name"] in (RUNNING, "job failed")
    return is_new or (has_ended and event["metadata"]["agent_restarts"] == 0)


def of_console(text):
    return [line for line in text.splitlines() if line.startswith('{"name"')]


def test_a_job_that_restarts_and_succeeds_records_the_expected_events(launch, worker_script, tmp_path):
    path = tmp_path / "events.jsonl"
    before = path.parent.stat().st_mtime
    launch(
        *("--nproc-per-node=2", "--max-restarts=1", f"--event-log-handler=file:{path}", "--role=trainer"),
        worker_script(FAILS_ONCE),
    ).exits(0)
    events = read(path.read_text().splitlines())
    (restart,) = (event for event in events if event["name"] == RUNNING)
    phases = json.loads(restart["metadata"]["metadata"])["phases_ms"]
    assert {"stopping", "starting"} <= phases.keys()
    assert restart["metadata"]["duration_ms"] == pytest.approx(sum(phases.values()))
    assert events[events.index(restart) - 1]["name"].endswith(".START")
    events.remove(restart)
    attempt = ["AGENT RENDEZVOUS", "AGENT ASSIGN_WORKER_RANKS", "WORKER START", "WORKER START"]
    ends = ["WORKER SUCCEEDED", "WORKER SUCCEEDED", "AGENT SUCCEEDED"]
    failed = events[4:6]
    # Rank 0 may have exited before it was stopped, so check only the state of rank 1.
    assert names(failed)[1] == "WORKER FAILED"
    assert [event["metadata"]["global_rank"] for event in failed] == [0, 1]
    assert json.loads(failed[1]["metadata"]["metadata"])["exit_code"] == [3]
    assert names([*events[:4], *events[6:]]) == [*attempt, *attempt, *ends]
    assert [event["metadata"]["agent_restarts"] for event in events] == [0] * 6 + [1] * 7
    times = [event["timestamp"] for event in events]
    assert times == sorted(times)
    assert times[0] / 1000 >= before - 1
    assert [event["metadata"]["global_rank"] for event in events[2:4]] == [0, 1]
    assert {event["metadata"]["role"] for event in events} == {"trainer"}


def test_failed_and_stopped_workers_are_recorded_with_their_exit_codes(launch, worker_script):
    job = launch(
        "--nproc-per-node=2", worker_script(FAILS_AND_HANGS), env={"PET_EVENT_LOG_HANDLER": "console"}
    ).exits(1)
    events = read(of_console(job.stderr))
    assert names(events)[4:] == ["WORKER FAILED", "WORKER FAILED", "AGENT SUCCEEDED", "AGENT job failed"]
    last = json.loads(events[-1]["metadata"]["metadata"])
    says(last["message"], "rank 1 of 2: ", "ValueError: no (worker.py:")
    assert (last["verdict"], last["reason"]) == ("failed", None)
    stopped, failed = (event["metadata"] for event in events[4:6])
    assert json.loads(stopped["metadata"])["exit_code"] == [-15]
    inner = json.loads(failed["metadata"])
    assert inner["exit_code"] == [1]
    assert inner["worker_pid"] == [int(failed["worker_id"])]
    assert json.loads(failed["raw_error"])["message"]


def test_a_job_stopped_by_a_signal_is_recorded_as_failed(launch, worker_script):
    job = launch(
        "--event-log-handler=console",
        worker_script("""
            import os, signal
            os.write(1, b"here\\n")
            signal.pause()
        """),
    )
    job.wait_for_line("here")
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    last = read(of_console(job.stderr))[-1]
    assert (last["name"], last["source"]) == ("torchelastic.worker.status.FAILED", "AGENT")
    assert last["metadata"]["raw_error"] == "stopped by SIGTERM"


def test_a_rendezvous_that_fails_after_a_round_is_recorded_as_an_error_of_the_agent(
    launch, worker_script, tmp_path
):
    log, where = tmp_path / "events", meeting()
    script = worker_script("import os, signal; os.write(1, b'RUNS\\n'); signal.pause()")
    settings = "--rdzv-conf=join_timeout=4,is_host="
    kept = launch(*where, f"{settings}1", f"--event-log-handler=file:{log}", script)
    left = launch(*where, f"{settings}0", script)
    for launched in (kept, left):
        launched.wait_for_line("RUNS")
    left.signal(signal.SIGTERM)
    kept.exits(1)
    events = read(log.read_text().splitlines())
    assert names(events)[-2:] == ["AGENT FAILED", "AGENT job failed"]
    reason = json.loads(events[-1]["metadata"]["metadata"])["reason"]
    says(reason, "1 of", "4 s", "join_timeout")
    assert events[-2]["metadata"]["raw_error"] == reason


def test_a_failed_start_of_workers_is_recorded(launch, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    job = launch("--event-log-handler=console", "--no-python", program).exits(1)
    events = read(of_console(job.stderr))
    ends = ["AGENT FAILED", "AGENT job failed"]
    assert names(events) == ["AGENT RENDEZVOUS", "AGENT ASSIGN_WORKER_RANKS", *ends]
    assert "could not execute" in events[-2]["metadata"]["raw_error"]
    last = json.loads(events[-1]["metadata"]["metadata"])
    assert "could not execute" in last["message"]
    assert last["verdict"] == "permanent"


def test_a_worker_that_a_signal_killed_has_a_message(launch, worker_script):
    script = worker_script("import os; os.kill(os.getpid(), 9)")
    events = read(of_console(launch("--event-log-handler=console", script).exits(1).stderr))
    (failed,) = (event["metadata"] for event in events if event["name"].endswith(".FAILED"))
    assert "SIGKILL" in json.loads(failed["raw_error"])["message"]


def test_an_expired_timer_is_recorded(launch, worker_script):
    job = launch(
        "--event-log-handler=console",
        worker_script("""
            import os, signal
            from elasticrs import timer
            timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
            with timer.expires(after=0.01, scope="epoch"):
                while True:
                    signal.pause()
        """),
        env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
    ).exits(1)
    events = read(of_console(job.stderr))
    assert [event["name"] for event in events if "." not in event["name"]] == [
        *("watchdog started", "timer expired", "kill worker process", "watchdog stopped", "job failed")
    ]
    assert names(events)[2:5] == ["AGENT watchdog started", "WORKER START", "AGENT timer expired"]
    ends = ["WORKER FAILED", "AGENT SUCCEEDED", "AGENT job failed"]
    assert names(events)[6:] == ["AGENT watchdog stopped", *ends]
    assert "'epoch'" in json.loads(events[7]["metadata"]["raw_error"])["message"]
    expired = next(event for event in events if event["name"] == "timer expired")
    inner = json.loads(expired["metadata"]["metadata"])
    assert (inner["scope_id"], inner["signal"]) == ("epoch", str(int(signal.SIGKILL)))


def test_a_hung_worker_is_recorded(launch, worker_script):
    job = launch(
        *("--event-log-handler=console", "--hang-timeout=1", "--max-restarts=1"),
        worker_script("""
            import signal
            from elasticrs.timer import heartbeat
            heartbeat(7)
            signal.sigwait([signal.SIGUSR2])
        """),
    ).exits(1)
    events = [event for event in read(of_console(job.stderr)) if event["name"] != RUNNING]
    hang = ["WORKER START", "AGENT worker hung", "AGENT kill worker process"]
    attempt = ["AGENT RENDEZVOUS", "AGENT ASSIGN_WORKER_RANKS", *hang]
    ends = ["WORKER FAILED", "AGENT SUCCEEDED", "AGENT job failed"]
    assert names(events) == [*attempt, "WORKER FAILED", *attempt, *ends]
    told = json.loads(events[-5]["metadata"]["metadata"])
    assert told["worker_pid"] == events[-6]["metadata"]["worker_id"]
    assert "hung: no heartbeat for " in told["message"]
    assert json.loads(events[-3]["metadata"]["raw_error"])["message"] == told["message"]


def test_failure_events_of_a_job_are_synced_to_disk(launch, worker_script, tmp_path):
    program = """
        import os, runpy
        sync = os.fsync
        def told(fd):
            sync(fd)
            os.write(1, b"SYNCED\\n")
        os.fsync = told
        runpy.run_module("elasticrs.launch", run_name="__main__")
    """
    script = worker_script("""
        import signal
        from elasticrs.timer import heartbeat
        heartbeat()
        signal.sigwait([signal.SIGUSR2])
    """)
    job = launch(
        *("--hang-timeout=1", f"--event-log-handler=file:{tmp_path / 'events.jsonl'}", script),
        argv=[sys.executable, worker_script(program, "program.py")],
    ).exits(1)
    assert job.stdout == "SYNCED\n" * 4, "hung, killed, failed, job failed"


HANGING_DISK = """
    import os, runpy
    # As on a network file system whose server has gone.
    os.fsync = lambda fd: os.close(os.open(os.environ["DISK"], os.O_RDONLY))
    runpy.run_module("elasticrs.launch", run_name="__main__")
"""


@pytest.fixture
def hanging_disk(launch, worker_script, tmp_path):
    os.mkfifo(tmp_path / "disk")

    def start(script, *options):
        return launch(
            *(*options, f"--event-log-handler=file:{tmp_path / 'events.jsonl'}", worker_script(script)),
            argv=[sys.executable, worker_script(HANGING_DISK, "program.py")],
            env={"DISK": str(tmp_path / "disk")},
        )

    return start


def test_a_hanging_disk_does_not_delay_a_restart(hanging_disk, tmp_path):
    job = hanging_disk(
        """
        import os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
        # The disk goes on when there is a second attempt.
        os.close(os.open(os.environ["DISK"], os.O_WRONLY))
        """,
        "--max-restarts=1",
    )
    assert job.wait() == 0, job.stderr
    written = names(read((tmp_path / "events.jsonl").read_text().splitlines()))
    assert written[3] == "WORKER FAILED"
    assert written[-2:] == ["WORKER SUCCEEDED", "AGENT SUCCEEDED"]


def test_a_permanently_hanging_disk_does_not_keep_the_agent_from_exiting(hanging_disk, tmp_path):
    job = hanging_disk("import sys; sys.exit(3)", "--nproc-per-node=2")
    assert job.wait() == 1
    assert f"{tmp_path / 'events.jsonl'}: " in job.stderr


def test_an_unread_console_does_not_delay_the_job(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        for _ in range(3):
            os.write(2, b"x" * 65536 if os.environ["RANK"] == "0" else b"")
    """)
    unread = tmp_path / "unread"
    os.mkfifo(unread)
    with open(os.open(unread, os.O_RDWR | os.O_NONBLOCK), "wb", buffering=0) as console:
        while console.write(bytes(4096)) is not None:
            pass
        launch(
            *("--event-log-handler=console", "--redirects=3", "--nproc-per-node=2", script),
            argv=["sh", "-c", 'exec "$@" 2>unread', "sh", *LAUNCHERS["elasticrs"]],
        ).exits(0)


@pytest.fixture
def handled(launch, tmp_path):
    """Run a job whose events go to a handler that an installed package provides."""

    def handled(emit):
        source = f"""
import logging, os
class Handler(logging.Handler):
    def emit(self, record):
        {emit}
"""
        env = install(tmp_path / "site", "mine", source, "elasticrs.event_handlers", mine="Handler")
        return launch("--event-log-handler=mine", "--no-python", "true", env=env).exits(0)

    return handled


def test_an_event_handler_from_a_package_is_used(handled):
    job = handled("os.write(1, b'mine: ' + record.getMessage().encode() + b'\\n')")
    lines = [line.removeprefix("mine: ") for line in job.stdout.splitlines() if line.startswith("mine: ")]
    assert names(read(lines))[-1] == "AGENT SUCCEEDED"


def test_a_failing_event_handler_is_reported_once_and_the_job_continues(handled):
    job = handled("raise RuntimeError('no')")
    assert len(re.findall(r"EventRecorder .*RuntimeError\('no'\)", job.stderr)) == 1


def shape(value):
    """Reduce an event to what its readers rely on: the keys, their order, and the types of the values."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else type(value).__name__


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("body", [FAILS_ONCE, FAILS_AND_HANGS])
def test_event_keys_order_and_types_match_torchrun(worker_script, tmp_path, body):
    told = {}
    options = ["--nproc-per-node=2", "--max-restarts=1", "--event-log-handler=console"]
    for name, command in LAUNCHERS.items():
        job = Launched(
            [*command, *options, worker_script(body)],
            env={**clean_environment(), "TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
            cwd=tmp_path,
        )
        assert job.wait() == (body is FAILS_AND_HANGS)
        told[name] = [json.loads(line) for line in of_console(job.stderr)]
        job.close()
    ours, torchs = [event for event in told["elasticrs"] if not is_ours(event)], told["torchrun"]
    assert names(ours) == names(torchs)
    for mine, reference in zip(ours, torchs, strict=True):
        read([json.dumps(mine)])
        assert list(mine) == list(reference)
        assert list(mine["metadata"]) == list(reference["metadata"])
        for field, value in reference["metadata"].items():
            if value is not None:
                assert shape(mine["metadata"][field]) == shape(value), field
        inner, theirs = (json.loads(event["metadata"]["metadata"]) for event in (mine, reference))
        assert list(inner) == list(theirs)
        assert {name: shape(inner[name]) for name, value in theirs.items() if value is not None} == {
            name: shape(value) for name, value in theirs.items() if value is not None
        }
