"""Messages about a hung worker."""

from helpers import attempts
from helpers.attempts import seen
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside import flight
from elasticrs._engine.supervise import hang_diagnosis

SECOND = 10**9
RANKS = {0: 4, 1: 5, 2: 6, 3: 7}


def beat(local_rank, at, *more, **known):
    return attempts.beat(local_rank, int(at * SECOND), *more, **known)


def hung(ranks, *, since=40.0, **known):
    return attempts.hung(1, ranks, int(since * SECOND), 101 * SECOND, **known)


REDUCE = 'File "/lib/torch/distributed/distributed_c10d.py", line 2501 in all_reduce'
READ = 'File "/home of/train.py", line 41 in read'


def test_hang_messages_match_the_golden_file(golden):
    ranks = [seen(n, beat(n, 71.0, 1204), REDUCE) for n in (0, 2, 3)]
    ranks.append(seen(1, beat(1, 40.0, 1204), READ))
    device, futex = {"state": "D", "wait_channel": "nfs_wait"}, {"wait_channel": "futex_do_wait"}
    beats = [beat(0, 99.5, 1205), beat(1, 40, 1204), beat(2, 99.25, 1205), beat(3, 90, 1205, "checkpoint")]

    def line(told, **how):
        return hang_diagnosis.hung(told, RANKS, **how)

    texts = {
        "its step, and what the others do": line(hung(ranks)),
        "without details": line(hung([])),
        "waiting for a device": line(hung([seen(1, beat(1, 40.0), **device)])),
        "waiting in the kernel": line(hung([seen(1, None, **futex)], missed="startup")),
        "stopped": line(hung([seen(1, beat(1, 40.0), READ, state="T")])),
        "another node waits": line(hung([], limit=600.0), was_found_here=False),
        "another rank was late": line(hung([], limit=61.04)),
        "heartbeats": "\n".join(hang_diagnosis.heartbeat_notes(beats, 100 * SECOND, RANKS)),
    }
    golden("hang", texts)


def test_steps_that_the_launcher_counts_are_named_as_such():
    own, counted = beat(1, 40.0, 57), beat(1, 40.0, 57, is_automatic=True)
    after = "after optimizer step 57 of this attempt"
    for found, at, during in ((own, "at step 57", "in step 57"), (counted, after, after)):
        said = hang_diagnosis.hung(hung([seen(1, found)]), RANKS)
        assert f"stopped {at}" in said
        (note,) = hang_diagnosis.heartbeat_notes([found], 100 * SECOND, RANKS)
        assert f" {during}, " in note


def test_the_stack_of_the_current_thread_is_shown(tmp_path):
    path = tmp_path / "hang.txt"
    assert hang_diagnosis.stack(str(path)) is None
    path.write_text("no activity\n\nno stacks\n")
    assert hang_diagnosis.stack(str(path)) is None
    frames = "".join(f'  File "train.py", line {line} in f\n' for line in range(20))
    thread = 'Thread 0x1 (most recent call first):\n  File "other.py", line 1 in g\n\n'
    path.write_text(
        f"{thread}Current thread 0x2 (most recent call first):\n{frames}\nthreads in the kernel\n"
    )
    lines = (hang_diagnosis.stack(str(path)) or "").split("\n")
    assert lines[1] == '  File "train.py", line 0 in f'
    assert lines[-1] == "  (8 more)"
    assert len(lines) == hang_diagnosis.MAX_FRAMES + 2


def test_stacks_omit_the_thread_that_serves_diagnosis_requests(tmp_path):
    path = tmp_path / "hang.txt"
    own, other = (f'  File "{file}", line 1 in g\n' for file in (flight.__file__, "other.py"))
    header = "Thread 0x1 (most recent call first):\n"
    path.write_text(
        f'{header}{own}\n{header}{other}\nCurrent {header.lower()}  File "train.py", line 3 in f\n'
    )
    assert (hang_diagnosis.stack(str(path), others=3) or "").split("\n")[1:] == [
        '  File "train.py", line 3 in f',
        "another thread:",
        other.rstrip(),
    ]


@given(st.text(max_size=300))
def test_text_from_a_worker_is_made_printable_and_cut(text):
    for shown in (hang_diagnosis.place(text), hang_diagnosis.printable(text)):
        assert shown.isprintable()
        assert len(shown) <= 201
