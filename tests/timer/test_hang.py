"""Ranks that hang under ``--hang-timeout``: the named rank, its evidence, and pauses that are not hangs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from helpers.launcher import launcher_with_py_spy
from helpers.procs import reap_adopted, wait_gone, wait_readable
from helpers.said import has, line_with, says

MEET = """
    import os, select
    from elasticrs.timer import heartbeat
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # A rank that starts well before the others would wait for them for longer than the limit.
    here = [f"here.{attempt}.{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    open(here[rank], "w").close()
    while not all(map(os.path.exists, here)):
        select.select([], [], [], 0.01)
"""
"""A rank is not watched before its first heartbeat, so no rank sends one before all are there."""

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
    # C code holds the GIL and waits for a lock that is never released.
    "gil": """
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex), lock(mutex)
    """,
}


STUCK = """
    import os
    from elasticrs.timer import heartbeat
    pipe = os.pipe()
    heartbeat()
    os.read(pipe[0], 1)
"""


def training(hang):
    body = textwrap.indent(textwrap.dedent(hang).strip(), " " * 8)
    return f"{TRAINING}    if attempt == 0 and rank == 1:\n{body}\n    os.write(1, b'DONE\\n'), os._exit(0)\n"


@pytest.fixture
def run(launch, worker_script, tmp_path):
    """Return a function that launches workers with this source and this hang timeout."""

    def run(source, limit, *options, nproc=1, **how):
        options = (f"--nproc-per-node={nproc}", f"--hang-timeout={limit}", *options)
        return launch(*options, f"--log-dir={tmp_path / 'logs'}", worker_script(source), **how)

    return run


@pytest.fixture
def evidence(tmp_path):
    """Return a function that reads the evidence of a rank in the first attempt."""

    def read(rank):
        (path,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/hang.txt")
        return path.read_text()

    return read


@pytest.mark.parametrize("how", HANGS)
def test_a_hung_rank_is_named_and_the_group_restarts(run, tmp_path, how, evidence):
    launched = run(training(HANGS[how]), 1, "--max-restarts=1", nproc=3).exits(0)
    assert launched.stdout.count("DONE\n") == 3
    line = line_with(launched.stderr, "rank 1 (pid ", "hung", "limit 1 s", "step 1,204", "1 step behind")
    where = "stopped by" if how == "stopped" else "in <module> (worker.py:"
    says(line, where, "ranks 0, 2 in wait_for_peers (worker.py:", "restarting", "1 of 1")
    for rank in (0, 2):
        assert "in wait_for_peers" in evidence(rank)
    kept = evidence(1)
    assert f"state {'T' if how == 'stopped' else ''}" in kept
    assert ("Current thread" in kept) == (how != "stopped")
    # The stacks that the agent requested are not recorded as a crash.
    assert not list(tmp_path.glob("logs/*/attempt_0/*/error.json.fault"))


def test_the_report_of_a_hang_has_the_stack_and_the_last_heartbeats(run):
    source = training("def read_batch(): os.read(reader, 1)\nread_batch()")
    launched = run(source, 1, nproc=3).exits(1)
    line_with(launched.stderr, "traceback : hung: ", " s")
    assert re.search(r'    File ".*worker.py", line \d+ in read_batch$', launched.stderr, re.M)
    line_with(launched.stderr, "last heartbeat ", "rank 1", "step 1,204")
    line_with(launched.stderr, "last heartbeat ", "ranks 0, 2", "step 1,205")
    assert re.search(r"  hang      : .*/attempt_0/1/hang.txt$", launched.stderr, re.M)
    assert "rank      : 1 (local_rank: 1)" in launched.stderr


# The limit leaves much time for the differences between ranks on a busy machine.
@pytest.mark.parametrize("case", ["together", "behind", "startup", "none"])
def test_no_rank_is_blamed_alone_if_one_has_exited_or_all_stopped_together(run, tmp_path, case):
    leaves = {"none": ""}.get(case, "rank == 2 and os._exit(0)")
    beats = {"startup": "", "behind": "rank == 0 or heartbeat(6)"}.get(case, "heartbeat(5)")
    first = "" if case == "startup" else "heartbeat(5)"
    source = f"{MEET}    {first}\n    {beats}\n    {leaves}\n    os.read(os.pipe()[0], 1)\n"
    limit = ("--hang-startup-timeout=5",) if case == "startup" else ()
    report = tmp_path / "report.json"
    launched = run(source, 5, f"--report=file:{report}", *limit, nproc=3).exits(1)
    left, named = (
        "rank 2 exited with code 0",
        {"behind": "ranks 0, 2", "none": "ranks 0-2"}.get(case, "rank 2"),
    )
    says(launched.stderr, f": undecided, candidates: {named}: {'a rank hangs' if case == 'none' else left}")
    assert f"rank      : undecided, candidates: {named} (local_rank: " in launched.stderr
    assert (f"traceback : {left} at " in launched.stderr) == (case != "none")
    assert ("rank 2 (exited with code 0): in step " in launched.stderr) == (case in ("together", "behind"))
    assert "stopped first" not in launched.stderr
    told = json.loads(report.read_text())
    basis = "heartbeats" if case == "none" else "exit"
    assert (told["root_cause"], told["blamed"]["basis"], told["blamed"]["is_decided"]) == (None, basis, False)


# Not sys.exit, which tells the agent that the program has returned: such a worker is no longer hung.
LEAVES = {"fails": "os._exit(3)", "crashes": "os.kill(os.getpid(), signal.SIGSEGV)"}
UNTIL_EXAMINED = """
    import os, signal, sys
    from elasticrs.timer import heartbeat
    question = [signal.SIGRTMIN + 12]
    signal.pthread_sigmask(signal.SIG_BLOCK, question)
    heartbeat(7)
    signal.sigwait(question)
    {leaves}
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_worker_that_succeeds_while_its_hang_is_examined_has_not_hung(run, nproc):
    launched = run(UNTIL_EXAMINED.format(leaves="sys.exit(0)"), 1, nproc=nproc).exits(0)
    line_with(launched.stderr, "local rank ", "code 0", "succeeded")


@pytest.mark.parametrize("how", LEAVES)
def test_a_worker_that_fails_when_asked_for_its_stacks_counts_as_hung(run, tmp_path, how):
    launched = run(UNTIL_EXAMINED.format(leaves=LEAVES[how]), 1, nproc=2).exits(1)
    says(launched.stderr, "hung", "limit 1 s", "step 7")
    # The stacks of a crash are not mistaken for the requested ones, and stay where the report looks for them.
    faults = [path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/error.json.fault")]
    assert any("Fatal" in text for text in faults) == (how == "crashes")


def test_a_hang_is_found_without_stacks_if_the_worker_has_its_own_handler(run, evidence):
    source = training("signal.signal(signal.SIGRTMIN + 12, lambda *_: None)\nwhile True: os.read(reader, 1)")
    launched = run(source, 1, nproc=3).exits(1)
    says(launched.stderr, "hung", "1 step behind")
    assert "no Python" in evidence(1)


def test_a_child_of_the_worker_is_asked_for_its_stacks(launch, worker_script, tmp_path, evidence):
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
    assert "in deep (worker.py:" in launched.stderr, launched.stderr
    assert re.search(r"below it: pid \d+", evidence(0))


SPY = """
    echo "spied with $*"
    echo 'Thread 7 (idle): "MainThread"'
    echo "    all_reduce (/data/train.py:41)"
"""
SPIES = {
    "answers": SPY,
    # A py-spy that hangs does not delay the job, because it is killed after two seconds.
    "hangs": f"{SPY}\nexec sleep 1000",
}


@pytest.mark.parametrize("how", SPIES)
def test_py_spy_inspects_a_worker_without_a_handler(run, tmp_path, how, evidence):
    spied = launcher_with_py_spy(tmp_path, SPIES[how], ELASTICRS_TRACEBACKS="0")
    launched = run(STUCK, 0.5, **spied).exits(1)
    assert "hung: " in launched.stderr
    assert re.search(r"^spied with dump --full-filenames --pid \d+$", evidence(0), re.M)
    assert "in all_reduce (train.py:41)" in launched.stderr
    assert re.search(r'    File "/data/train.py", line 41 in all_reduce$', launched.stderr, re.M)


@pytest.fixture(scope="session")
def py_spy():
    """Skip the test unless the real py-spy is installed and may inspect a process that is not its
    own child.
    """
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
def test_the_real_py_spy_names_the_function_of_the_hung_rank(run, tmp_path, how, evidence):
    # The hung rank does not report its stacks, because its handler is in Python or because it is stopped.
    body = "signal.signal(signal.SIGRTMIN + 12, lambda *_: None)\nclass Loader:\n    def read_batch(self):\n"
    source = training(body + textwrap.indent(HANGS[how], " " * 8) + "\nLoader().read_batch()")
    launched = run(source, 1, nproc=3).exits(1)
    assert "no Python" in evidence(1)
    says(launched.stderr, "in read_batch (worker.py:", "ranks 0, 2 in wait_for_peers (worker.py:")
    assert has(launched.stderr, "stopped by", "in read_batch") == (how == "stopped")
    frame = re.escape(f'File "{tmp_path / "worker.py"}", line ')
    assert re.search(rf"^ +{frame}\d+ in (Loader\.)?read_batch$", launched.stderr, re.M)


def test_py_spy_does_not_outlive_a_killed_agent(run, tmp_path):
    told = tmp_path / "told"
    os.mkfifo(told)
    spied = launcher_with_py_spy(tmp_path, f"echo $$ > {told}; exec sleep 1000", ELASTICRS_TRACEBACKS="0")
    launched = run(STUCK, 0.5, **spied)
    pid = int(told.read_text())
    launched.signal(signal.SIGKILL)
    launched.exits(-signal.SIGKILL)
    assert wait_gone(pid), "it died with the agent"
    reap_adopted()


def test_a_section_has_its_own_limit(run):
    source = """
        import os
        from elasticrs.timer import heartbeat
        pipe = os.pipe()
        with heartbeat.section("evaluation", limit=None):
            with heartbeat.section("checkpoint", limit=0.5):
                os.read(pipe[0], 1)
    """
    launched = run(source, 1).exits(1)
    says(launched.stderr, "hung", "'checkpoint'", "limit 0.5 s")
    line_with(launched.stderr, "last heartbeat ", "rank 0", "'checkpoint'")


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
def test_a_slow_exit_after_the_program_has_returned_is_not_a_hang(run, how):
    hold = textwrap.indent(textwrap.dedent(EXITS[how]), " " * 4)
    launched = run(TRAINED.format(waits_for=[], hold=f"\n{hold}"), 1, nproc=2).exits(0)
    assert launched.stdout.count("UPLOADED\n") == 2
    assert "hung" not in launched.stderr
    says(launched.stderr, "still exiting", "1 s", "1800 s")


def test_an_exit_that_exceeds_hang_exit_timeout_is_a_hang(run):
    hold = textwrap.indent(textwrap.dedent(EXITS["atexit"]), " " * 4)
    body = TRAINED.format(waits_for="pipe[:1]", hold=f"\n{hold}")
    launched = run(body.replace("[], [], 3)", "[], [])"), 60, "--hang-exit-timeout=1").exits(1)
    says(launched.stderr, "hung", "returned", "limit 1 s", "step 7", "in upload")


def test_an_unlimited_section_or_a_worker_without_heartbeats_is_not_a_hang(run):
    source = """
        import os
        from elasticrs.timer import heartbeat
        if os.environ["RANK"] == "0":
            with heartbeat.section("evaluation", limit=None):
                os.read(0, 1)
                os._exit(0)
        else:
            os.read(0, 1)
    """
    launched = run(source, 0.2, nproc=2, stdin=subprocess.PIPE)
    # Several limits long.
    assert not wait_readable(launched.pidfd, 1.5)
    launched.feed(b"xx")
    launched.exits(0)


WITHOUT_AN_END = {"a line": "one line\\n", "a bar": "\\r 20%|###", "a prompt": "step 2 ..."}


@pytest.mark.parametrize("what", WITHOUT_AN_END)
def test_silence_of_all_ranks_without_heartbeats_is_a_hang(run, what):
    source = f"""
        import os
        pipe = os.pipe()
        print("{WITHOUT_AN_END[what]}", end="", flush=True)
        os.read(pipe[0], 1)
    """
    launched = run(source, 0.5, "--tee=1", nproc=2).exits(1)
    says(launched.stderr, "hung", "no rank", "limit 0.5 s")


def test_hang_timeout_auto_learns_the_limit_from_the_steps(run):
    source = f"""{MEET}
    pipe = os.pipe()
    for step in range(20):
        heartbeat(step)
    if attempt == 0:
        if rank != 1:
            heartbeat(20)
        os.read(pipe[0], 1)
    os.write(1, b"DONE\\n")
    os._exit(0)
    """
    launched = run(source, "auto:0.5", "--max-restarts=1", nproc=2).exits(0)
    assert launched.stdout.count("DONE\n") == 2
    # The twenty steps take only microseconds, so the limit is the minimum of 0.5 s.
    says(launched.stderr, "rank 1 ", "hung", "limit 0.5 s", "step 19")


LONG_EVALUATION = """
    import os, select
    from elasticrs.timer import heartbeat
    for step in range(30):
        heartbeat(step)
        select.select([], [], [], 0.01)
        if step == 20:
            # Longer than the learned limit and than the time between two checks, in each attempt.
            select.select([], [], [], 6)
    os.write(1, b"DONE\\n")
"""


@pytest.mark.slow
def test_a_long_evaluation_exceeds_a_learned_limit_at_most_once(run):
    launched = run(LONG_EVALUATION, "auto:1", "--max-restarts=2", nproc=2).exits(0)
    assert launched.stdout.count("DONE\n") == 2
    assert len(re.findall("limit 1 s", launched.stderr)) <= 2
    line_with(launched.stderr, "--hang-timeout auto: the learned limit of 1 s", "30 minutes")
    line_with(launched.stderr, "succeeded", "1 restart charged")


WORKS = f"""{MEET}
    import time
    def evaluate(until):
        while time.monotonic() < until:
            DOES
    # The stack of a rank that waits in torch.
    wait = compile("def barrier(done):\\n  while not done(): select.select([], [], [], 0.01)",
                   "/lib/torch/distributed/distributed_c10d.py", "exec")
    exec(wait)
    heartbeat(1)
    if rank == 0:
        evaluate(time.monotonic() + 2.5)
        open("done", "w").close()
    barrier(lambda: os.path.exists("done"))
    heartbeat(2)
    os.write(1, b"DONE\\n")
"""


@pytest.mark.parametrize(
    "does", ["pass", "open('saved', 'wb').write(bytes(1 << 20)); select.select([], [], [], 0.05)"]
)
def test_a_rank_that_works_outside_of_collectives_is_slow_and_not_hung(run, tmp_path, does):
    launched = run(WORKS.replace("DOES", does), 1, nproc=2, cwd=tmp_path).exits(0)
    assert launched.stdout.count("DONE\n") == 2
    line_with(launched.stderr, "local rank 0 is slow, not hung", "in evaluate", "10 s")
    assert launched.stderr.count("slow, not hung") == 1


@pytest.mark.parametrize(("limit", "calm"), [(1, 0), ("auto:1", 3)])
def test_ranks_that_spin_in_a_collective_are_hung(run, tmp_path, limit, calm):
    # All ranks use the CPU, and their stacks are in torch, as in a collective that waits in a busy loop. A
    # learned limit is first checked after 5 s, so the ranks need not spin in the seconds before.
    spins = "True: time.monotonic() < calm_until and select.select([], [], [], 0.05)"
    source = WORKS.replace("not done(): select.select([], [], [], 0.01)", spins)
    source = source.replace("if rank == 0:", "if rank > 9:")
    beats = f"[heartbeat(step) for step in range(20)]; calm_until = time.monotonic() + {calm}"
    source = source.replace("heartbeat(1)", beats)
    launched = run(source, limit, nproc=2, cwd=tmp_path).exits(1)
    says(launched.stderr, "hung", "limit 1 s", "in barrier")
    assert "slow" not in launched.stderr


OF_GLOO = """
    import os, time
    import torch
    import torch.distributed as dist
    from elasticrs.timer import heartbeat
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    gradient = torch.ones(1000)
    dist.all_reduce(gradient)
    heartbeat(1)
    if SPINS:
        # The calls do not match. As with NCCL, the program waits for them outside of torch.distributed.
        work = dist.all_reduce(gradient, group=groups[dist.get_rank()], async_op=True)
        while not work.is_completed():
            pass
    elif dist.get_rank() == 0:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            gradient @ gradient
    dist.all_reduce(gradient)
    heartbeat(2)
    os.write(1, b"DONE\\n")
    dist.barrier()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("spins", [True, False])
def test_the_flight_record_tells_a_slow_rank_from_one_that_spins_in_a_collective(run, spins):
    launched = run(OF_GLOO.replace("SPINS", str(spins)), 2, nproc=2)
    if spins:
        launched.exits(1, timeout=120)
        says(launched.stderr, "hung", "limit 2 s")
        assert "slow, not hung" not in launched.stderr
    else:
        launched.exits(0, timeout=120)
        line_with(launched.stderr, "local rank 0 is slow, not hung")


CHECKPOINT_OF_ONE_RANK = f"""{MEET}
    # The stack of a rank that waits in torch.
    wait = compile("def barrier():\\n  while not os.path.exists('saved'): select.select([], [], [], 0.01)",
                   "/lib/torch/distributed/distributed_c10d.py", "exec")
    exec(wait)
    heartbeat(1)
    if rank == 0:
        with heartbeat.section("checkpoint", limit=600):
            select.select([], [], [], 3)
            open("saved", "w").close()
    barrier()
    os.write(1, b"DONE\\n")
"""


def test_ranks_that_wait_for_a_rank_in_a_section_do_not_hang(run, tmp_path):
    launched = run(CHECKPOINT_OF_ONE_RANK, 1, nproc=3, cwd=tmp_path).exits(0)
    assert launched.stdout.count("DONE\n") == 3
    # One line names both ranks if their last heartbeats are close to each other.
    lines = re.findall(
        "local ranks? (.*) (?:is|are) waiting in torch while local rank 0 is in a section", launched.stderr
    )
    assert {rank for ranks in lines for rank in ranks.split(", ")} == {"1", "2"}


def test_a_hang_that_the_request_for_stacks_ends_is_told(run):
    # The signal that requests the stack interrupts the sleep in C code, so the worker continues.
    source = """
        import ctypes, os, select
        from elasticrs.timer import heartbeat
        heartbeat(1)
        ctypes.CDLL(None).sleep(600)
        heartbeat(2)
        select.select([], [], [], 0.5)
        os.write(1, b"DONE\\n")
    """
    launched = run(source, 1).exits(0)
    says(launched.stderr, "local rank 0 is active again", "signal that requests stacks")
