"""The worker's side of heartbeats: the contents of the page, and the processes whose heartbeats count."""

import mmap
import os
import subprocess
import sys
import time

import pytest

from elasticrs._engine.inside import heartbeats

PID, COUNT, STEP, LIMIT, EXIT, TIMES = 0, 1, 2, 3, 4, 64
UNLIMITED = 2**64 - 1


class Page:
    """A heartbeat page, laid out as an agent creates it."""

    def __init__(self):
        self.fd = os.memfd_create("heartbeat")
        os.ftruncate(self.fd, 4096)
        self.memory = mmap.mmap(self.fd, 4096)

    @property
    def variable(self):
        found = os.fstat(self.fd)
        return f"{self.fd}:{found.st_dev}:{found.st_ino}"

    def word(self, index):
        return int.from_bytes(self.memory[8 * index : 8 * index + 8], sys.byteorder)

    def name(self):
        return self.memory[64:128].rstrip(b"\0").decode()

    def times(self):
        return [self.word(TIMES + place) for place in range(min(128, self.word(COUNT)))]


@pytest.fixture
def page(monkeypatch):
    page = Page()
    monkeypatch.setenv("ELASTICRS_HEARTBEAT", page.variable)
    for name, value in (("_words", None), ("_count", 0), ("_mark", 1)):
        monkeypatch.setattr(heartbeats, name, value)
    yield page
    page.memory.close()
    os.close(page.fd)


def test_a_heartbeat_writes_its_time_and_step(page):
    before = time.monotonic_ns()
    heartbeats.heartbeat(0)
    heartbeats.heartbeat(41)
    heartbeats.heartbeat()
    assert (page.word(PID), page.word(COUNT), page.word(STEP)) == (os.getpid(), 3, 42)
    times = page.times()
    assert times == sorted(times)
    assert before <= times[0] | 1
    assert times[-1] <= time.monotonic_ns() | 1
    assert all(each & 1 for each in times)


def test_the_outer_section_is_restored_after_an_inner_section(page):
    heartbeat = heartbeats.heartbeat
    with heartbeat.section("epoch", limit=60):
        with heartbeat.section("ckpt" * 30, limit=None):
            assert (page.word(LIMIT), len(page.name())) == (UNLIMITED, 63)
            heartbeat()
        assert (page.word(LIMIT), page.name()) == (60_000_000_000, "epoch")
        with pytest.raises(KeyError), heartbeat.section("fails", limit=1):
            raise KeyError
        assert page.name() == "epoch"
    assert (page.word(LIMIT), page.name()) == (0, "")
    heartbeat()
    # Only an interval that ends before or after the sections is a step.
    assert [each & 1 for each in page.times()] == [1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("step", "error"), [(-2, ValueError), (2**64, ValueError), ("7", TypeError), (0.5, TypeError)]
)
def test_an_invalid_step_is_refused(page, step, error):
    with pytest.raises(error):
        heartbeats.heartbeat(step)


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_an_invalid_section_limit_is_refused(limit):
    with pytest.raises(ValueError, match="more than 0 seconds"):
        heartbeats.heartbeat.section("x", limit=limit)


def test_heartbeats_of_a_forked_child_are_ignored(page):
    heartbeats.heartbeat(1)
    child = os.fork()
    if child == 0:
        heartbeats.heartbeat(99)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (page.word(COUNT), page.word(STEP)) == (1, 2)
    heartbeats.heartbeat(2)
    assert (page.word(COUNT), page.word(STEP)) == (2, 3)


PROGRAM = "import sys; from elasticrs.timer import heartbeat; heartbeat(5); assert 'mmap' in sys.modules"


def test_another_process_cannot_take_a_page_that_has_an_owner(page):
    heartbeats.heartbeat(1)
    subprocess.run([sys.executable, "-c", PROGRAM], pass_fds=[page.fd], check=True, timeout=30)
    assert (page.word(PID), page.word(STEP)) == (os.getpid(), 2)


def test_the_heartbeat_page_of_an_exited_process_can_be_taken_over(page):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROGRAM], pass_fds=[page.fd], check=True, timeout=30)
    # Two heartbeats were counted: one in the second program, and one when it returned.
    assert (page.word(STEP), page.word(COUNT)) == (6, 2)


LATER = "import threading; threading.Thread(target=lambda: (main.join(), heartbeat(9))).start()"
RETURNS = {
    "returns": ("", True),
    "raises": ("raise SystemExit(0)", True),
    "trains in a thread": (LATER, False),
    "leaves": ("import os; os._exit(0)", False),
}


@pytest.mark.parametrize("how", RETURNS)
def test_the_return_of_the_program_is_marked_unless_a_heartbeat_follows(page, how):
    end, is_exiting = RETURNS[how]
    program = f"{PROGRAM}; import threading; main = threading.main_thread(); {end}"
    subprocess.run([sys.executable, "-c", program], pass_fds=[page.fd], check=True, timeout=30)
    assert (page.word(EXIT) == max(page.times())) == is_exiting
    assert all(at & 1 for at in page.times() if at != page.word(EXIT)), "the exit ends no step"


@pytest.mark.parametrize("variable", ["", "x", "3", "1:2:3", "999999:1:1", "-1:0:0"])
def test_heartbeats_without_a_page_are_ignored(page, monkeypatch, variable):
    monkeypatch.setenv("ELASTICRS_HEARTBEAT", variable)
    heartbeats.heartbeat(1)
    with heartbeats.heartbeat.section("x", limit=1):
        heartbeats.heartbeat()
    assert page.word(COUNT) == 0
