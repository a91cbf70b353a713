"""When a worker of the example is killed, the others keep running, and the final result is identical to the
last bit.
"""

import re

import pytest

EXAMPLE = "train_state"


def lines(*stamps):
    return "".join(f"stamp {what} rank=0 pid={pid} step={step} ns={ns}\n" for what, pid, step, ns in stamps)


FINAL = "final accuracy on held-out data: 97.5%, parameters abc\n"
DEATH = [
    *(("begins", pid, 0, pid) for pid in (1, 2, 3, 4)),
    ("dies", 4, 0, 10),
    *(("begins", pid, 0, 20) for pid in (1, 2, 3, 5)),
    *(("done", pid, 1, 30_000_010 + pid) for pid in (1, 2, 3, 5)),
]


@pytest.fixture
def tell(demo):
    demo.tell.__globals__["KILL_STEP"] = 0
    return demo.tell


def test_the_summary_names_the_surviving_workers_and_the_recovery_time(tell):
    account, broken = tell(FINAL, lines(*DEATH) + FINAL)
    assert broken == []
    assert any(re.search(r"\b1, 2, 3\b.*\b5\b", line) for line in account)
    assert any("30.0 ms" in line for line in account)


@pytest.mark.parametrize(
    ("stamps", "end"),
    [
        (DEATH, FINAL.replace("abc", "abd")),
        ([*DEATH[:5], *(("done", pid, 1, 40) for pid in (5, 6, 7, 8))], FINAL),
        ([*DEATH, ("done", 1, 3, 99)], FINAL),
        ([*DEATH[:4], *DEATH[5:]], FINAL),
        (DEATH, ""),
    ],
    ids=["another end", "all were restarted", "a step was left out", "nobody died", "it failed"],
)
def test_the_summary_reports_an_unexpected_result(tell, stamps, end):
    assert tell(FINAL, lines(*stamps) + end)[1]


@pytest.mark.slow
def test_the_demo_runs_as_documented(run_demo):
    text = run_demo("train_state/demo.py")
    assert re.search(r"[\d.]+ ms from the kill", text)
