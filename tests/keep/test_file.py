"""The file that keeps a rank's state, as the worker uses it."""

import os
import zlib
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from threading import Thread

import pytest
from helpers.keep_agent import keep_files
from helpers.procs import HANG
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.file import ForeignError, KeepFile, OffError
from elasticrs._engine.inside.keep.layout import Head, Mode, Slot
from elasticrs._engine.inside.keep.schedule import Schedule
from elasticrs._engine.workers.keep_files import KeepFiles
from elasticrs._engine.workers.plan import MemoryFiles


@pytest.fixture
def files():
    with keep_files(2) as made:
        yield made


@pytest.fixture
def file(files):
    files.begin({"step": None}, {0: {}}, None)
    with closing(KeepFile(files.places[0])) as made:
        yield made


def test_ring_keeps_two_steps_and_grows(files, file):
    for step in (4, 5, 6):
        file.ring.put(step, False, b"before %d" % step)
        file.ring.put(step, True, b"after %d" % step)
    two = {
        (step, end): b"%s %d" % (b"after" if end else b"before", step)
        for step in (5, 6)
        for end in (False, True)
    }
    assert file.ring.records() == two
    long = os.urandom(300_000)
    file.ring.put(7, False, long)
    del two[5, False]
    assert file.ring.records() == {**two, (7, False): long}
    assert files.holding(0, 0, 1).small == {5, 6, 7}
    file.ring.drop_after(5)
    assert set(file.ring.records()) == {(5, True)}
    # The kernel lets no process make the file smaller, because that would kill processes that map the file.
    with open(files.places[0].partition(":")[2], "r+b") as other, pytest.raises(PermissionError):
        other.truncate(0)


@given(st.integers(0, layout.RECORD_HEAD + len("torn")))
def test_torn_record_is_ignored(written):
    """The head of a record is written after its data."""
    whole = layout.pack([4 + 1, len("torn"), zlib.crc32(b"torn")]) + b"torn"
    with keep_files(1) as files, closing(KeepFile(files.places[0])) as file:
        file.ring.put(3, True, b"whole")
        offset, capacity = file.region(0)
        at = offset + layout.record_at(layout.record_number(4, True), capacity)
        with open(files.places[0].partition(":")[2], "r+b") as opened:
            data = min(written, len("torn"))
            head = written - data
            opened.seek(at)
            opened.write(whole[:head].ljust(layout.RECORD_HEAD, b"\0") + b"torn"[:data])
        is_whole = written == len(whole) or not any(whole[head : layout.RECORD_HEAD])
        assert file.ring.records() == {(3, True): b"whole", **({(4, True): b"torn"} if is_whole else {})}


def test_slot_gives_its_old_memory_back_when_it_grows(files, file):
    slot = file.slots[0]
    path = files.places[0].partition(":")[2]
    assert slot.reserve(4 << 20)
    slot.begin(b"index", 8192, {Slot.STEP: 5, Slot.DATA_LENGTH: 64})
    assert slot.complete_step is None
    slot.complete(17, 3)
    assert (slot.complete_step, slot.sequence) == (5, 3)
    assert not slot.reserve(1 << 20)
    assert slot.reserve(8 << 20)
    assert slot.complete_step is None
    assert 8 << 20 <= os.stat(path).st_blocks * 512 < 9 << 20
    with closing(KeepFile(files.places[0])) as read:
        assert read.slots[0].capacity == 8 << 20


@pytest.mark.parametrize(
    "table",
    [(0, 4096), (65536, 1 << 40), (1 << 63, 1), (65537, 4096), (65536, 2**64 - 1), (2**64 - 4096, 8192)],
)
def test_table_that_does_not_fit_the_file_is_an_empty_region(files, file, table):
    file.words[Head.TABLE], file.words[Head.TABLE + 1] = table
    file.words[Head.TABLE + 2], file.words[Head.TABLE + 3] = table
    with closing(KeepFile(files.places[0])) as read:
        assert read.ring.records() == {}
        assert read.slots[0].complete_step is None


def test_file_of_another_agent_is_refused(files):
    path = files.places[0].partition(":")[2]
    for place in (f"17:{path}", f"x:{path}", path, "17:/proc/self/fd/999999", "17:/dev/null"):
        with pytest.raises(OffError):
            KeepFile(place)


def test_a_worker_waits_for_its_first_plan():
    with closing(MemoryFiles(2)) as memory:
        files, read = KeepFiles(memory), Future()

        def open_file():
            with closing(KeepFile(memory.places[1])) as file:
                return file.plan()

        waiting = Thread(target=lambda: read.set_result(open_file()))
        waiting.start()
        assert not read.done()
        shared = {"world": "2", "local_world": "2", "run_id": "a", "has_time": False}
        files.begin(shared, {0: {"rank": "0"}, 1: {"rank": "1"}}, None)
        waiting.join(HANG)
        assert read.result(0) == {**shared, "rank": "1"}


def test_only_one_process_joins_in_an_attempt(files, file):
    file.join(0, 1, 0, Mode.AUTO)
    assert files.has_joined(0)
    file.join(0, 1, 0, Mode.AUTO)
    for other in (os.getppid(), 2**40):  # The second one has ended.
        file.words[Head.PID] = other
        with pytest.raises(ForeignError, match=str(other)):
            file.join(0, 1, 0, Mode.AUTO)


@contextmanager
def schedules(every, mode=Mode.AUTO):
    """Yield the heads and the schedules of two ranks."""
    with ExitStack() as stack:
        agents = stack.enter_context(keep_files(2))
        files = [stack.enter_context(closing(KeepFile(place))) for place in agents.places]
        heads = [file.words for file in files]
        both = [Schedule(heads[rank], agents.places, rank, every, mode) for rank in (0, 1)]
        for each in both:
            stack.callback(each.close)
        yield heads, both


def test_periodic_copies_are_of_multiples_and_of_the_second_step():
    with schedules(4) as (_, (schedule, _)):
        due = {step: schedule.next(step, is_idle=True) for step in range(7, 14)}
    assert due == {**dict.fromkeys(due, (False, False)), 8: (True, True), 12: (True, False)}
    with schedules(4, Mode.SHARDED) as (_, (schedule, _)):
        due = [step for step in range(3, 40, 3) if schedule.next(step, is_idle=True)[0]]
    assert due == [6, 12, 18, 24, 30, 36]
    with schedules(0, Mode.SHARDED) as (_, (schedule, _)):
        assert not any(schedule.next(step, is_idle=True)[0] for step in range(1, 30))


@pytest.mark.parametrize("copies_at_failure", [True, False])
def test_replicated_state_is_seldom_copied_only_if_survivors_can_copy_it(copies_at_failure):
    with schedules(None, Mode.REPLICATED) as (heads, (leader, _)):
        leader.has_copies_at_failure = copies_at_failure
        due = [step for step in range(1, 12) if leader.next(step, is_idle=True)[0]]
        announced = heads[0][Head.NEXT] - 1
    # Copies that never block the training may be of every second step.
    assert (due, announced > 1000) == (([5], True) if copies_at_failure else ([5, 8, 11], False))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 10**9), max_size=20), st.randoms(use_true_random=False), st.sampled_from([1, 7])
)
def test_automatic_copies_are_of_the_same_steps_on_all_ranks(costs, random, stride):
    """Each rank ends a step only after all have ended the one before."""
    with schedules(None, Mode.SHARDED) as (heads, both):
        due, at = [[], []], [0, 0]
        while min(at) < 60 * stride:
            rank = random.choice([each for each in (0, 1) if at[each] <= min(at)])
            at[rank] += stride
            if rank == 0 and costs:
                heads[0][Head.BLOCKED_NS] += costs.pop()
            if both[rank].next(at[rank], is_idle=random.random() < 0.8)[0]:
                due[rank].append(at[rank])
    common = [[step for step in each if step < 60 * stride] for each in due]
    assert common[0] == common[1]
    assert common[0]
    assert all(later - earlier >= 2 * stride for earlier, later in zip(due[0], due[0][1:], strict=False))


@pytest.mark.parametrize("has_other_nodes", [False, True])
def test_a_rank_that_has_restored_a_step_awaits_all_ranks_of_its_node(has_other_nodes):
    with keep_files(2) as files, closing(KeepFile(files.places[0])) as own:
        how = {"has_other_nodes": has_other_nodes}
        with closing(Schedule(own.words, files.places, 0, None, Mode.AUTO, **how)) as schedule:
            assert not schedule.do_starts_differ()
            own.words[Head.RESTORED] = 7
            assert schedule.do_starts_differ()
            with closing(KeepFile(files.places[1])) as other:
                other.words[Head.RESTORED] = 7
                assert not schedule.do_starts_differ()


@pytest.mark.parametrize(("mode", "has_spare"), [(Mode.REPLICATED, True), (Mode.SHARDED, False)])
def test_a_rank_without_further_copies_holds_no_replicated_copies_of_the_others(mode, has_spare):
    with schedules(None, mode) as (heads, (schedule, _)), ExitStack() as stack:
        files = [stack.enter_context(closing(KeepFile(place))) for place in schedule._places]
        for file, steps in zip(files, [(2, 9), (2,)], strict=True):
            for slot, step in zip(file.slots, steps, strict=False):
                slot.reserve(8192)
                slot.begin(b"index", 4096, {Slot.STEP: step})
                slot.complete(0, step)
        assert [file.copied_steps() for file in files] == [{2, 9}, {2}]
        heads[0][Head.GIVEN_UP] = 2 + 1
        assert schedule.can_spare(2) is False
        files[1].tell("no memory")
        assert schedule.can_spare(2) is has_spare
        heads[0][Head.GIVEN_UP] = 9 + 1
        assert schedule.can_spare(9) is True


@pytest.mark.parametrize("checks", [[(3, 7), (3, 7)], [(3, 7), (3, 8)], [(3, 7), (0, 0)], [(0, 0), (3, 7)]])
def test_state_is_replicated_if_all_checks_are_equal_or_before_the_own_check(checks):
    with schedules(None) as (heads, (schedule, _)):
        for head, check in zip(heads, checks, strict=True):
            head[Head.CHECK_STEP], head[Head.CHECK_DIGEST] = check
        assert schedule.is_replicated() == (checks[0] == checks[1] or not checks[0][0])
