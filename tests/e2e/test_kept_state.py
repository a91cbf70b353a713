"""What the agent does with the state that workers keep: it chooses a step, and tells workers and user."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import ports
from helpers.http_client import get, get_json, port_of
from helpers.nodes import meeting
from helpers.procs import reap_adopted, wait_until
from helpers.schema import schemas

pytestmark = pytest.mark.beyond_torchrun

(STATUS,) = schemas("metrics.md")

KEEPS = """
    import json, os, signal, socket, sys, zlib
    from elasticrs._engine.inside.keep import layout
    from elasticrs._engine.inside.keep.file import KeepFile
    from elasticrs._engine.inside.keep.layout import Head, Slot

    names = "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"
    rank, world, attempt = (int(os.environ[name]) for name in names)
    plan = KeepFile(os.environ[layout.VARIABLE]).plan()
    path = os.environ[layout.VARIABLE].partition(":")[2]
    fd = os.open(path, os.O_RDWR)
    told = {"rank": rank, "told": os.environ.get("ELASTICRS_KEEP_FRAMEWORKS")}
    os.write(1, f"PLAN {json.dumps({**plan, **told})}\\n".encode())
    ring, slots = layout.REGIONS_AT, [layout.REGIONS_AT + 4096, layout.REGIONS_AT + 12288]
    os.ftruncate(fd, layout.REGIONS_AT + 20480)

    def put(at, **words):
        names = Slot if at else Head
        for name, value in words.items():
            os.pwrite(fd, layout.pack([value]), at + 8 * getattr(names, name))

    def join(ended, restored=plan["step"], **more):
        table = [ring, 4096, slots[0], 8192, slots[1], 8192]
        os.pwrite(fd, layout.pack(table), 8 * Head.TABLE)
        put(0, RANK=rank + 1, WORLD=world, ENDED=ended + 1, ATTEMPT=plan["attempt"], MODE=1, **more)
        put(0, RESTORED=0 if restored is None else restored + 1, PID=os.getpid())

    def keep(slot, step, why=1):
        who = {"ATTEMPT": plan["attempt"], "RANK": rank, "WORLD": world}
        put(slots[slot], MAGIC=layout.SLOT_MAGIC, STEP=step, WHY=why, STATE=2, **who)

    def small(step):
        data = b"small state of step %d" % step
        at = ring + layout.record_at(layout.record_number(step, True), 4096)
        os.pwrite(fd, layout.pack([step + 1, len(data), zlib.crc32(data)]) + data, at)
"""


@pytest.fixture
def run(launch, worker_script):
    """Run a job whose workers write into their files as ``Keep`` does. Return it and the plans by attempt."""

    def start(body, *options, nproc=2, arguments=()):
        options = (f"--nproc-per-node={nproc}", "--max-restarts=5", *options)
        job = launch(*options, worker_script(KEEPS + body), *arguments).exits(0)
        plans = {}
        for line in re.findall(r"(?m)^PLAN (.*)$", job.stdout):
            plan = json.loads(line)
            plans.setdefault(plan["attempt"] - 1, {})[plan["rank"]] = plan
        return job, plans

    return start


WAYS = {
    "alone": (),
    "static": ("--master-port=0",),
    "c10d": ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
}
"""Options for the ways in which a job can be on one node."""

DIES = """
    if attempt == 0:
        join(ended=12)
        small(12)
        if rank == 0:
            keep(1, 12)
            os.close(os.open(sys.argv[1], os.O_WRONLY))
            signal.pause()
        os.close(os.open(sys.argv[1], os.O_RDONLY))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_the_workers_go_on_from_the_copy_of_a_survivor(run, options, tmp_path):
    os.mkfifo(kept := tmp_path / "kept")
    job, plans = run(DIES, *options, arguments=[kept])
    first, second = plans[0], plans[1]
    assert {plan["step"] for plan in first.values()} == {None}
    assert {plan["off"] for plan in first.values()} == {None}
    assert first[0]["memory"] > 1 << 20
    for rank, plan in second.items():
        assert (plan["step"], plan["exact"], plan["lost"], plan["at_death"]) == (12, True, 0, True)
        assert (plan["large"]["rank"], plan["large"]["slot"]) == (0, 1)
        assert plan["large"]["file"] == plan["files"][0]
        assert plan["own"] == (1 if rank == 0 else None)
    assert "attempt 1 is running, " in job.stderr
    assert (
        "keep: the job can continue at step 12, copied at the failure by 1 of 2 ranks, 0 steps lost"
        in job.stderr
    )


ORDERED = """
    if attempt == 0 and rank == 0:
        orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        orders.bind("")
        agent = chr(0) + os.environ["ELASTICRS_NOTICES"]
        orders.sendto(f"keep joined {orders.getsockname()[1:].hex()} 250".encode(), agent)
        join(ended=7)
        os.close(os.open(sys.argv[1], os.O_WRONLY))
        assert orders.recv(64) == b"keep"
        keep(0, 7)
        orders.sendto(b"keep answered", agent)
        signal.pause()
    if attempt == 0:
        os.close(os.open(sys.argv[1], os.O_RDONLY))
        join(ended=7)
        small(7)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_survivors_are_asked_to_keep_their_state_before_they_are_stopped(run, tmp_path):
    os.mkfifo(joined := tmp_path / "joined")
    events = tmp_path / "events"
    job, plans = run(ORDERED, f"--event-log-handler=file:{events}", arguments=[joined])
    assert plans[1][1]["step"] == 7
    assert "can continue at step 7, copied at the failure by 1 of 2 ranks, 0 steps lost\n" in job.stderr
    found = [json.loads(each) for each in events.read_text().splitlines()]
    told = {each["name"]: each["metadata"] for each in found}
    kept, began = told["state kept"], json.loads(told["attempt running"]["metadata"])
    phases = list(began["phases_ms"])
    assert phases.index("keeping") + 1 == phases.index("stopping")
    assert kept["duration_ms"] > 0
    about = json.loads(kept["metadata"])
    assert (about["asked"], about["answered"]) == ([0], [0])
    assert {name: began["kept"][name] for name in ("step", "lost", "kept_by")} == {
        "step": 7, "lost": 0, "kept_by": [0]
    }  # fmt: skip


def test_without_a_grace_nobody_is_asked(run, tmp_path):
    os.mkfifo(joined := tmp_path / "joined")
    job, plans = run(ORDERED, "--keep-grace=0", arguments=[joined])
    assert plans[1][1]["step"] is None
    assert "keeping" not in job.stderr


def test_a_program_that_keeps_nothing_gets_no_word_about_it(run):
    job, plans = run("    if attempt == 0: raise SystemExit(3)")
    assert (plans[1][0]["step"], plans[1][0]["why"]) == (None, "")
    assert "kept" not in job.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("ended=3", "step 3 was not copied"),
        ("ended=3, ANSWER=4", "step 3 was not copied: memory was short (rank 0)"),
        ("ended=-1", "the failure came before the end of the first step"),
        ("ended=-1, CHANGES=2", "the script had not called keep.step"),
        ("ended=3, REASON_LENGTH=6", "step 3 was not copied: a?b c\ufffd (rank 0)"),
        ("ended=-1, REASON_LENGTH=1 << 60", "Keep was off: a?b c\ufffd"),
    ],
)
def test_the_line_says_why_nothing_is_kept(run, words, why):
    text = 'os.pwrite(fd, b"a\\nb c\\xff", layout.REASON_AT)'
    job, plans = run(f"    join({words}); {text}\n    if attempt == 0: raise SystemExit(3)", nproc=1)
    assert plans[1][0]["step"] is None
    assert f"without kept state ({why}" in job.stderr
    assert plans[1][0]["why"] in job.stderr


LOOPS = """
    if attempt == 0:
        join(ended=50)
        keep(0, 40, why=0); keep(1, 50)
        os.kill(os.getpid(), signal.SIGKILL)
    join(ended=-1 if attempt == 2 else 51)
    if attempt < 3:
        raise ValueError("bad state")
"""


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_restored_state_that_fails_twice_is_set_aside(run, options):
    job, plans = run(LOOPS, *options, nproc=1)
    found = [(plans[attempt][0]["step"], plans[attempt][0].get("lost")) for attempt in range(4)]
    # The last but one attempt failed before it had ended a step after the restored one.
    assert found == [(None, None), (50, 0), (50, 1), (40, 10)]
    assert "can continue at step 40" in job.stderr
    assert "steps from 50 on are set aside" in job.stderr


REFUSES = """
    if attempt == 0:
        join(ended=50)
        keep(0, 40, why=0); keep(1, 50)
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 1:
        join(ended=-1, restored=None, REFUSED=51)
        raise ValueError("another loader")
    join(ended=41)
"""


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_after_a_state_that_cannot_be_loaded_an_older_one_is_tried(run, options):
    _, plans = run(REFUSES, *options, nproc=1)
    found = [(plans[attempt][0]["step"], plans[attempt][0].get("lost")) for attempt in range(3)]
    assert found == [(None, None), (50, 0), (40, 10)]


STANDS = """
    join(ended=7 + attempt, COPIES=3, BLOCKED_NS=5)
    small(7)
    keep(0, 7)
    os.write(1, f"here {os.getpid()} {attempt}.\\n".encode())
    signal.pause()
"""


def test_the_status_page_and_the_report_tell_what_is_kept(launch, worker_script):
    job = launch("--health-check-port=0", "--max-restarts=1", worker_script(KEEPS + STANDS))
    port = port_of(job)

    def status_in(attempt):
        pid = int(job.wait_for_line(rf"here (\d+) {attempt}\.")[1])
        status = wait_until(lambda: get_json(port, "/status")[1], lambda status: status["kept"])
        STATUS.validate(status)
        page = get(port, "/metrics")[2]
        assert 'name="ended_step"' in page
        assert f'elasticrs_worker_step{{rank="0",local_rank="0"}} {7 + attempt}\n' in page
        os.kill(pid, signal.SIGKILL)
        return status

    first, second = status_in(0), status_in(1)
    job.exits(1)
    assert {name: first["kept"][name] for name in ("step", "ended_step", "copies", "blocked_seconds")} == {
        "step": 7, "ended_step": 7, "copies": 3, "blocked_seconds": 5e-9
    }  # fmt: skip
    assert first["continued"] is None
    assert (second["continued"]["step"], second["continued"]["lost"]) == (7, 0)
    assert second["kept"]["ended_step"] == 8
    progress = [status["workers"][0]["progress"] for status in (first, second)]
    assert [(each["step"], each["counts"], each["age_seconds"]) for each in progress] == [
        (7, "keep", None), (8, "keep", None)
    ]  # fmt: skip
    lost = "1 step lost (step 8 was not copied)) has ended with the job"
    assert f"step 7, copied at the failure by 1 of 1 ranks, {lost} (--keep-save" in job.stderr


PROGRESSES = """
    join(ended=10 * min(attempt, 4))
    if attempt < 7:
        raise ValueError("again")
"""


def test_steps_of_workers_that_keep_their_state_are_progress(launch, worker_script):
    script = worker_script(KEEPS + PROGRESSES)
    job = launch("--max-restarts=9", script).exits(1)
    assert "the same ValueError at worker.py" in job.stderr
    assert "in step 40, 3 times without progress" in job.stderr
    assert "6 of 9 restarts charged" in job.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--on-failure=replace",), "replace"),
        (("--keep-memory=0",), "--keep-memory"),
    ],
    ids=["replace", "no memory"],
)
def test_the_plan_says_why_nothing_can_be_kept(run, options, reason):
    _, plans = run("", *options, nproc=1)
    assert reason in plans[0][0]["off"]
    assert plans[0][0]["memory"] == 0


def test_a_failed_job_of_several_nodes_says_which_step_is_gone(launch, worker_script):
    options = "--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"
    body = "    join(ended=7); keep(0, 6); keep(1, int(sys.argv[1])); sys.exit(int(sys.argv[1]))"
    script = worker_script(KEEPS + body)
    job = launch(*options, "--rdzv-conf=last_call_timeout=0", script, "7").exits(1)
    assert "keep: the copy of step 7 has ended with the job" in job.stderr
    job = launch(*options, "--rdzv-conf=last_call_timeout=0", script, "0").exits(0)
    assert "has ended with the job" not in job.stderr


@pytest.mark.parametrize(
    ("state", "options", "others"),
    [
        ("MODE=1", (), "the other nodes keep theirs"),
        ("MODE=2", (), "no other node has its part of the state, because --keep-peers is 0"),
        (
            "MODE=2, SECURED=7",
            ("--keep-peers=1", "--keep-grace=4"),
            "no other node got a second one within --keep-grace (4 s), so the job goes on from step 6",
        ),
        ("MODE=2, SECURED=8", ("--keep-peers=1",), "another node has a second one"),
    ],
    ids=["replicated", "sharded", "too late", "with partners"],
)
def test_a_node_that_leaves_does_not_tell_the_end_of_the_job(launch, worker_script, state, options, others):
    port = ports.free()
    body = f'    join(ended=7); keep(0, 6); keep(1, 7); put(0, {state}); os.write(1, b"KEPT\\n")\n'
    script = worker_script(KEEPS + body + "    signal.pause()\n")
    agents = [launch(*meeting("2", port), *options, script) for _ in range(2)]
    for agent in agents:
        agent.wait_for_line("KEPT")
    stays, leaves = sorted(agents, key=lambda agent: not ports.listens(agent.pid, port))
    leaves.signal(signal.SIGTERM)
    assert leaves.wait() == 1
    gone = "keep: the copy of step 7 here is deleted, because the node leaves the job\n"
    assert gone in leaves.stderr
    assert f": keep: {others}\n" in leaves.stderr
    stays.signal(signal.SIGTERM)
    assert stays.wait() == 1


SAVED = """
    if len(sys.argv) > 1:
        join(ended=int(sys.argv[5]), CHECK_STEP=3, CHECK_DIGEST=int(sys.argv[2]) + rank * int(sys.argv[3]))
        put(0, MODE=0)
        small(12)
        put(slots[1], SEQUENCE=5, DATA_AT=layout.HEAD_SIZE, DATA_LENGTH=64)
        keep(1, 12)
        os.pwrite(fd, b"state of rank %d" % rank, slots[1] + layout.HEAD_SIZE)
        os.close(os.open(sys.argv[1], os.O_WRONLY if rank else os.O_RDONLY))
        if sys.argv[4] == "fail" and rank == 0:
            os._exit(9)
        os.write(1, b"KEPT\\n")
        signal.pause()
"""


@pytest.fixture
def saving(launch, worker_script, tmp_path):
    """Run a job of two workers that keep step 12, and that ends without success. Return the job."""

    def start(how, *options, is_sharded=False, ended=12):
        os.mkfifo(kept := tmp_path / "kept")
        arguments = (kept, "5", str(int(is_sharded)), how, str(ended))
        return launch("--nproc-per-node=2", *options, worker_script(KEEPS + SAVED), *arguments)

    return start


def test_a_job_that_is_stopped_says_which_step_is_gone(saving):
    job = saving("stop")
    job.wait_for_line("KEPT")
    job.wait_for_line("KEPT")
    job.signal(signal.SIGTERM)
    job.wait()
    assert "keep: the copy of step 12 has ended with the job" in job.stderr


def plans_after(run, *options, nproc=2):
    _, plans = run("", *options, nproc=nproc)
    return plans[0]


def saved_by(job, how, folder):
    """Wait until the job has failed, or stop it. Return the folder with the state that it has saved."""
    if how == "stop":
        job.wait_for_line("KEPT")
        job.wait_for_line("KEPT")
        job.signal(signal.SIGTERM)
    job.wait()
    (saved,) = folder.iterdir()
    return saved


@pytest.mark.parametrize("how", ["fail", "stop"])
def test_steps_after_the_saved_one_are_counted_as_lost(run, saving, tmp_path, how):
    folder = tmp_path / "saved"
    job = saving(how, f"--keep-save={folder}", ended=199)
    saved = saved_by(job, how, folder)
    assert f"step 12 is saved for the next job with --keep-save, 187 steps lost: {saved}\n" in job.stderr
    # In the second attempt of the next job, no copy is in memory either.
    fails = "join(ended=212 if attempt else 202); sys.exit(1 - attempt)"
    later, plans = run(f"    {fails}\n", f"--keep-save={folder}")
    lost = [{plan["lost"] for plan in plans[attempt].values()} for attempt in (0, 1)]
    assert lost == [{187}, {190}]
    assert f"saved in {saved}, 190 steps lost" in later.stderr


@pytest.mark.parametrize("how", ["fail", "stop"])
def test_state_of_a_job_that_ends_without_success_is_saved_for_the_next_one(run, saving, tmp_path, how):
    folder = tmp_path / "saved"
    job = saving(how, f"--keep-save={folder}")
    saved = saved_by(job, how, folder)
    assert re.search(
        rf"step 12 is saved for the next job with --keep-save(, \d+ steps lost)?: {saved}\n", job.stderr
    )
    assert (") is saved in" in job.stderr) == (how == "fail")
    for rank, plan in plans_after(run, f"--keep-save={folder}").items():
        assert (plan["step"], plan["exact"], plan["folder"]) == (12, True, str(saved))
        # The state is replicated, so one copy serves all.
        mark, _, path = plan["large"]["file"].partition(":")
        assert Path(path) == saved / "rank0"
        assert (plan["large"]["slot"], plan["large"]["sequence"], plan["own"]) == (1, 5, 1)
        assert plan["home"] == f"{mark}:{saved / f'rank{rank}'}"
    # The second job has succeeded, so the third one repeats steps, and says so.
    later, plans = run("", f"--keep-save={folder}", nproc=3)
    assert [(plan["step"], plan["behind"]) for plan in plans[0].values()] == [(12, [2])] * 3
    assert later.stderr.count("keep: a job has succeeded after step 12 was saved") == 1
    assert later.stderr.count(f"use another folder than {folder}\n") == 1
    has_data = [b"state of rank" in (saved / f"rank{rank}").read_bytes() for rank in (0, 1)]
    assert has_data == [True, False]
    (saved / "rank0").write_bytes((saved / "rank0").read_bytes()[:70000])
    job, plans = run("", f"--keep-save={folder}")
    assert plans[0][0]["step"] is None
    assert f"{saved} has no complete copy of step 12" in job.stderr


def test_two_jobs_do_not_use_the_same_folder_at_the_same_time(run, saving, tmp_path):
    folder = tmp_path / "saved"
    saving("fail", f"--keep-save={folder}").wait()
    (tmp_path / "kept").unlink()
    first = saving("stop", f"--keep-save={folder}")
    first.wait_for_line("KEPT")
    job, plans = run("", f"--keep-save={folder}")
    assert plans[0][0]["step"] is None
    (line,) = (each for each in job.stderr.splitlines() if "is in use" in each)
    assert "the folder is in use (the job " in line
    assert line.endswith(f": {folder}")
    assert str(first.pid) in line
    first.signal(signal.SIGKILL)  # The process ends, so the kernel removes its lock of the folder.
    first.wait()
    reap_adopted()
    assert {plan["step"] for plan in plans_after(run, f"--keep-save={folder}").values()} == {12}
    assert [each.name for each in folder.iterdir()] == ["kept-000001"]


def test_sharded_state_is_saved_for_a_reader_with_any_number_of_ranks(run, saving, tmp_path):
    folder = tmp_path / "saved"
    saving("fail", f"--keep-save={folder}", is_sharded=True).wait()
    plans = plans_after(run, f"--keep-save={folder}")
    assert [plans[rank]["large"]["rank"] for rank in (0, 1)] == [0, 1]
    for rank in (0, 1):
        assert b"state of rank %d" % rank in Path(plans[rank]["home"].partition(":")[2]).read_bytes()
    for plan in plans_after(run, f"--keep-save={folder}", nproc=3).values():
        assert plan["step"] is None
        assert "2 ranks saved step 12, now there are 3" in plan["why"]
        assert plan["reader"]["step"] == 12
        copies = plan["reader"]["copies"]
        assert [Path(place.partition(":")[2]).name for place, *_ in copies] == ["rank0", "rank1"]


def test_saved_state_that_makes_two_attempts_fail_alike_is_set_aside(run, saving, tmp_path):
    folder = tmp_path / "saved"
    saving("fail", f"--keep-save={folder}").wait()
    fails = """
    if attempt < 2:
        join(ended=13)
        raise ValueError("nan")
"""
    job, plans = run(fails, f"--keep-save={folder}", "--max-same-failures=0")
    # One rank may be stopped before it has shown its plan.
    steps = [{plan["step"] for plan in plans[attempt].values()} for attempt in (0, 1, 2)]
    assert steps == [{12}, {12}, {None}]
    assert "keep: saved step 12 is set aside" in job.stderr


def test_job_whose_state_cannot_be_saved_ends_as_usual(saving, launch, worker_script, tmp_path):
    (tmp_path / "file").write_text("")
    job = saving("fail", f"--keep-save={tmp_path / 'file' / 'below'}", "--exit-codes=worker")
    assert job.wait() == 9
    early, is_told, late = job.stderr.partition("step 12 is not saved: ")
    assert is_told
    assert f"cannot save anything: Not a directory: {tmp_path / 'file' / 'below'}\n" in early
    assert "has ended with the job" in late
    assert "--keep-save FOLDER" not in job.stderr
    job = launch(f"--keep-save={tmp_path / 'unused'}", worker_script("raise SystemExit(9)"))
    job.exits(1)
    assert (
        f"nothing is saved (no worker has kept its state with elasticrs.Keep): {tmp_path / 'unused'}"
        in job.stderr
    )


def test_options_reach_the_workers(run, monkeypatch):
    monkeypatch.setenv("ELASTICRS_KEEP_FRAMEWORKS", "1")
    _, without = run("", nproc=1)
    _, given = run("", "--keep", "--keep-memory=6M", "--keep-grace=3")
    names = "frameworks", "told", "memory", "grace"
    assert [without[0][0][name] for name in names[:2]] == [False, None]
    assert {tuple(plan[name] for name in names) for plan in given[0].values()} == {(True, "1", 3 << 20, 3)}


MAPS = """
    import mmap
    view = mmap.mmap(fd, 4096)
    os.write(1, f"FILE {path} {os.fstat(fd).st_ino}\\n".encode())
    signal.pause()
"""


def uses(pid, inode):
    """Return true if a process has a file open, or has mapped it."""
    for link in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # It has just been closed.
            path = f"/proc/{pid}/fd/{link}"
            if os.stat(path).st_ino == inode and "/memfd:elasticrs-keep" in os.readlink(path):
                return True
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any("/memfd:elasticrs-keep" in line and f" {inode} " in line for line in lines)


def holders(inode):
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # It has just exited.
            found |= {int(pid)} if uses(pid, inode) else set()
    return found


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_kept_state_is_left_when_the_agent_has_ended(launch, worker_script, signum):
    job = launch("--shutdown-timeout=1", worker_script(KEEPS + MAPS))
    line = job.wait_for_line(r"FILE (/proc/(\d+)/fd/\d+) (\d+)$")
    inode = int(line[3])
    assert int(line[2]) == job.pid
    assert {job.pid} < holders(inode)
    job.signal(signum)
    job.wait()
    reap_adopted()
    assert holders(inode) == set()
