"""The example of a rank that hangs, and the summary that its demo prints about a run."""

import pytest

from elasticrs._engine.job.phrases import restart_line

EXAMPLE = "hang"

GOOD = [
    "epoch 1/6: loss 0.0935\n",
    "elasticrs: "
    + restart_line("rank 2 (pid 7): hung: no heartbeat for 3.00 s (limit 3 s); stopped at step 57", "1 of 2")
    + "\n",
    "resumed after epoch 2\n",
    "final accuracy on held-out data: 98.61%\n",
]
EVIDENCE = """no activity for 3.000 s

Current thread 0x00007f0000000002 (most recent call first):
  File "queue.py", line 171 in get
  File "train.py", line 94 in hang_if_told

threads in the kernel: state, name, wait channel, stack
"""


def test_the_summary_of_a_good_run_shows_the_hung_rank(demo):
    story = demo.tell(0, GOOD, EVIDENCE)
    assert story.broken == []
    assert '    File "train.py", line 94 in hang_if_told' in story.account
    assert any(line.startswith("  rank 2 hung: ") for line in story.account)


@pytest.mark.parametrize(
    ("exitcode", "line", "instead", "evidence", "broken"),
    [
        (1, 0, "", EVIDENCE, "the launcher ended with exit code 1"),
        (0, 1, "", EVIDENCE, "nobody was found to hang"),
        (0, 1, GOOD[1].replace("rank 2", "rank 0"), EVIDENCE, "not rank 2 was blamed, but rank 0"),
        (0, 0, "", "no Python stacks", "its stack was not kept"),
        (0, 2, "", EVIDENCE, "resumed after epochs [], not once after epoch 2"),
        (0, 3, "", EVIDENCE, "no final accuracy"),
        (0, 3, GOOD[3].replace("98.61", "95.00"), EVIDENCE, "the accuracy is not above 95.0 %"),
    ],
)
def test_the_summary_names_an_unexpected_result(demo, exitcode, line, instead, evidence, broken):
    lines = [*GOOD[:line], instead, *GOOD[line + 1 :]]
    assert demo.tell(exitcode, lines, evidence).broken == [broken]


@pytest.mark.slow
def test_the_demo_runs_as_documented(run_demo, tmp_path):
    assert "in get" in run_demo("hang/demo.py", "--keep", tmp_path)
