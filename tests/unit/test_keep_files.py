"""The agent's files in which workers keep their state: what it reads, whatever workers have written."""

import json
import os
import re
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from helpers.keep_agent import keep_files
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.choice import Holding, KeptSlot
from elasticrs._engine.inside.keep.layout import Agreed, Answer, Head, Mode, Slot, SlotState, Why
from elasticrs._engine.workers import plan
from elasticrs._engine.workers.keep_files import MAX_RECORD, Progress

ROOT = Path(__file__).resolve().parents[2]

RING, FIRST, SECOND = layout.REGIONS_AT, layout.REGIONS_AT + 4096, layout.REGIONS_AT + 4096 + 16384
TABLE = [RING, 4096, FIRST, 16384, SECOND, 16384]


class Worker:
    """Writes into a rank's file as a worker does."""

    def __init__(self, place):
        mark, _, path = place.partition(":")
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        assert int(mark) == self.words(0, 2)[1]
        os.ftruncate(self.fd, SECOND + 16384)
        self.put(0, dict(enumerate(TABLE, Head.TABLE)))

    def words(self, at, count):
        return layout.unpack(os.pread(self.fd, 8 * count, at))

    def put(self, at, words):
        for word, value in words.items():
            os.pwrite(self.fd, layout.pack([value]), at + 8 * word)

    def keep(self, at, step, **more):
        words = {"MAGIC": layout.SLOT_MAGIC, "STATE": SlotState.COMPLETE, "STEP": step, "RANK": 4, "WORLD": 8}
        self.put(at, {getattr(Slot, name): value for name, value in {**words, **more}.items()})

    def record(self, number, step, data, crc=None):
        at = RING + layout.record_at(number, 4096)
        head = [step + 1, len(data), zlib.crc32(data) if crc is None else crc]
        os.pwrite(self.fd, layout.pack(head) + data, at)

    @property
    def plan(self):
        (length,) = self.words(layout.PLAN_AT, 1)
        return json.loads(os.pread(self.fd, length, layout.PLAN_AT + layout.WORD))

    def close(self):
        os.close(self.fd)


@pytest.fixture
def files():
    with keep_files(2) as found:
        yield found


@pytest.fixture
def worker(files):
    with closing(Worker(files.places[1])) as found:
        yield found


def holding(files):
    return files.holding(1, 4, 8)


def test_agent_and_worker_use_the_same_variable():
    assert plan.KEEP == layout.VARIABLE


def test_the_health_server_reads_the_words_that_workers_write():
    source = (ROOT / "crates/elasticrs-health/src/steps.rs").read_text(encoding="utf-8")
    found = {name: int(number) for name, number in re.findall(r"const (\w+): usize = (\d+);", source)}
    assert found == {
        "WORD": layout.WORD,
        "WORDS": Agreed.END,
        "KEEP_PID": Head.PID,
        "KEPT": Head.ENDED,
        "RESTORED": Head.RESTORED,
        "OWNER": Agreed.OWNER,
        "STEPS": Agreed.STEPS,
    }


def test_a_file_without_a_worker_holds_nothing(files):
    assert holding(files) == Holding(has_joined=False)
    assert not files.has_joined(1)
    assert files.standing() is None


def test_what_a_worker_has_kept_is_read(files, worker):
    worker.put(0, {
        Head.PID: 7, Head.ENDED: 13, Head.MODE: Mode.SHARDED, Head.ANSWER: Answer.KEPT, Head.CHECK_STEP: 3,
        Head.CHECK_DIGEST: 99, Head.RESTORED: 11, Head.ATTEMPT: 2, Head.COPIES: 5, Head.BLOCKED_NS: 6,
    })  # fmt: skip
    worker.keep(FIRST, 12, ATTEMPT=2, LAYOUT=8, DIGEST=9, SEQUENCE=3, WHY=Why.AT_DEATH, DATA_LENGTH=100)
    worker.keep(SECOND, 10, ATTEMPT=1)
    worker.record(0, 12, b"small")
    worker.record(3, 13, b"torn", crc=1)
    assert holding(files) == Holding(
        (KeptSlot(0, 12, 2, 8, 9, 3, why_copied=1), KeptSlot(1, 10, 1)),
        frozenset((12,)),
        attempt=2,
        ended=12,
        mode=Mode.SHARDED,
        check=(2, 99),
        restored=10,
        answer=Answer.KEPT,
    )
    assert files.has_joined(1)
    shown = files.standing()
    assert 0 < shown.pop("age_seconds") < 1e10
    assert 0 < shown.pop("bytes") <= os.fstat(worker.fd).st_size + layout.REGIONS_AT
    assert (shown.pop("copies"), shown.pop("failed_copies"), shown.pop("blocked_seconds")) == (5, 0, 6e-9)
    assert shown == {"tier": "memory", "step": 12, "ended_step": 12, "secured_step": None}


def test_the_last_step_is_that_of_keep_or_the_number_of_optimizer_steps(files):
    assert files.progress(1) is None
    with closing(Worker(files.places[1])) as worker:
        worker.put(0, {Agreed.OWNER: 5, Agreed.STEPS: 40, Agreed.TIME: 77})
        assert files.progress(1) == Progress("attempt", 40, 77)
        worker.put(0, {Agreed.STEPS: 1 << 63})
        assert files.progress(1) is None
        worker.put(0, {Head.PID: 5})
        assert files.progress(1) is None
        worker.put(0, {Head.RESTORED: 6})
        assert files.progress(1) == Progress("keep", 5, 0)
        worker.put(0, {Head.ENDED: 8, Head.ENDED_AT: 99})
        assert files.progress(1) == Progress("keep", 7, 99)


@pytest.mark.parametrize(
    "wrong",
    [
        {"MAGIC": 1},
        {"STATE": SlotState.WRITING},
        {"RANK": 3},
        {"WORLD": 9},
        {"DATA_LENGTH": 16385},
        {"INDEX_LENGTH": 16384},
        {"STEP": 1 << 63},
    ],
    ids=str,
)
def test_a_slot_that_is_not_whole_or_of_another_rank_is_left_out(files, worker, wrong):
    worker.keep(FIRST, 12, **wrong)
    assert holding(files).slots == ()


def test_a_new_attempt_gets_a_plan_and_no_copy_of_an_abandoned_step(files, worker):
    worker.put(0, dict.fromkeys(range(Head.PID, Head.COUNT), 5) | dict(enumerate(TABLE, Head.TABLE)))
    worker.keep(FIRST, 12)
    worker.keep(SECOND, 10)
    shared = {"step": None, "why": 'a "quoted" \\ text\n', "grace": 1.5, "files": ["a"]}
    own = {"large": {"slot": 1}}
    files.begin(shared, {1: own}, 11)
    assert worker.plan == {**shared, "why": 'a "quoted" \\ text?', **own}
    assert holding(files) == Holding((KeptSlot(1, 10),), has_joined=False, twins=(5, 5, 5))
    head = worker.words(0, Head.COUNT)
    assert not any(head[Head.PID : Head.CHECK_DIGEST + 1])
    assert not any(head[Head.RESTORED : Head.ENDED_AT + 1])
    assert not files.was_replicated(1)
    files.begin({}, {1: {}}, None)
    assert (holding(files).slots, worker.plan) == ((), {})


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=("C", "Z")))


plans = st.dictionaries(texts, scalars | texts | st.lists(st.integers()) | st.dictionaries(texts, scalars))


@given(plans, plans)
def test_a_plan_is_json(shared, own):
    with keep_files(1) as files, closing(Worker(files.places[0])) as worker:
        files.begin(shared, {0: own}, None)
        assert worker.plan == {**shared, **own}


def test_a_plan_that_is_too_long_is_refused(files):
    with pytest.raises(OSError, match="too long"):
        files.begin({"why": "x" * layout.REGIONS_AT}, {0: {}}, None)


edges = [0, 1, 2, 4096, RING, FIRST, SECOND, SECOND + 16384, MAX_RECORD, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
word = st.sampled_from([*edges, layout.SLOT_MAGIC, SlotState.COMPLETE]) | st.integers(0, 2**64 - 1)


def bytes_read():
    with open("/proc/self/io") as counters:
        return int(counters.readline().split()[1])


@given(st.data())
def test_hostile_words_cause_no_error_and_no_large_read(data):
    with keep_files(1) as files, closing(Worker(files.places[0])) as worker:
        os.ftruncate(worker.fd, data.draw(st.sampled_from([0, 100, RING, SECOND + 100, 1 << 40])))
        places = [
            (0, Head.COUNT),
            (FIRST, Slot.COUNT),
            (SECOND, Slot.COUNT),
            (RING, 3),
            (RING + layout.record_size(4096), 3),
        ]
        for at, count in places:
            chosen = data.draw(st.dictionaries(st.integers(0 if at else 2, count - 1), word, max_size=count))
            worker.put(at, chosen)
        if data.draw(st.booleans()):
            worker.keep(
                FIRST, 5, **{data.draw(st.sampled_from(["DATA_AT", "INDEX_LENGTH", "STEP"])): data.draw(word)}
            )
        before = bytes_read()
        found = files.holding(0, 4, 8)
        assert bytes_read() - before < (layout.RECORDS * MAX_RECORD) + layout.REGIONS_AT
        assert all(0 <= step < 2**62 for step in [*found.small, *(slot.step for slot in found.slots)])
        json.dumps(files.standing(), allow_nan=False)
        worker.put(0, {Head.PID: 1})
        files.begin({}, {0: {}}, 3)
        assert all(slot.step <= 3 for slot in files.holding(0, 4, 8).slots)


def test_closed_files_give_their_memory_back(files, worker):
    files.memory.close()
    files.memory.close()
    assert not files.memory.places
    assert not files.has_joined(1)
    assert not os.path.exists(files.places[1].partition(":")[2])
