"""Reading the evidence about a hang. A worker may have written anything to these files."""

import json
import os
import pickle
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from diagnosis.model import dump
from diagnosis.test_culprits import calls
from helpers.attempts import beat, exited, failed, hung, raised, seen
from helpers.procs import HANG
from hypothesis import given
from hypothesis import strategies as st

from elasticrs import _core
from elasticrs._engine.failures.failure import (
    fault_file,
    flight_dumps,
    flight_record_file,
    flight_requests_file,
    hang_file,
    last_record_file,
)
from elasticrs._engine.hangs.culprits import Basis, Blame, Confidence
from elasticrs._engine.hangs.flight_record import MAX_BYTES, NoRecord
from elasticrs._engine.hangs.stacks import Frame, MergedStack
from elasticrs._engine.inside.error_file import write_whole
from elasticrs._engine.supervise import hang_diagnosis
from elasticrs._engine.supervise.attempt import Attempt
from elasticrs._engine.supervise.failed_attempt import is_collective_failure
from elasticrs._engine.supervise.hang_diagnosis import diagnose_running, examine, examine_failure
from elasticrs._engine.supervise.run.tracker import AttemptTracker
from elasticrs._engine.workers.logs import LogPaths
from elasticrs._engine.workers.plan import Plan, WorkerRanks

RECORDED = Path(__file__).resolve().parents[1] / "diagnosis" / "recorded"


class Evidence:
    """The evidence about an attempt's ranks, in the files that the workers and the core write."""

    def __init__(self, folder, size, *, world=None):
        ranks = [WorkerRanks("", rank, rank, 0, rank, size, world or size, 1, size) for rank in range(size)]
        self.files = {rank: str(folder / str(rank) / "error.json") for rank in range(size)}
        self.attempt = Attempt(0, 0, Plan(ranks, "", 0), paths=LogPaths({}, {}, {}, {}, self.files))
        for path in self.files.values():
            os.mkdir(os.path.dirname(path))

    def write(self, rank, *lines, stacks=""):
        self.record(rank).write_bytes(b"\n".join(lines))
        Path(hang_file(self.files[rank])).write_text(stacks)

    def record(self, rank):
        return Path(flight_record_file(self.files[rank]))

    @property
    def diagnosis(self):
        return examine(self.attempt)


@pytest.fixture(autouse=True)
def time_limit(monkeypatch):
    """Return a function that sets the time limit for reading flight records. By default, tests use a longer
    limit than the agent, because reading may be slow on a busy machine.
    """

    def set_to(seconds):
        monkeypatch.setattr(hang_diagnosis, "_TIME_LIMIT", seconds)

    set_to(HANG)
    return set_to


@pytest.fixture
def stuck(tmp_path):
    """Evidence recorded from eight ranks, of which rank 5 did not enter a collective."""
    ranks = json.loads((RECORDED / "missing_rank.json").read_text())["ranks"]
    evidence = Evidence(tmp_path, len(ranks))
    for rank in ranks:
        lines = json.dumps({"groups": rank["groups"]}).encode(), rank["record"].encode()
        evidence.write(rank["rank"], *lines, stacks=rank["stacks"])
    return evidence


def test_flight_records_of_all_ranks_identify_the_culprit(stuck):
    (culprit,) = stuck.diagnosis.culprits
    assert (culprit.ranks, culprit.confidence) == ((5,), Confidence.CERTAIN)
    assert "rank 5 did not enter it: it is in " in stuck.diagnosis.summary


def test_records_that_are_not_read_in_time_are_late(stuck, time_limit):
    stuck.write(5, b"[]")
    time_limit(0)
    assert stuck.diagnosis is None
    time_limit(HANG)
    assert stuck.diagnosis.no_record == {5: NoRecord.DAMAGED}


def leave_a_fifo(path):
    os.mkfifo(path)


def leave_a_link(path):
    path.symlink_to("/dev/zero")


def leave_a_folder(path):
    path.mkdir()


@pytest.mark.parametrize("leave", [leave_a_fifo, leave_a_link, leave_a_folder])
@pytest.mark.parametrize("has_thread", [True, False])
def test_a_flight_record_that_is_not_a_regular_file_is_not_read(stuck, leave, has_thread):
    stuck.record(5).unlink()
    leave(stuck.record(5))
    if has_thread:
        os.mkfifo(flight_requests_file(stuck.files[5]))
    reason = NoRecord.LATE if has_thread else NoRecord.NO_TORCH
    assert stuck.diagnosis.no_record == {5: reason}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([b'{"no_record": "no_torch"}'], NoRecord.NO_TORCH),
        ([b'{"no_record": "off"}'], NoRecord.OFF),
        ([b'{"groups": {}}'], NoRecord.OFF),
        ([b'{"no_record": "exited"}'], NoRecord.DAMAGED),
        ([b'{"no_record": []}'], NoRecord.DAMAGED),
        ([b""], NoRecord.DAMAGED),
        ([b"[]"], NoRecord.DAMAGED),
        ([b"[" * 100_000], NoRecord.DAMAGED),
        ([b"\xff"], NoRecord.DAMAGED),
        ([b'{"groups": {"0": [0, true]}}', b"{}"], NoRecord.DAMAGED),
        ([b'{"groups": {"0": [-1]}}', b"{}"], NoRecord.DAMAGED),
        ([b'{"groups": {"0": 1}}', b"{}"], NoRecord.DAMAGED),
        ([b'{"groups": []}', b"{}"], NoRecord.DAMAGED),
        ([b'{"groups": {}}', b"{}"], NoRecord.DAMAGED),
        ([b'{"groups": {}}', *[b'{"version": "2.10"}'] * 9], NoRecord.DAMAGED),
        ([b'{"groups": {}}', b" " * MAX_BYTES], NoRecord.DAMAGED),
    ],
)
def test_an_invalid_flight_record_counts_as_missing(stuck, lines, reason):
    stuck.write(5, *lines)
    assert stuck.diagnosis.no_record == {5: reason}


@given(st.lists(st.binary(max_size=40), max_size=6), st.text(max_size=80))
def test_no_flight_record_content_raises_an_exception(tmp_path_factory, lines, stacks):
    evidence = Evidence(tmp_path_factory.mktemp("any"), 2)
    for rank in range(2):
        evidence.write(rank, *lines)
        Path(hang_file(evidence.files[rank])).write_text(stacks, errors="replace")
    assert evidence.diagnosis is None


def nccl_dump(record):
    """Return a dump in the format of NCCL's watchdog, made from a gloo record."""
    document = json.loads(record.replace("gloo:", "nccl:"))
    for entry in document["entries"]:
        entry["state"] = "completed" if entry["retired"] else "started"
        entry["frames"] = [{"name": "step", "filename": "train.py", "line": 88}]
    document["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}}
    return pickle.dumps(document, 2)


def aborted_attempt(tmp_path, of_5=(-15, signal.SIGTERM)):
    """Return an attempt of eight ranks that NCCL's watchdog aborted: rank 5 did not enter a collective.
    ``of_5``: exit code of rank 5, and the signal that the agent sent to it before.
    """
    ranks = json.loads((RECORDED / "missing_rank.json").read_text())["ranks"]
    evidence = Evidence(tmp_path, len(ranks))
    for rank in ranks:
        path = Path(f"{flight_dumps(evidence.files[rank['rank']])}{rank['rank']}")
        path.write_bytes(nccl_dump(rank["record"]))
        end = {3: (-6, None), 5: of_5}.get(rank["rank"], (-15, signal.SIGTERM))
        exited(evidence.attempt, rank["rank"], *end)
    failed(evidence.attempt, 3)
    return evidence


@pytest.fixture
def aborted(tmp_path):
    return aborted_attempt(tmp_path)


def after_failure(attempt):
    attempt.diagnosis, blame = examine_failure(attempt)
    if blame is not None:
        attempt.accuse(blame, 1)
    return attempt.diagnosis


def test_dumps_of_the_nccl_watchdog_identify_the_culprit(aborted):
    assert is_collective_failure(aborted.attempt)
    found = after_failure(aborted.attempt)
    assert [(culprit.ranks, culprit.confidence) for culprit in found.culprits] == [((5,), Confidence.CERTAIN)]
    assert found.collectives[0].backend == "nccl"
    assert (aborted.attempt.blame.ranks, aborted.attempt.first_failure) == ((5,), 5)


def test_a_dump_that_would_run_code_when_unpickled_is_rejected(aborted):
    path = Path(f"{flight_dumps(aborted.files[5])}5")
    path.write_bytes(b"\x80\x02cos\nmkdir\nX\x01\0\0\0a\x85R.")
    assert after_failure(aborted.attempt).no_record == {5: NoRecord.DAMAGED}


def test_an_outdated_nccl_dump_is_not_used(aborted):
    path = f"{flight_dumps(aborted.files[5])}5"
    os.utime(path, (1, 1))
    assert after_failure(aborted.attempt).no_record == {5: NoRecord.LATE}


@pytest.mark.parametrize("code", [3, -9])
def test_a_rank_that_failed_by_itself_needs_no_diagnosis(tmp_path, code):
    aborted = aborted_attempt(tmp_path, of_5=(code, None))
    os.utime(f"{flight_dumps(aborted.files[5])}5", (1, 1))
    assert examine_failure(aborted.attempt) == (None, None)


def test_only_failures_of_collectives_are_diagnosed(aborted):
    attempt = aborted.attempt
    # The agent may notice the exit of a peer before the exit of the aborted rank.
    assert is_collective_failure(with_first_failure(attempt, 4))
    assert is_collective_failure(attempt)
    attempt.exits[3].exitcode = -11
    assert not is_collective_failure(attempt)
    attempt.exits[3].exitcode = -6
    raised(attempt, 3, text="ValueError: no", origin="own")
    assert not is_collective_failure(attempt)
    raised(attempt, 3, text="RuntimeError: x", origin="peer")
    assert is_collective_failure(attempt)
    assert not is_collective_failure(with_first_failure(attempt, None))


def with_first_failure(attempt, local_rank):
    """Return a copy of an attempt in which another worker, or none, failed first."""
    copy = Attempt(0, 0, attempt.plan, paths=attempt.paths)
    for kind, event in attempt.events:
        if kind is not _core.FailureSeen:
            copy.append(event, kind)
    if local_rank is not None:
        failed(copy, local_rank)
    return copy


INSIDE = [["torch/distributed/distributed_c10d.py", 4181, "all_reduce"], ["train.py", 9, "<module>"]]
ABORT = """Fatal Python error: Aborted

{header} 0x00007f27f7e6db80 (most recent call first):
  File "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4181 in all_reduce
  File "train.py", line 9 in <module>
"""


@pytest.fixture
def mismatched(tmp_path):
    """A failed attempt of four ranks. Rank 2 passed more elements than the others, so gloo aborted rank 0."""
    evidence = Evidence(tmp_path, 4)
    for rank in range(1, 4):
        record = dump(calls("all_reduce", sizes=[[4096 if rank == 2 else 4]]))
        evidence.write(rank, json.dumps({"groups": {"0": [0, 1, 2, 3]}, "stack": INSIDE}).encode(), record)
    Path(fault_file(evidence.files[0])).write_text(ABORT.format(header="Thread"))
    exited(evidence.attempt, 0, -6)
    failed(evidence.attempt, 0)
    return evidence


@pytest.mark.parametrize("has_answered", [True, False])
def test_the_records_of_the_survivors_clear_the_rank_that_gloo_has_aborted(mismatched, has_answered):
    if not has_answered:
        mismatched.record(2).rename(last_record_file(mismatched.files[2]))
    found = after_failure(mismatched.attempt)
    assert found.no_record == {0: NoRecord.ABORTED}
    assert mismatched.attempt.blame == Blame((2,), True, Basis.RECORDS)
    assert mismatched.attempt.first_failure == 2
    assert {rank for stack in found.stacks for rank in stack.ranks} == {0, 1, 2, 3}


def test_the_rank_is_found_when_the_exit_of_the_aborted_rank_is_noticed_later(mismatched):
    """The agent notices the exit of a peer first. At this time, gloo's abort of rank 0 is not known yet."""
    attempt = Attempt(0, 0, mismatched.attempt.plan, paths=mismatched.attempt.paths)
    failed(attempt, 3)
    raised(attempt, 3, text="RuntimeError: reset", origin="peer")
    mismatched.record(3).unlink()
    tracker = SimpleNamespace(_replaces=False)
    AttemptTracker._explain(tracker, attempt)
    assert attempt.blame is None
    exited(attempt, 0, -6)
    AttemptTracker._explain(tracker, attempt)
    assert attempt.blame == Blame((2,), True, Basis.RECORDS)


def test_a_rank_that_gloo_may_have_aborted_is_not_blamed_before_its_exit_is_noticed(tmp_path):
    """gloo has aborted rank 1, because rank 0 passed more elements. The exit of rank 0 is noticed first."""
    evidence = Evidence(tmp_path, 2)
    header = json.dumps({"groups": {"0": [0, 1]}, "stack": INSIDE}).encode()
    evidence.write(0, header, dump(calls("all_reduce", sizes=[[4096]])))
    Path(fault_file(evidence.files[1])).write_text(ABORT.format(header="Thread"))
    failed(evidence.attempt, 0)
    raised(evidence.attempt, 0, text="RuntimeError: reset", origin="peer")
    tracker = SimpleNamespace(_replaces=False)
    AttemptTracker._explain(tracker, evidence.attempt)
    assert evidence.attempt.blame is None
    exited(evidence.attempt, 1, -6)
    AttemptTracker._explain(tracker, evidence.attempt)
    assert evidence.attempt.blame == Blame((0, 1), False, Basis.RECORDS)


def test_a_rank_that_python_code_has_aborted_stays_the_cause(mismatched):
    fault = Path(fault_file(mismatched.files[0]))
    for rank in (1, 2, 3):
        mismatched.write(rank, b'{"no_record": "off"}')
    fault.write_text(ABORT.format(header="Current thread"))
    assert examine_failure(mismatched.attempt) == (None, None)
    # The main thread was in a collective, and no thread that runs Python code has aborted the process, so
    # gloo may have aborted the process.
    fault.write_text(ABORT.format(header="Thread"))
    assert examine_failure(mismatched.attempt) == (None, Blame((0, 1, 2, 3), False, Basis.RECORDS))
    # The stack of the rank is unknown. Gloo may have aborted the rank if the rank uses torch. The FIFO shows
    # that it does.
    fault.write_text("")
    assert examine_failure(mismatched.attempt) == (None, None)
    os.mkfifo(flight_requests_file(mismatched.files[0]))
    assert examine_failure(mismatched.attempt) == (None, Blame((0, 1, 2, 3), False, Basis.RECORDS))


def test_the_stack_of_a_rank_that_has_raised_is_not_shown(mismatched):
    hook = ["/elasticrs/_engine/inside/hook/sitecustomize.py", 275, "excepthook"]
    header = json.dumps({"groups": {"0": [0, 1, 2, 3]}, "stack": [hook, *INSIDE]}).encode()
    mismatched.write(1, header, dump(calls("all_reduce", waits=False, sizes=[[4]])))
    found = after_failure(mismatched.attempt)
    assert mismatched.attempt.blame.ranks == (2,)
    # The flight record of rank 1 marks the collective as complete. Rank 1 still counts as waiting, because
    # the collective has failed on rank 1.
    assert found.collectives[0].waiting == (1, 2, 3)
    assert {rank for stack in found.stacks for rank in stack.ranks} == {0, 2, 3}


def test_the_report_shows_the_stacks_of_all_candidates(mismatched):
    found = after_failure(mismatched.attempt)
    text = hang_diagnosis.stacks_of(found, (0, 1, 2))
    # Ranks 1 and 2 have the same stack.
    assert text.count("where ") == 2
    assert "where ranks 1, 2 were, " in text
    assert "where rank 0 was, " in text
    assert text.count('File "train.py", line 9 in <module>') == 2
    assert hang_diagnosis.stacks_of(found._replace(stacks=()), (0, 1)) is None
    more = tuple(MergedStack((rank,), (Frame("a.py", rank, "f"),)) for rank in range(9))
    assert hang_diagnosis.stacks_of(found._replace(stacks=more), range(9)).endswith("and 5 more stacks")


def test_after_a_failed_collective_the_diagnosis_says_where_the_absent_rank_is(mismatched):
    for rank in range(4):
        names = ["all_reduce"] if rank == 1 else ["all_reduce"] * 2
        stack = [["train.py", 7, "load"]] if rank == 1 else INSIDE
        header = json.dumps({"groups": {"0": [0, 1, 2, 3]}, "stack": stack}).encode()
        mismatched.write(rank, header, dump(calls(*names, waits=rank != 1)))
    attempt = Attempt(0, 0, mismatched.attempt.plan, paths=mismatched.attempt.paths)
    failed(attempt, 0)
    raised(attempt, 0, text="RuntimeError: Timed out", origin="peer")
    assert is_collective_failure(attempt)
    assert after_failure(attempt).summary.endswith(
        "rank 1 did not enter it, and the others probably wait for it: it is in load (train.py:7)"
    )


@pytest.mark.parametrize("stack", [7, [["a.py", 1]], [["a.py", -1, "f"]], [["a.py", True, "f"]], [7]])
def test_a_record_with_an_invalid_stack_counts_as_missing(mismatched, stack):
    mismatched.write(1, json.dumps({"groups": {}, "stack": stack}).encode(), dump(calls("all_reduce")))
    assert after_failure(mismatched.attempt).no_record[1] is NoRecord.DAMAGED


class Answers:
    """Threads that answer requests for records, in place of the threads in real workers."""

    def __init__(self, evidence, ranks):
        self._evidence, self._ranks, self._is_over = evidence, ranks, False
        self._contents = {rank: evidence.record(rank).read_text() for rank in ranks}
        for rank in ranks:
            os.mkfifo(flight_requests_file(evidence.files[rank]))
        self._threads = [threading.Thread(target=self._answer, args=(rank,)) for rank in ranks]

    def _answer(self, rank):
        while True:
            os.close(os.open(flight_requests_file(self._evidence.files[rank]), os.O_RDONLY))
            if self._is_over:
                return
            write_whole(str(self._evidence.record(rank)), self._contents[rank])

    def __enter__(self):
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_):
        self._is_over = True
        for rank, thread in zip(self._ranks, self._threads, strict=True):
            os.close(os.open(flight_requests_file(self._evidence.files[rank]), os.O_WRONLY))
            thread.join()


def diagnosed(evidence, late):
    """Diagnose a running job repeatedly, until all ranks except the late ones have answered."""
    while True:
        found = diagnose_running(evidence.attempt, 60)
        if found is not None and set(found.no_record) <= set(late):
            return found


def test_a_running_job_is_diagnosed_without_its_stacks(stuck):
    with Answers(stuck, range(8)):
        found = diagnosed(stuck, [])
    assert [culprit.ranks for culprit in found.culprits] == [(5,)]
    assert found.stacks == ()
    assert "rank 5 did not enter it" in found.summary


def test_diagnosis_does_not_wait_for_a_worker_that_reads_no_requests(stuck):
    with Answers(stuck, [rank for rank in range(8) if rank != 3]):
        os.mkfifo(flight_requests_file(stuck.files[3]))
        found = diagnosed(stuck, [3])
    assert found.no_record == {3: NoRecord.LATE}


def test_diagnosis_of_an_unresponsive_worker_stops_at_the_time_limit(stuck):
    os.mkfifo(flight_requests_file(stuck.files[3]))
    # The worker's thread waits for requests, but it does not get the GIL to answer one.
    reader = os.open(flight_requests_file(stuck.files[3]), os.O_RDONLY | os.O_NONBLOCK)
    assert diagnose_running(stuck.attempt, 0.1) is None
    os.close(reader)


def test_flight_records_of_an_exited_rank_are_not_used(stuck):
    exited(stuck.attempt, 5, 0)
    assert stuck.diagnosis.no_record == {5: NoRecord.EXITED}


def test_no_diagnosis_is_made_without_records_or_with_ranks_on_other_nodes(tmp_path, stuck):
    (tmp_path / "bare").mkdir()
    assert Evidence(tmp_path / "bare", 2).diagnosis is None
    (tmp_path / "part").mkdir()
    part = Evidence(tmp_path / "part", 2, world=8)
    for rank in range(2):
        os.link(stuck.record(rank), part.record(rank))
    assert part.diagnosis is None


SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("left_at", "missed", "candidates"),
    [
        (9, "step", (3,)),
        # The others made progress for longer than one limit after rank 3 had exited.
        (2, "step", (0, 1, 2, 3)),
        # Rank 3 exited while the hang was examined, so the others did not hang because of that.
        (16, "step", (0, 1, 2)),
        # The program of rank 0 had returned, so rank 0 does not wait for rank 3.
        (9, "exit", (0,)),
    ],
)
def test_a_rank_that_has_exited_is_a_candidate_for_the_hang_of_others(tmp_path, left_at, missed, candidates):
    attempt = Evidence(tmp_path, 4).attempt
    last = [beat(rank, 10 * SECOND, 4) for rank in range(3)]
    ranks = [seen(each.local_rank, each, "", is_late=True) for each in last]
    how = {"ground": "oldest", "missed": missed, "limit": 5.0}
    event = hung(0, ranks, 10 * SECOND, 15 * SECOND, **how)
    exited(attempt, 3, 0, seen_ns=left_at * SECOND)
    attempt.append(event, _core.WorkerHung)
    hang_diagnosis.accuse(attempt, event)
    assert (attempt.blame.ranks, attempt.blame.is_decided) == (candidates, candidates == (0,))
    told = hang_diagnosis.why_blamed(attempt, attempt.expired[candidates[0]], candidates[0])
    assert ("rank 3 exited with code 0 at " in told) == (3 in candidates)
