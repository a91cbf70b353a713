"""Worker for ``test_hang_monkey.py``. Executes the plan in ``$PLAN`` for its attempt and rank.

Ranks that hang leave a mark in ``$MARKS``; the others go on to the next step only when all marks are there,
so that they are not behind.
"""

import ctypes
import json
import os
import select
import signal

from elasticrs import timer
from elasticrs.timer import heartbeat

RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
MARKS = os.environ["MARKS"]
pipe = os.pipe()


def wait_for_ever():
    while True:
        os.read(pipe[0], 1)


def leave_mark():
    os.close(os.open(f"{MARKS}/{ATTEMPT}.{RANK}", os.O_CREAT | os.O_WRONLY))


def leave(code):
    signal.signal(signal.SIGRTMIN + 12, lambda *_: os._exit(code))
    wait_for_ever()


def hold_the_gil():
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)


def loop():
    while True:
        pass


def be_stopped():
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


def ignore_signals():
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    wait_for_ever()


def stay_in_a_section():
    with heartbeat.section("checkpoint", limit=0.3):
        leave_mark()
        wait_for_ever()


def let_a_timer_expire():
    with timer.expires(after=60, scope="all of it"), timer.expires(after=0.2, scope="step"):
        wait_for_ever()


def have_children():
    for _ in range(3):
        if os.fork() == 0:
            # Leave the session and set an alarm, so that this process exits even if the agent dies.
            os.setsid()
            heartbeat(999)
            signal.alarm(30)
            wait_for_ever()
    wait_for_ever()


def spoil_the_page():
    """Overwrite this worker's heartbeat page. No other process is affected, because each worker has its own
    page.
    """
    fd = int(os.environ["ELASTICRS_HEARTBEAT"].split(":")[0])
    for act in (lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 1 << 20)):
        try:
            act()
        except OSError:
            continue
        raise AssertionError("the page could be resized")
    # Overwrite the name and the limit of a section, and unused words.
    os.pwrite(fd, os.urandom(8 * 40), 8 * 3)
    os.pwrite(fd, (10**8).to_bytes(8, "little"), 8 * 3)
    wait_for_ever()


HANGS = {
    "select": lambda: select.select([], [], [], 1000),
    "wait": wait_for_ever,
    "stopped": be_stopped,
    "loop": loop,
    "gil": hold_the_gil,
    "ignore": ignore_signals,
    "section": stay_in_a_section,
    "timer": let_a_timer_expire,
    "leave": lambda: leave(3),
    "children": have_children,
    "spoil": spoil_the_page,
}


def main():
    plan = json.loads(os.environ["PLAN"])[int(ATTEMPT)]
    what, step, hung = plan["ranks"][RANK], plan["step"], plan["hung"]
    if "TORCHELASTIC_TIMER_FILE" in os.environ:
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    heartbeat(step)
    if what in HANGS:
        # Leave the mark after the last heartbeat. Entering a section is also a heartbeat, so the section
        # leaves the mark itself.
        if what != "section":
            leave_mark()
        HANGS[what]()
    while not all(os.path.exists(f"{MARKS}/{ATTEMPT}.{rank}") for rank in hung):
        heartbeat(step)
        select.select([], [], [], 0.005)
    heartbeat(None if step is None else step + 1)
    if what == "peer":
        wait_for_ever()
    while what == "beats":
        heartbeat()
        select.select([], [], [], 0.01)
    while what == "unlimited":
        with heartbeat.section("evaluation", limit=None):
            wait_for_ever()
    assert what == "done", what
    os.write(1, b"DONE\n")


main()
