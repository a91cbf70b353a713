"""The demo `python -m elasticrs.demo`, and the summary that it prints about its run."""

import json
import sys
from typing import Any

import pytest
from helpers.launcher import clean_environment
from helpers.procs import run_program

from elasticrs.demo.__main__ import tell

WALL = 1_700_000_000
MESSAGE = "hung: no heartbeat for 2.00 s (limit 2 s); rank 1 did not enter it: it is in get (queue.py:171)"


def done(what: str, after: float, attempt: int, pid: int = 7, **values: float) -> dict[str, Any]:
    return {"what": what, "attempt": attempt, "pid": pid, "time": WALL + after, **values}


def good_records() -> list[dict[str, Any]]:
    return [
        *(done("trains", 0.1, 0, step=0) for _ in range(4)),
        done("killed", 1.0, 0, pid=12),
        *(done("trains", 1.2 + rank / 100, 1, step=100) for rank in range(4)),
        done("hung", 2.0, 1, pid=21),
        *(done("trains", 4.3 + rank / 100, 2, step=200) for rank in range(4)),
        done("ended", 5.0, 2, accuracy=99.66),
    ]


def event(name: str, after: float, restarts: int, duration_ms: float = 0.0, **about: Any) -> dict[str, Any]:
    metadata = {"agent_restarts": restarts, "duration_ms": duration_ms, "metadata": json.dumps(about)}
    return {"name": name, "timestamp": round(1000 * (WALL + after)), "metadata": metadata}


def good_events() -> list[dict[str, Any]]:
    return [
        event("attempt running", 0.05, 0),
        event("attempt running", 1.11, 1, 105.0),
        event("worker hung", 4.001, 1, worker_pid="21", message=MESSAGE),
        event("attempt running", 4.2, 2, 195.0),
    ]


def test_the_summary_of_a_good_run_matches_the_golden_file(golden):
    story = tell(0, good_records(), good_events())
    assert story.broken == []
    golden("demo", {"account of a good run": "\n".join(story.account)})


BROKEN = {
    "exit code 1": (1, good_records(), good_events()),
    "no recovery after rank 2": (0, good_records(), good_events()[2:]),
    "no recovery after rank 1": (0, good_records()[:-2], good_events()),
    "100 steps were lost after rank 2": (
        0,
        [*good_records()[:5], done("trains", 1.2, 1, step=0), *good_records()[6:]],
        good_events(),
    ),
    "another worker was blamed": (0, [{**each, "pid": 8} for each in good_records()], good_events()),
    "blamed, although rank 1": (0, good_records(), [*good_events()[:2], good_events()[3]]),
    "below 95.0 %": (0, good_records()[:-1], good_events()),
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_the_summary_names_every_unexpected_result(complaint):
    assert [each for each in tell(*BROKEN[complaint]).broken if complaint in each]


def test_the_demo_says_how_to_install_torch():
    run = "runpy.run_module('elasticrs.demo', run_name='__main__')"
    program = f"import runpy, sys; sys.modules['torch'] = None; {run}"
    ended = run_program([sys.executable, "-c", program], env=clean_environment())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "pip install torch" in ended.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_the_demo_runs_as_documented():
    ended = run_program([sys.executable, "-m", "elasticrs.demo"], env=clean_environment(), timeout=170)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("0 steps were lost") == 2
    assert "NOT AS PROMISED" not in ended.stdout
