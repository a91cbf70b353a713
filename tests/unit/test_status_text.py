"""The texts of ``elasticctl status``, from statuses as agents tell them."""

import signal
import socket
import subprocess
from contextlib import closing

import pytest
from helpers import procs
from hypothesis import given
from hypothesis import strategies as st

from elasticrs import __version__, ctl
from elasticrs._engine.cli.control_client import find, why_silent
from elasticrs._engine.cli.stacks_text import text
from elasticrs._engine.cli.watch import Watch, screen
from elasticrs._engine.supervise.observe.status_text import (
    MAX_SHOWN,
    letters,
    page,
    ranks_table,
    remarks,
    row,
    sentence,
    table,
)
from elasticrs._engine.supervise.run.agreed_step import Delivery
from elasticrs._engine.supervise.run.orders import _tell_delivery, _who_continues


def worker(rank, state="RUNNING", step=None, age=0.5, **fields):
    beat = None if step is None else {"step": step, "age_seconds": age, "section": None}
    return {
        "rank": rank,
        "local_rank": rank,
        "pid": 100 + rank,
        "state": state,
        "exitcode": None,
        "heartbeat": beat,
    } | fields


def status(workers, **fields):
    return {
        "job": {"name": "/a/train.py", "run_id": "llama", "max_restarts": 3},
        "agent": {"pid": 7, "alive": True, "reason": None, "uptime_seconds": 7.25},
        "group": {"world_size": 2, "workers": 2 * len(workers)},
        "state": "HEALTHY",
        "restarts": 1,
        "attempt": "1",
        "no_progress": None,
        "slowest": None,
        "last_failure": None,
        "host": "n0",
        "others": [],
        "log_folder": None,
        "has_log_files": False,
        "workers": workers,
    } | fields


def test_rows_of_agents_on_one_machine_have_names_of_their_own():
    told = [{"node": "n0", "group_rank": 1, "age_seconds": 1.0, "workers": [worker(1)]}]
    told.append({"node": "n2", "group_rank": 2, "age_seconds": 1.0, "workers": [worker(2)]})
    found = status([worker(0)], others=told, group={"rank": 0, "world_size": 3, "workers": 3})
    assert [line.split()[1] for line in ranks_table(found)[1:]] == ["n0:0", "n0:1", "n2"]


def test_the_sentence_is_wrapped_and_longer_lines_are_cut_at_the_width_of_the_terminal():
    found = status([worker(0)], no_progress={"what": "no progress " * 20})
    lines = screen(found, [], "keys", 40, 30)
    assert " ".join(lines[:3]).startswith(sentence(found))
    assert max(map(len, lines)) == 40
    assert {line[-1] for line in lines if len(line) == 40} == {"…"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["stat"], "did you mean status?"),
        (["nonsense"], "there are ps, status"),
        (["status", "--wach"], "did you mean --watch?"),
        (["logs", "--rnak=3"], "did you mean --rank?"),
        (["--nonsense", "ps"], "unknown argument '--nonsense'"),
        (["ps", "extra"], "unknown argument 'extra'"),
        ([], "a command is missing, for example: elasticctl ps"),
        (["drain", "--stay-out"], "(for example: elasticctl drain gpu009)"),
        (["logs", "--rank"], "(for example: elasticctl logs --rank 3)"),
        (["logs", "-r", "x"], "--rank: got 'x', expected a whole number, 0 or more (for example:"),
        (["logs", "--lines=-3"], "--lines: got '-3', expected a whole number, 0 or more (for example:"),
        (["status", "--job"], "(for example: elasticctl status --job llama)"),
        (["stacks", "--all=3"], "(see elasticctl stacks --help)"),
        (["--job", "llama", "status"], "(for example: elasticctl status --job llama)"),
    ],
)
def test_a_wrong_word_of_the_command_line_is_named_with_a_similar_one(capsys, args, said):
    assert ctl.main(args) == 2
    written = capsys.readouterr()
    assert (written.out, said in written.err, "usage:" in written.err) == ("", True, False), written.err


def test_the_sentence_says_how_the_job_is():
    found = sentence(status([worker(0, step=18412, age=0.25), worker(1, step=18411, age=0.5)]))
    assert found == (
        "train.py (job llama): running with 4 ranks on 2 nodes for 7.2 s, step 18,412 (0.2 s ago),"
        " 1 of 3 restarts used"
    )
    assert sentence(status([], group=None, state="INIT")).startswith("train.py (job llama): starting for")
    failed = sentence(
        status([worker(0, step=278, age=5.9)], group={"world_size": 1, "workers": 2}, state="FAILED")
    )
    assert failed.startswith(
        "train.py (job llama): failed with 2 ranks after 7.2 s, last step 278 (5.9 s ago), 1"
    )


@pytest.mark.parametrize(
    ("run_id", "shown"),
    [
        ("0b9a5f2e-7c41-4d3b-9a57-3f0d8e6c1b22", "0b9a5f2e"),
        ("0b9a5f2e-7c41-4d3b-9a57-3f0d8e6c1bXX", "0b9a5f2e-7c41-4d3b-9a57-3f0d8e6c1bXX"),
        ("llama-1", "llama-1"),
    ],
)
def test_a_run_id_that_is_a_uuid_is_shortened(run_id, shown):
    found = status([worker(0)], job={"name": "/a/train.py", "run_id": run_id, "max_restarts": 3})
    assert sentence(found).startswith(f"train.py (job {shown}): running")
    assert row(7, found)[0] == shown


def failure(rank, attempt="1", what="exited with code 1", **fields):
    return {"rank": rank, "pid": 100 + rank, "attempt": attempt, "what": what, "exception": None, **fields}


def told(rank, number, counts, age=0.25, **fields):
    return worker(rank, progress={"step": number, "counts": counts, "age_seconds": age}, **fields)


@pytest.mark.parametrize(
    ("counts", "attempt", "expected"),
    [
        ("keep", "1", "9"),
        ("script", "1", "9"),
        ("attempt", "0", "9"),
        ("attempt", "1", "9 of this attempt"),
    ],
)
def test_steps_of_the_attempt_are_named_once_the_job_has_restarted(counts, attempt, expected):
    found = status([told(0, 9, counts, step=3)], attempt=attempt)
    assert row(7, found)[5:7] == (expected, "0.2 s")
    assert f", step {expected} (0.2 s ago), " in sentence(found)
    assert ranks_table(found)[1].endswith(f"running  {expected.ljust(4)}  0.2 s")


def test_a_step_of_keep_comes_before_those_of_the_attempt_and_may_have_no_age():
    found = status([told(0, 7, "keep", None), told(1, 90, "attempt", None)])
    assert row(7, found)[5:7] == ("7", "-")
    assert ", step 7, 1 of " in sentence(found)
    assert remarks(found) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": "EXITED", "exitcode": 1}, "rank 1: exited with code 1"),
        ({"state": "PAUSED"}, "rank 1: stopped by a signal; kill -CONT 101 continues it"),
        ({"step": 7}, "rank 1: 2 steps behind the others"),
        ({"step": 8}, None),
    ],
)
def test_ranks_that_need_a_look_are_named(fields, expected):
    workers = [worker(0, step=9), worker(1, **{"step": 9, **fields})]
    assert remarks(status(workers)) == ([] if expected is None else [expected])


def test_ranks_of_other_nodes_are_shown_with_their_nodes():
    told = {"node": "n1", "group_rank": 1, "age_seconds": 2.0}
    others = [
        {**told, "workers": [worker(2, progress={"step": 9, "counts": "keep", "age_seconds": 0.5})]},
        {**told, "node": "n2", "group_rank": 2, "workers": [worker(1, "PAUSED", 9)]},
    ]
    found = status([worker(0, step=12, age=4.0)], others=others, group={"world_size": 4, "workers": 4})
    lines = ranks_table(found)
    assert [line.split()[:2] for line in lines[:4]] == [
        ["RANK", "NODE"],
        ["0", "n0"],
        ["1", "n2"],
        ["2", "n1"],
    ]
    assert lines[0].endswith("AS OF")
    assert lines[1].endswith("  now")
    assert lines[3].endswith("9     2.5 s      2.0 s ago")
    assert lines[4] == "and 1 rank of which other nodes have not told yet"
    assert ", step 12 (0.5 s ago), " in sentence(found)
    assert "rank 1: stopped by a signal; kill -CONT 101 on n2 continues it" in remarks(found)
    many = {**told, "workers": [worker(rank) for rank in range(4, 30)]}
    assert [
        (node, len(ranks))
        for node, ranks, _ in page({**found, "others": [many], "earlier_failures": []})["grid"]
    ] == [
        ("n0", 1),
        ("n1", 26),
    ]


def test_a_failure_a_stuck_agent_and_missing_progress_are_told_in_the_order_of_their_weight():
    found = remarks(
        status(
            [],
            agent={"pid": 7, "alive": False, "reason": "its loop hangs", "uptime_seconds": 1.0},
            no_progress={"what": "no progress for 6.1 s"},
            last_failure=failure(3, "0", exception="ValueError: x\x1b[2J"),
        )
    )
    assert found == [
        "the agent does not work: its loop hangs (its pid is 7)",
        "no progress for 6.1 s; see elasticctl stacks --job 7",
        "last failure: rank 3 (pid 103) in attempt 0: exited with code 1: ValueError: x?[2J",
    ]


@pytest.mark.parametrize("has_files", [True, False])
def test_the_log_folder_is_told_if_it_has_log_files(has_files):
    found = remarks(status([], log_folder="/tmp/run", has_log_files=has_files))
    assert found == (["logs in /tmp/run; see elasticctl logs --job 7"] if has_files else [])


def test_of_many_ranks_the_most_urgent_are_in_the_table_and_all_have_a_letter():
    group = {"world_size": 1, "workers": 0}
    workers = [worker(rank, step=100 - (rank < 20) * (30 - rank)) for rank in range(256)]
    workers[200] |= {"state": "EXITED", "exitcode": -9}
    workers[201]["state"] = "PAUSED"
    lines = ranks_table(status(workers, group=group))
    assert len(lines) == MAX_SHOWN + 2
    assert [line.split()[0] for line in lines[1:4]] == ["200", "201", "0"]
    assert lines[-1] == "and 240 more ranks"
    assert ranks_table(status(workers[: MAX_SHOWN + 1], group=group))[-1] == "and 1 more rank"
    grid = letters(status(workers))
    assert "".join(line[7:] for line in grid[1:5]) == "b" * 20 + "." * 180 + "Fp" + "." * 54
    assert letters(status(workers[:MAX_SHOWN])) == []


def test_a_failed_rank_comes_before_those_that_elasticrs_stopped_and_after_the_cause():
    killed = {"state": "EXITED", "exitcode": -9, "was_stopped": False}
    stopped = {"state": "EXITED", "exitcode": -15, "was_stopped": True}
    workers = [worker(0, **stopped), worker(1, **killed), worker(2, **stopped)]
    cause = failure(1, what="died by SIGKILL", time_ms=1)
    found = status(workers, state="UNHEALTHY", last_failure=cause, earlier_failures=[])
    assert remarks(found) == [
        "cause: rank 1 (pid 101) in attempt 1: died by SIGKILL",
        "rank 1: died by SIGKILL",
        "ranks 0, 2: stopped by elasticrs",
    ]
    assert [letter for letter, _ in page(found)["rows"]] == ["s", "F", "s"]
    assert [line.split()[2] for line in ranks_table(found)[1:4]] == ["stopped", "exited", "stopped"]


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED"])
def test_at_the_end_the_page_tells_the_outcome_the_cause_and_the_logs_but_nothing_to_do(state):
    failed = state == "FAILED"
    ended = {"state": "EXITED", "exitcode": int(failed), "was_stopped": False}
    found = status(
        [worker(0, **ended)],
        state=state,
        no_progress={"what": "no progress for 6.1 s"},
        last_failure=failure(0, time_ms=1) if failed else None,
        earlier_failures=[],
        log_folder="/tmp/run",
        has_log_files=True,
    )
    shown = page(found)
    assert shown["commands"] == []
    cause = [
        ("bad", "cause: rank 0 (pid 100) in attempt 1: exited with code 1"),
        ("bad", "rank 0: exited with code 1"),
    ]
    assert shown["remarks"] == [*(cause if failed else []), ("note", "logs in /tmp/run")]


def test_at_the_end_a_cause_on_another_node_is_told():
    cause = {"rank": 3, "node": "n1", "round": 0, "what": "rank 3 on node n1 died by SIGKILL"}
    found = status([], state="FAILED", cause=cause)
    assert remarks(found) == ["cause: rank 3 on node n1 died by SIGKILL"]
    assert remarks(found | {"state": "HEALTHY"}) == []


def test_the_page_says_which_signals_checkpoint_and_stop_send():
    commands = {
        command.split()[1]: what for command, what in page(status([], earlier_failures=[]))["commands"]
    }
    assert "SIGUSR1" in commands["checkpoint"]
    assert "SIGTERM" in commands["stop"]


@pytest.mark.parametrize("ranks", [1, MAX_SHOWN + 1])
def test_the_page_says_what_the_terminal_says(ranks):
    workers = [worker(rank, step=9) for rank in range(ranks)]
    workers[0] |= {"state": "EXITED", "exitcode": 1}
    stopped = status(
        workers,
        host="gpu001",
        state="NO_PROGRESS",
        no_progress={"what": "no progress for 6.1 s"},
        earlier_failures=[failure(0, "0", time_ms=1)],
        last_failure=failure(0, "0", time_ms=2),
    )
    shown = page(stopped)
    assert f"{shown['title']}: {shown['sentence']}" == sentence(stopped)
    assert [text for _, text in shown["remarks"]] == remarks(stopped)
    assert [weight for weight, _ in shown["remarks"][:3]] == ["bad", "bad", "note"]
    lines = table([shown["titles"], *(cells for _, cells in shown["rows"])])
    assert [line.split() for line in lines] == [line.split() for line in ranks_table(stopped)[:2]]
    assert shown["weight"] == "bad"
    assert shown["rows"][0][0] == "F"
    assert len(shown["failures"]) == 2
    assert all("--job 7" in command for command, _ in shown["commands"])
    assert any("drain" in command for command, _ in shown["commands"])
    alone = page(stopped | {"group": {"world_size": 1, "workers": ranks}})
    assert not any("drain" in command for command, _ in alone["commands"])
    if ranks == 1:
        assert shown["grid"] == []
    else:
        assert shown["grid"] == [("gpu001", list(range(ranks)), "F" + "n" * (ranks - 1))]
        assert shown["grid"][0][2] in letters(stopped)[1]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (87, 69, []),
        (69, 87, ["rank 0: 18 steps behind the others"]),
    ],
)
def test_a_rank_is_behind_only_if_others_had_more_steps_at_an_earlier_time(own, other, expected):
    # The other node has told its step 0.8 s ago, and its rank may have made more steps since then.
    told = {"node": "gpu2", "group_rank": 1, "state": "HEALTHY", "age_seconds": 0.8}
    others = [{**told, "workers": [worker(1, step=other)]}]
    assert remarks(status([worker(0, step=own)], host="gpu1", others=others)) == expected


def test_the_page_of_a_process_without_a_job_says_so():
    assert "no" in page({"agent": {"pid": 7}})["sentence"]


def test_an_agent_that_does_not_answer_has_a_row():
    assert row(7, None)[2:4] == ("does not answer", "-")
    assert table([("A", "LONG"), ("xx", "y")]) == ["A   LONG", "xx  y"]


@given(
    ranks=st.integers(0, MAX_SHOWN + 9),
    width=st.integers(1, 200),
    height=st.integers(2, 60),
    below=st.lists(st.text(max_size=300), max_size=40),
)
def test_the_screen_fits_the_terminal(ranks, width, height, below):
    lines = screen(status([worker(rank) for rank in range(ranks)]), below, " q quit ", width, height)
    assert len(lines) == height
    assert all(len(line) <= width and line.isprintable() for line in lines[:-1] if not below)
    assert all(len(line) <= width for line in lines)


def test_the_step_of_a_delivery_is_one_of_this_attempt():
    answers = []
    _tell_delivery(answers.append, 3, Delivery(signal.SIGUSR1, 1391, waited=0.0125))
    (answer,) = answers
    assert answer["step"] == 1391
    assert answer["message"] == ("SIGUSR1 sent to 3 ranks after step 1,391 of this attempt, held 12.5 ms")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (1, "1 rank has ended, or its node "),
        (2, "2 ranks have ended, or their node "),
    ],
)
def test_stacks_say_how_many_ranks_are_missing(others, expected):
    answer = {"message": "", "stacks": [], "silent": [], "has_py_spy": False}
    last = text({**answer, "ranks": 1, "world_size": 1 + others}, is_whole=False)[-1]
    assert last.startswith(expected)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "agent 1 was killed: removed the socket that it has left, {}/1.sock"),
        (15, "removed the sockets of 15 agents that were killed"),
    ],
)
def test_one_line_tells_of_all_sockets_that_killed_agents_have_left(tmp_path, monkeypatch, count, expected):
    (folder := tmp_path / "c").mkdir(mode=0o700)
    monkeypatch.setenv("ELASTICRS_CONTROL_DIR", str(folder))
    for pid in range(1, count + 1):
        with closing(socket.socket(socket.AF_UNIX)) as left:
            left.bind(str(folder / f"{pid}.sock"))
    told = []
    assert find(told.append) == []
    assert told == [expected.format(folder)]
    assert not any(folder.iterdir())


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        ctl.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"elasticrs {__version__}\n"


@pytest.mark.parametrize("key", ["h", "?"])
def test_a_key_explains_the_keys(key):
    watch = Watch(None, status([]))
    watch._on_key(key)
    assert [line.split()[0] for line in watch._below] == list("tlcdrshq")


def test_one_node_continues_and_several_continue():
    assert [_who_continues(nodes) for nodes in (1, 2)] == ["1 node continues", "2 nodes continue"]


def test_a_silent_agent_is_told_with_what_ends_or_continues_it():
    """A program takes the place of the agent."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as agent:
        assert f"kill -9 {agent.pid} ends the job" in why_silent(agent.pid)
        agent.send_signal(signal.SIGSTOP)
        procs.wait_state(agent.pid, "T")
        assert f"kill -CONT {agent.pid}" in why_silent(agent.pid)
        agent.send_signal(signal.SIGCONT)


LATE = {"times": 41, "of": 50, "operation": "all_reduce", "lag_ms": 12.4, "may_wait": False}


def test_a_late_rank_is_named_with_its_delay_and_the_command_that_tells_more():
    found = status([worker(0), worker(1, late=LATE), worker(2, late=None)])
    text = "12 ms (median) behind the others{} in 41 of 50 all_reduce{}; see elasticctl stacks --job 7"
    assert remarks(found) == [f"rank 1: {text.format('', '')}"]
    assert [row[0] for row in page({**found, "earlier_failures": []})["rows"]] == [".", "l", "."]
    other = {"node": "gpu9", "group_rank": 1, "age_seconds": 1.0}
    other["workers"] = [worker(3, late={**LATE, "may_wait": True})]
    doubt = "; it may itself wait for another rank"
    assert remarks(status([worker(0)], others=[other])) == [f"rank 3: {text.format(' on gpu9', doubt)}"]
    # A job without progress has other reasons to be looked at, and a rank that has exited is not late.
    hung = status([worker(1, late=LATE)], no_progress={"what": "no progress"})
    assert remarks(hung) == ["no progress; see elasticctl stacks --job 7"]
    assert "behind" not in str(remarks(status([worker(1, "EXITED", exitcode=0, late=LATE)])))


def test_ranks_without_a_flight_recorder_are_named_because_they_cannot_be_found_late():
    found = status([worker(rank, has_recorder=None if rank == 2 else False) for rank in range(4)])
    (line,) = remarks(found)
    assert line.startswith("ranks 0, 1, 3: cannot be seen if slow: torch's flight recorder is off")
    assert remarks({**found, "state": "SUCCEEDED"}) == []
