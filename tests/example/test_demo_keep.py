"""The example whose state is kept, and the summary that its demo prints about its runs."""

import pytest

EXAMPLE = "keep"
DONE = "done: accuracy 95.21%, sum of the parameters 0x1.5p+6\n"
LAST = {"kill": 64, "raise": 119, "hang": 189, "drain": 89, "lose": 164}
"""The last step that has ended before each accident."""


def output(*accidents, lost=0):
    """Return the output of a run in which each accident costs ``lost`` steps."""
    lines, ns = [], 0

    def add(what, step):
        nonlocal ns
        for rank in range(2):
            ns += 10**8
            lines.append(f"stamp {what} rank={rank} step={step} ns={ns} pid=7\n")

    begin = 0
    for kind in (*accidents, None):
        end = 240 if kind is None else LAST[kind]
        add("continues", begin)
        for step in range(begin + 1, end + 1):
            add("ended", step)
        if kind is not None:
            lines.append(f"stamp {kind} rank=1 step={end + 1} ns={ns} pid=7\n")
            begin = end - lost
    return "".join(lines) + DONE


ON_NODES = ("drain", "lose")
THEIRS = [output("kill", "raise", lost=14), output(*ON_NODES, lost=13)]
KEPT = [output("kill", "raise", "hang"), output(*ON_NODES)]


def test_the_summary_shows_the_cost_of_each_accident(demo):
    story = demo.tell(DONE, THEIRS, KEPT)
    assert story.broken == []
    rows = [line.split("  ") for line in story.account]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert cells["SIGKILL of a worker"] == ["14 steps lost, 3.1 s", "0 steps lost, 0.3 s"]
    assert cells["hang of a worker"] == ["not noticed", "0 steps lost, 0.3 s"]
    assert cells["loss of a node"] == ["13 steps lost, 2.9 s", "0 steps lost, 0.3 s"]


@pytest.mark.parametrize(
    ("undisturbed", "kept", "complaint"),
    [
        (DONE, [output("kill", "raise", "hang", lost=1), KEPT[1]], "SIGKILL of a worker: 1 steps lost"),
        (DONE, [output("kill", "raise"), KEPT[1]], "hang of a worker: no recovery"),
        (DONE, [KEPT[0], output(*ON_NODES, lost=1)], "SIGTERM to a node: 1 steps lost"),
        (DONE.replace("0x1.5p", "0x1.6p"), KEPT, "ended differently"),
        ("", KEPT, "a job failed"),
        (DONE, ["", KEPT[1]], "a job failed"),
        (DONE, [KEPT[0], ""], "a job failed"),
    ],
    ids=[
        "step lost",
        "no hang",
        "step lost by a drain",
        "another end",
        "undisturbed failed",
        "failed",
        "nodes",
    ],
)
def test_the_summary_names_an_unexpected_result(demo, undisturbed, kept, complaint):
    assert any(complaint in each for each in demo.tell(undisturbed, THEIRS, kept).broken)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_the_demo_runs_as_documented(run_demo):
    assert "0 steps lost" in run_demo("keep/demo.py", timeout=580)
