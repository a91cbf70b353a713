"""Ranks that hang under ``--hang-timeout``: who is found, what is kept of it, and what is no hang."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import ports
from helpers.procs import reap_adopted, wait_gone, wait_readable

import elasticrs

MEET = """
    import os, select
    from elasticrs.timer import heartbeat
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # Who begins well before the others would wait for them for longer than the limit.
    here = [f"here.{attempt}.{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    open(here[rank], "w").close()
    while not all(map(os.path.exists, here)):
        select.select([], [], [], 0.01)
"""
"""Nobody is watched before it gives its first heartbeat: all do that when all are there."""

TRAINING = f"""{MEET}
    import ctypes, signal, sys, time
    reader, writer = os.pipe()
    def wait_for_peers():
        os.read(reader, 1)
    heartbeat(1203)
    heartbeat(1204)
    if attempt == 0 and rank != 1:
        heartbeat(1205)
        wait_for_peers()
"""

HANGS = {
    "sleep": "from time import sleep; sleep(1000)",
    "loop": "while True: pass",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    # The GIL is held by a lock that is never let go of, in C.
    "gil": """
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex), lock(mutex)
    """,
}


def training(hang):
    body = textwrap.indent(textwrap.dedent(hang).strip(), " " * 8)
    return f"{TRAINING}    if attempt == 0 and rank == 1:\n{body}\n    os.write(1, b'DONE\\n'), os._exit(0)\n"


def evidence(logs, attempt, local_rank):
    (path,) = Path(logs).glob(f"*/attempt_{attempt}/{local_rank}/hang.txt")
    return path.read_text()


@pytest.mark.parametrize("how", HANGS)
def test_a_rank_that_hangs_is_found_and_the_group_restarts(launch, worker_script, tmp_path, how):
    script = worker_script(training(HANGS[how]))
    options = ("--nproc-per-node=3", "--hang-timeout=1", "--max-restarts=1", f"--log-dir={tmp_path / 'logs'}")
    launched = launch(*options, script).exits(0)
    assert launched.stdout.count("DONE\n") == 3
    line = r"rank 1 \(pid \d+\): hung: no heartbeat for [\d.]+ s \(limit 1 s[^)]*\); stopped at step 1,204.*"
    found = re.search(line + r"1 step behind them.*restarting\D* 0 of 1\b", launched.stderr)
    assert found, launched.stderr
    assert "ranks 0, 2 in wait_for_peers (worker.py:" in found[0]
    where = "it is stopped by a signal" if how == "stopped" else "it is in <module> (worker.py:"
    assert where in found[0]
    for rank in (0, 2):
        assert "in wait_for_peers" in evidence(tmp_path / "logs", 0, rank)
    kept = evidence(tmp_path / "logs", 0, 1)
    assert f"state {'T' if how == 'stopped' else ''}" in kept
    assert ("Current thread" in kept) == (how != "stopped")
    # What was asked for is no crash.
    assert not list((tmp_path / "logs").glob("*/attempt_0/*/error.json.fault"))


def test_the_report_has_the_stack_and_the_last_heartbeats(launch, worker_script):
    script = worker_script(training("def read_batch(): os.read(reader, 1)\nread_batch()"))
    launched = launch("--nproc-per-node=3", "--hang-timeout=1", script).exits(1)
    assert re.search(r"traceback : hung: no heartbeat for [\d.]+ s", launched.stderr), launched.stderr
    assert re.search(r'    File ".*worker.py", line \d+ in read_batch$', launched.stderr, re.M)
    assert re.search(r"last heartbeat of rank 1: in step 1,204 [\d.]+ s before the failure", launched.stderr)
    assert re.search(r"last heartbeat of ranks 0, 2: in step 1,205", launched.stderr)
    assert re.search(r"  hang      : .*/attempt_0/1/hang.txt$", launched.stderr, re.M)
    assert "rank      : 1 (local_rank: 1)" in launched.stderr


LEAVES = {"done": "sys.exit(0)", "fails": "sys.exit(3)", "crashes": "os.kill(os.getpid(), signal.SIGSEGV)"}


@pytest.mark.parametrize("how", LEAVES)
def test_a_worker_that_leaves_on_the_question_for_its_stacks_has_hung_all_the_same(
    launch, worker_script, tmp_path, how
):
    script = worker_script(f"""
        import os, signal, sys
        from elasticrs.timer import heartbeat
        question = [signal.SIGRTMIN + 12]
        signal.pthread_sigmask(signal.SIG_BLOCK, question)
        heartbeat(7)
        signal.sigwait(question)
        {LEAVES[how]}
    """)
    logs = tmp_path / "logs"
    launched = launch("--nproc-per-node=2", "--hang-timeout=1", f"--log-dir={logs}", script).exits(1)
    assert re.search(r"hung: no heartbeat for [\d.]+ s \(limit 1 s\); stopped at step 7", launched.stderr)
    # The stacks of a crash are no answer, and stay where the report looks for them.
    faults = [path.read_text() for path in logs.glob("*/attempt_0/*/error.json.fault")]
    assert any("Fatal Python error" in text for text in faults) == (how == "crashes")


def test_a_worker_that_goes_on_while_it_is_looked_at_has_not_hung(launch, worker_script):
    script = worker_script("""
        import os, signal
        from elasticrs.timer import heartbeat
        question = [signal.SIGRTMIN + 12]
        signal.pthread_sigmask(signal.SIG_BLOCK, question)
        heartbeat(7)
        # The question for its stacks ends its wait.
        signal.sigwait(question)
        with heartbeat.section("the rest", limit=None):
            os.write(1, b"WENT ON\\n")
            os.read(0, 1)
            os._exit(0)
    """)
    reader, writer = os.pipe()
    launched = launch("--nproc-per-node=1", "--hang-timeout=0.5", script, stdin=reader)
    os.close(reader)
    launched.wait_for_line("WENT ON")
    # The evidence takes 1.2 seconds, as it does not answer.
    assert not wait_readable(launched.pidfd, 2)
    os.close(writer)
    launched.exits(0)
    assert "hung" not in launched.stderr


def test_after_a_verdict_of_nobody_the_next_look_comes_at_its_time(launch, worker_script):
    # The check of every five seconds would find it, too: one question in each of its intervals.
    script = worker_script("""
        import os, signal, time
        from elasticrs.timer import heartbeat
        question = [signal.SIGRTMIN + 12]
        signal.pthread_sigmask(signal.SIG_BLOCK, question)
        stacks = os.environ["TORCHELASTIC_ERROR_FILE"] + ".fault"
        heartbeat(0)
        asked = []
        for step in range(1, 6):
            signal.sigwait(question)
            asked.append(time.monotonic())
            heartbeat(step)
            with open(stacks, "a") as file:
                print("Current thread 0x1 (most recent call first):", file=file)
        gaps = [later - earlier for earlier, later in zip(asked, asked[1:])]
        os.write(1, b"IN TIME\\n" if min(gaps[1:]) < 4 else f"{gaps}\\n".encode())
    """)
    launched = launch("--nproc-per-node=1", "--hang-timeout=0.3", script).exits(0)
    assert launched.stdout == "IN TIME\n"


def test_a_handler_of_the_workers_own_costs_the_stacks_only(launch, worker_script, tmp_path):
    script = worker_script(
        training("signal.signal(signal.SIGRTMIN + 12, lambda *_: None)\nwhile True: os.read(reader, 1)")
    )
    logs = tmp_path / "logs"
    launched = launch("--nproc-per-node=3", "--hang-timeout=1", f"--log-dir={logs}", script).exits(1)
    assert "1 step behind them" in launched.stderr
    assert "no Python stacks" in evidence(logs, 0, 1)


def test_a_program_below_the_worker_is_asked(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        from elasticrs.timer import heartbeat
        pipe = os.pipe()
        def deep(): os.read(pipe[0], 1)
        heartbeat()
        deep()
    """)
    logs = tmp_path / "logs"
    argv = ("--no-python", "bash", "-c", f"{sys.executable} {script}; true")
    launched = launch("--nproc-per-node=1", "--hang-timeout=1", f"--log-dir={logs}", *argv).exits(1)
    assert "it is in deep (worker.py:" in launched.stderr, launched.stderr
    assert re.search(r"the program below it: pid \d+", evidence(logs, 0, 0))


SPY = """
    echo "spied with $*"
    echo 'Thread 7 (idle): "MainThread"'
    echo "    all_reduce (/data/train.py:41)"
"""
SPIES = {
    "answers": SPY,
    # Evidence does not keep the job: it is ended after two seconds.
    "hangs": f"{SPY}\nexec sleep 1000",
}


def interpreter_with_py_spy(folder, body):
    """An interpreter in a folder of its own: a ``py-spy`` beside it comes before all others."""
    python = folder / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    spy = folder / "py-spy"
    spy.write_text(f"#!/bin/sh\n{body}\n")
    spy.chmod(0o755)
    packages = str(Path(elasticrs.__file__).parent.parent)
    argv = (python, "-m", "elasticrs.launch")
    path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
    return {"argv": argv, "env": {"ELASTICRS_TRACEBACKS": "0", "PYTHONPATH": packages, "PATH": path}}


@pytest.mark.parametrize("how", SPIES)
def test_who_has_no_handler_is_looked_into_by_py_spy(launch, worker_script, tmp_path, how):
    spied = interpreter_with_py_spy(tmp_path, SPIES[how])
    script = worker_script("""
        import os
        from elasticrs.timer import heartbeat
        pipe = os.pipe()
        heartbeat()
        os.read(pipe[0], 1)
    """)
    logs = tmp_path / "logs"
    launched = launch("--nproc-per-node=1", "--hang-timeout=0.5", f"--log-dir={logs}", script, **spied).exits(
        1
    )
    assert "hung: no heartbeat" in launched.stderr
    assert re.search(r"^spied with dump --full-filenames --pid \d+$", evidence(logs, 0, 0), re.M)
    assert "it is in all_reduce (train.py:41)" in launched.stderr
    assert re.search(r'    File "/data/train.py", line 41 in all_reduce$', launched.stderr, re.M)


@pytest.fixture(scope="session")
def py_spy():
    """The real one, where it may look into a process that is no child of its own."""
    folder = os.path.dirname(sys.executable)
    program = shutil.which("py-spy", path=os.pathsep.join([folder, os.environ.get("PATH", os.defpath)]))
    if program is None:
        pytest.skip("needs py-spy")
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    looked = subprocess.run([program, "dump", "--pid", str(child.pid)], capture_output=True, check=False)
    child.communicate(b"\n")
    if looked.returncode != 0:
        pytest.skip(f"py-spy may not look into processes here: {looked.stderr.decode().splitlines()[:1]}")


@pytest.mark.parametrize("how", ["sleep", "stopped"])
@pytest.mark.usefixtures("py_spy")
def test_the_real_py_spy_names_the_place(launch, worker_script, tmp_path, how):
    # The hung rank does not answer: its handler is Python's, or it is stopped.
    body = "signal.signal(signal.SIGRTMIN + 12, lambda *_: None)\nclass Loader:\n    def read_batch(self):\n"
    script = worker_script(training(body + textwrap.indent(HANGS[how], " " * 8) + "\nLoader().read_batch()"))
    logs = tmp_path / "logs"
    launched = launch("--nproc-per-node=3", "--hang-timeout=1", f"--log-dir={logs}", script).exits(1)
    assert "no Python stacks" in evidence(logs, 0, 1)
    state = "stopped by a signal in" if how == "stopped" else "in"
    assert f"it is {state} read_batch (worker.py:" in launched.stderr, launched.stderr
    assert "ranks 0, 2 in wait_for_peers (worker.py:" in launched.stderr
    frame = re.escape(f'File "{script}", line ')
    assert re.search(rf"where it was.*\n +{frame}\d+ in (Loader\.)?read_batch$", launched.stderr, re.M)


@pytest.mark.parametrize("limit", ["1e-9", "1e-300"])
def test_a_limit_of_nearly_nothing_does_not_occupy_the_agent(launch, worker_script, limit):
    script = worker_script("import os; os.write(1, b'UP\\n')")
    launched = launch("--nproc-per-node=1", f"--hang-timeout={limit}", script).exits(0)
    assert launched.stdout == "UP\n"


@pytest.mark.parametrize("what", ["error.json.fault", "hang.txt"])
def test_a_fifo_in_the_place_of_a_file_costs_that_file_only(launch, worker_script, tmp_path, what):
    script = worker_script(f"""{textwrap.indent(MEET, "    ")}
        pipe = os.pipe()
        folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
        heartbeat(0)
        if os.environ["RANK"] == "0":
            path = os.path.join(folder, {what!r})
            if os.path.exists(path):
                os.unlink(path)
            os.mkfifo(path)
            heartbeat(1)
        os.read(pipe[0], 1)
    """)
    logs = tmp_path / "logs"
    launched = launch("--nproc-per-node=2", "--hang-timeout=1", f"--log-dir={logs}", script).exits(1)
    assert "rank      : 1 (local_rank: 1)" in launched.stderr
    assert "it is in <module> (worker.py:" in launched.stderr, "the evidence of the other rank is there"
    assert "Current thread" in evidence(logs, 0, 1)
    assert ("evidence of a hang could not be written" in launched.stderr) == (what == "hang.txt")


def test_py_spy_does_not_outlive_an_agent_that_is_killed(launch, worker_script, tmp_path):
    told = tmp_path / "told"
    os.mkfifo(told)
    spied = interpreter_with_py_spy(tmp_path, f"echo $$ > {told}; exec sleep 1000")
    script = worker_script("""
        import os
        from elasticrs.timer import heartbeat
        pipe = os.pipe()
        heartbeat()
        os.read(pipe[0], 1)
    """)
    launched = launch("--nproc-per-node=1", "--hang-timeout=0.5", script, **spied)
    pid = int(told.read_text())
    launched.signal(signal.SIGKILL)
    launched.exits(-signal.SIGKILL)
    assert wait_gone(pid), "it died with the agent"
    reap_adopted()


def test_a_section_has_its_own_limit(launch, worker_script):
    script = worker_script("""
        import os
        from elasticrs.timer import heartbeat
        pipe = os.pipe()
        with heartbeat.section("evaluation", limit=None):
            with heartbeat.section("checkpoint", limit=0.5):
                os.read(pipe[0], 1)
    """)
    launched = launch("--nproc-per-node=1", "--hang-timeout=1", script).exits(1)
    assert re.search(
        r"hung: no end of its section 'checkpoint' for [\d.]+ s \(limit 0.5 s\)", launched.stderr
    )
    assert "last heartbeat of rank 0: in section 'checkpoint'" in launched.stderr


EXITS = {
    "atexit": "import atexit; atexit.register(upload)",
    "thread": "import threading; threading.Thread(target=upload).start()",
    "pool": """
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor().submit(upload)
    """,
}
TRAINED = """
    import os, select
    from elasticrs.timer import heartbeat
    pipe = os.pipe()
    def upload():
        # Much longer than a step may take.
        select.select({waits_for}, [], [], 3)
        os.write(1, b"UPLOADED\\n")
    {hold}
    heartbeat(7)
"""


@pytest.mark.parametrize("how", EXITS)
def test_a_slow_exit_after_the_program_has_returned_is_no_hang(launch, worker_script, how):
    hold = textwrap.indent(textwrap.dedent(EXITS[how]), " " * 4)
    script = worker_script(TRAINED.format(waits_for=[], hold=f"\n{hold}"))
    launched = launch("--nproc-per-node=2", "--hang-timeout=1", script).exits(0)
    assert launched.stdout.count("UPLOADED\n") == 2
    assert re.search(r"still exiting 1 s after the program returned.*1800 s", launched.stderr)


def test_an_exit_that_exceeds_its_own_limit_is_a_hang(launch, worker_script):
    hold = textwrap.indent(textwrap.dedent(EXITS["atexit"]), " " * 4)
    body = TRAINED.format(waits_for="pipe[:1]", hold=f"\n{hold}")
    script = worker_script(body.replace("[], [], 3)", "[], [])"))
    options = ("--nproc-per-node=1", "--hang-timeout=60", "--hang-exit-timeout=1")
    launched = launch(*options, script).exits(1)
    assert re.search(r"hung: its program had returned.*\(limit 1 s\); stopped at step 7", launched.stderr)
    assert "in upload" in launched.stderr


def test_a_section_without_a_limit_and_a_worker_without_heartbeats_are_left_alone(launch, worker_script):
    script = worker_script("""
        import os
        from elasticrs.timer import heartbeat
        if os.environ["RANK"] == "0":
            with heartbeat.section("evaluation", limit=None):
                os.read(0, 1)
                os._exit(0)
        else:
            os.read(0, 1)
    """)
    reader, writer = os.pipe()
    launched = launch("--nproc-per-node=2", "--hang-timeout=0.2", script, stdin=reader)
    os.close(reader)
    # Several limits long.
    assert not wait_readable(launched.pidfd, 1.5)
    os.write(writer, b"xx")
    launched.exits(0)
    os.close(writer)


def test_a_start_has_a_limit_when_it_is_given_one(launch, worker_script):
    script = worker_script("""
        import os
        from elasticrs.timer import heartbeat
        pipe = os.pipe()
        with heartbeat.section("all of it", limit=None) if os.environ["RANK"] == "0" else open(os.devnull):
            os.read(pipe[0], 1)
    """)
    launched = launch("--nproc-per-node=2", "--hang-timeout=60", "--hang-startup-timeout=3", script).exits(1)
    assert "rank      : 1 (local_rank: 1)" in launched.stderr
    assert re.search(r"hung: no activity since its start for [\d.]+ s \(limit 3 s\)", launched.stderr)


WITHOUT_AN_END = {"a line": "one line\\n", "a bar": "\\r 20%|###", "a prompt": "step 2 ..."}


@pytest.mark.parametrize("what", WITHOUT_AN_END)
def test_without_heartbeats_the_silence_of_all_followed_ranks_counts(launch, worker_script, what):
    script = worker_script(f"""
        import os
        pipe = os.pipe()
        print("{WITHOUT_AN_END[what]}", end="", flush=True)
        os.read(pipe[0], 1)
    """)
    launched = launch("--nproc-per-node=2", "--hang-timeout=0.5", "--tee=1", script).exits(1)
    assert re.search(r"hung: no rank has written a line for [\d.]+ s \(limit 0.5 s\)", launched.stderr)


def test_a_stopped_agent_finds_nobody_hung(launch, worker_script):
    script = worker_script("""
        import os, threading
        from elasticrs.timer import heartbeat
        heartbeat()
        over = threading.Event()
        threading.Thread(target=lambda: os.read(0, 1) and over.set()).start()
        os.write(1, b"UP\\n")
        while not over.wait(0.05):
            heartbeat()
            os.write(1, b"ALIVE\\n")
    """)
    reader, writer = os.pipe()
    launched = launch("--nproc-per-node=1", "--hang-timeout=2", script, stdin=reader)
    os.close(reader)
    launched.wait_for_line("UP")
    launched.signal(signal.SIGSTOP)
    # For longer than the limit.
    launched.wait_for_lines("ALIVE", 46)
    launched.signal(signal.SIGCONT)
    launched.wait_for_lines("ALIVE", 56)
    os.write(writer, b"x")
    launched.exits(0)
    os.close(writer)


def test_a_suspended_job_has_nobody_who_hangs(launch, worker_script):
    script = worker_script("""
        import os, select
        from elasticrs.timer import heartbeat
        heartbeat()
        os.write(1, b"UP\\n")
        while not select.select([0], [], [], 0.05)[0]:
            heartbeat()
    """)
    reader, writer = os.pipe()
    launched = launch("--nproc-per-node=1", "--hang-timeout=2", script, stdin=reader)
    os.close(reader)
    launched.wait_for_line("UP")
    launched.signal(signal.SIGTSTP)
    launched.wait_stopped()
    assert not wait_readable(launched.pidfd, 2.3)
    launched.signal(signal.SIGCONT)
    assert not wait_readable(launched.pidfd, 0.5)
    os.close(writer)
    launched.exits(0)


def test_a_limit_is_learned_from_the_steps(launch, worker_script):
    script = worker_script(f"""{MEET}
    pipe = os.pipe()
    for step in range(20):
        heartbeat(step)
    if attempt == 0:
        if rank != 1:
            heartbeat(20)
        os.read(pipe[0], 1)
    os.write(1, b"DONE\\n")
    os._exit(0)
    """)
    options = ("--nproc-per-node=2", "--hang-timeout=auto:0.5", "--max-restarts=1")
    launched = launch(*options, script).exits(0)
    assert launched.stdout.count("DONE\n") == 2
    # Twenty steps of microseconds: the floor is the limit.
    line = r"rank 1 .*hung: no heartbeat for [\d.]+ s \(limit 0\.5 s\); stopped at step 19"
    assert re.search(line, launched.stderr), launched.stderr


@pytest.mark.slow
def test_a_rank_that_is_missing_in_a_collective_of_torch_is_named(launch, worker_script):
    script = worker_script("""
        import os
        import torch
        import torch.distributed as dist
        from elasticrs.timer import heartbeat
        pipe = os.pipe()
        def next_batch():
            os.read(pipe[0], 1)
        dist.init_process_group("gloo")
        again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        gradient = torch.ones(1000)
        for step in range(20):
            heartbeat(step)
            if step == 12 and dist.get_rank() == 2 and not again:
                next_batch()
            dist.all_reduce(gradient)
        os.write(1, b"DONE\\n")
        dist.barrier()
        os._exit(0)
    """)
    launched = launch("--nproc-per-node=4", "--hang-timeout=2", "--max-restarts=1", script).exits(
        0, timeout=120
    )
    assert launched.stdout.count("DONE\n") == 4
    text = r"rank 2 .*hung: .*stopped at step 12.*it is in next_batch .*, ranks 0, 1, 3 in all_reduce \("
    assert re.search(text, launched.stderr), launched.stderr


@pytest.mark.slow
def test_a_hang_on_one_of_two_nodes_restarts_both(launch, worker_script):
    script = worker_script("""
        import os, select
        from elasticrs.timer import heartbeat
        heartbeat(7)
        again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        pipe = os.pipe()
        if not again and os.environ["GROUP_RANK"] == "1":
            os.read(pipe[0], 1)
        while not again:
            heartbeat()
            select.select([pipe[0]], [], [], 0.1)
        os.write(1, b"DONE\\n")
    """)
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{ports.free()}", "--rdzv-id=job")
    options = ("--nnodes=2", "--nproc-per-node=1", *meeting, "--max-restarts=1", "--hang-timeout=3")
    nodes = [launch(*options, script) for _ in range(2)]
    for node in nodes:
        assert node.wait(60) == 0, node.stderr
    assert "".join(node.stdout for node in nodes).count("DONE\n") == 2
    told = [node.stderr for node in nodes if "hung: no heartbeat" in node.stderr]
    assert told, [node.stderr for node in nodes]
    assert re.search(r"hung: no heartbeat for .*stopped at step 7; it is in <module>", told[0])
    assert all("(restart 1 of 1)" in node.stderr for node in nodes)
