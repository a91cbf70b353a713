"""The example whose state is kept, and the summary that its demo prints about its runs."""

import pytest

EXAMPLE = "keep"
DONE = "done: accuracy 95.21%, sum of the parameters 0x1.5p+6\n"
LAST = {"kill": 64, "raise": 119, "hang": 189}
"""The last step that has ended before each accident."""


def output(*accidents, lost=0):
    """Return the output of a run in which each accident costs ``lost`` steps."""
    lines, ns = [], 0

    def add(what, attempt, step):
        nonlocal ns
        for rank in range(2):
            ns += 10**8
            lines.append(f"stamp {what} rank={rank} attempt={attempt} step={step} ns={ns}\n")

    begin = 0
    for attempt, kind in enumerate((*accidents, None)):
        end = 240 if kind is None else LAST[kind]
        add("continues", attempt, begin)
        for step in range(begin + 1, end + 1):
            add("ended", attempt, step)
        if kind is not None:
            lines.append(f"stamp {kind} rank=1 attempt={attempt} step={end + 1} ns={ns}\n")
            begin = end - lost
    return "".join(lines) + DONE


THEIRS = output("kill", "raise", lost=14)
KEPT = output("kill", "raise", "hang")


def test_the_summary_shows_the_cost_of_each_accident(demo):
    story = demo.tell(DONE, THEIRS, KEPT)
    assert story.broken == []
    rows = [line.split("  ") for line in story.account]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert cells["SIGKILL of a worker"] == ["14 steps lost, 3.2 s", "0 steps lost, 0.4 s"]
    assert cells["hang of a worker"] == ["not noticed", "0 steps lost, 0.4 s"]


@pytest.mark.parametrize(
    ("undisturbed", "kept", "complaint"),
    [
        (DONE, output("kill", "raise", "hang", lost=1), "SIGKILL of a worker: 1 steps lost"),
        (DONE, output("kill", "raise"), "hang of a worker: no recovery"),
        (DONE.replace("0x1.5p", "0x1.6p"), KEPT, "ended differently"),
        ("", KEPT, "a job failed"),
        (DONE, "", "a job failed"),
    ],
    ids=["a step was lost", "no hang", "another end", "undisturbed failed", "failed"],
)
def test_the_summary_names_an_unexpected_result(demo, undisturbed, kept, complaint):
    assert any(complaint in each for each in demo.tell(undisturbed, THEIRS, kept).broken)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_demo_runs_as_documented(run_demo):
    assert "0 steps lost" in run_demo("keep/demo.py")
