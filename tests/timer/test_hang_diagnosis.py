"""Hangs of real gloo groups: the report names the rank that the others wait for, based on torch's flight
records.
"""

import json

import pytest
from helpers import timing_out
from helpers.said import line_with, says
from helpers.timing_out import REDUCE

STEP = """
    import os, threading
    import torch
    from torch import distributed
    from elasticrs.timer import heartbeat
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    distributed.init_process_group("gloo")
    ones = torch.ones(4)
    def load_batch():
        threading.Event().wait()
    distributed.all_reduce(ones)
    heartbeat(7)
"""

# A wait for a lock continues after the signal that requests the stacks, unlike `sleep`.
HOLDS_THE_GIL = (
    "import ctypes; lock = ctypes.create_string_buffer(64); take = ctypes.PyDLL(None).pthread_mutex_lock;"
    " take(lock); take(lock)"
)


def step(of_rank_1, others=REDUCE):
    return f"{STEP}    if rank == 1:\n        {of_rank_1}\n    else:\n        {others}\n"


@pytest.fixture
def run(launch_with_torch, worker_script, tmp_path):
    """Return a function that launches three workers with this source and a hang timeout of two seconds."""

    def run(source, *options, nproc=3, limit=2):
        watch = [f"--hang-timeout={limit}"] if limit else []
        options = (f"--nproc-per-node={nproc}", f"--log-dir={tmp_path / 'logs'}", *watch, *options)
        return launch_with_torch(*options, worker_script(source), env={"OMP_NUM_THREADS": "1"})

    return run


@pytest.mark.torch
def test_records_of_each_attempt_decide_everywhere_if_heartbeats_point_to_another_rank(run, tmp_path):
    # In both attempts, rank 2 is a step behind, but it waits for the rank that does not enter. In the second
    # attempt, this is another rank, and the collective has a different number.
    source = f"""{STEP}
    if attempt == 1:
        {REDUCE}
    rank == 2 or heartbeat(8)
    if rank == 1 - attempt:
        load_batch()
    {REDUCE}
    """
    report = tmp_path / "report.json"
    launched = run(source, f"--report=file:{report}", "--max-restarts=1").exits(1)
    lines = launched.stderr.splitlines()
    told = [line for line in lines if "keeps the other ranks waiting" in line or "; restarting" in line]
    assert [line.split(" (pid")[0] for line in told] == [f"elasticrs: rank {rank}" for rank in (1, 1, 0)]
    for rank, named, number in ((1, "elasticrs: rank 1 (pid ", 2), (0, "rank 0 of 3", 3)):
        line = line_with(launched.stderr, named, "hung: no heartbeat")
        waits = f"2 of 3 ranks wait in all_reduce #{number} of the default group (worker.py:"
        says(line, waits, f"; rank {rank} did not enter it: ")
        says(line, "it is in wait (threading.py:", "called at worker.py:")
    says(launched.stderr, "failed after", "rank 0 of 3: hung: ", "rank 0 did not enter it")
    assert "rank      : 0 (local_rank: 0)" in launched.stderr
    assert "rank 2 of 3" not in launched.stderr
    assert "flight.py" not in launched.stderr
    assert json.loads(report.read_text())["root_cause"] == 0
    assert len(list(tmp_path.glob("logs/*/attempt_*/*/error.json.flight"))) == 6
    assert not list(tmp_path.glob("logs/*/attempt_*/*/*.flight_requests"))


@pytest.mark.torch
def test_all_ranks_that_are_missing_are_named(run):
    source = step("load_batch()").replace("rank == 1:", "rank in (1, 2):")
    launched = run(source, nproc=4).exits(1)
    line_with(launched.stderr, "ranks 1, 2 keep the other ranks waiting")
    assert "rank      : 1, 2 (local_rank: 1, 2)" in launched.stderr


@pytest.mark.torch
def test_no_rank_is_named_if_the_records_do_not_decide(run, tmp_path):
    report = tmp_path / "report.json"
    source = step("distributed.barrier()")
    launched = run(source, f"--report=file:{report}", nproc=2).exits(1)
    line_with(launched.stderr, "undecided, candidates: ranks 0, 1: a rank hangs")
    assert "rank      : undecided, candidates: ranks 0, 1 (local_rank: 0, 1)" in launched.stderr
    assert json.loads(report.read_text())["root_cause"] is None


@pytest.mark.torch
@pytest.mark.parametrize(("how", "limit"), [("sys.exit(0)", None), ("os._exit(0)", 600)])
def test_a_rank_that_exits_early_with_code_0_is_the_root_cause(run, how, limit):
    source = step(how).replace("import os,", "import os, sys,")
    launched = run(source, limit=limit).exits(1)
    says(launched.stderr, "rank 1 of 3: exited with code 0 at ", "while others still waited for it")
    root = launched.stderr[launched.stderr.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in root
    assert "agreed on by all nodes" not in root


@pytest.mark.torch
def test_a_rank_that_holds_the_gil_has_no_record(run):
    launched = run(step(HOLDS_THE_GIL), nproc=2).exits(1)
    says(launched.stderr, "rank 0 waits in all_reduce #2", "rank 1", "no answer in time")


def test_the_report_contains_no_flight_record_diagnosis_without_torch(launch, worker_script, tmp_path):
    source = """
        import threading
        from elasticrs.timer import heartbeat
        heartbeat(7)
        threading.Event().wait()
    """
    options = ("--nproc-per-node=2", "--hang-timeout=2", f"--log-dir={tmp_path / 'logs'}")
    launched = launch(*options, worker_script(source)).exits(1)
    says(launched.stderr, "hung: ", "stopped at step 7", "it is in wait (threading.py:")
    assert "record" not in launched.stderr
    assert not list(tmp_path.glob("logs/*/attempt_0/*/*.flight*"))


COLLECTIVE_FAILS = ("--hang-timeout=600", "--exit-timeout=60")
"""A rank that exits more slowly has no diagnosis, and an exit may take over ten seconds on a busy machine."""


@pytest.mark.torch
def test_the_rank_that_made_a_collective_time_out_is_named(run):
    # Rank 0 raises at once. The flight record of rank 2 is older than its exception.
    raises_late = f"""try:
    {REDUCE}
except RuntimeError:
    while rank == 2 and not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"] + ".flight"):
        select.select([], [], [], 0.01)
    raise"""
    launched = run(timing_out.script(1, reduces=raises_late), *COLLECTIVE_FAILS).exits(1)
    says(launched.stderr, "RuntimeError: ", "imed out waiting")
    says(launched.stderr, "2 of 3 ranks wait in all_reduce #2 of the default group", "; rank 1 did not enter")
    says(launched.stderr, "rank 1 of 3: made a collective of the others fail; ")
    root = launched.stderr[launched.stderr.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in root


@pytest.mark.torch
def test_a_collective_that_fails_because_a_peer_crashed_gets_no_diagnosis(run):
    launched = run(timing_out.script(1, "os._exit(3)"), *COLLECTIVE_FAILS).exits(1)
    says(launched.stderr, "rank 1 of 3 exited with code 3")
    assert "did not enter it" not in launched.stderr
