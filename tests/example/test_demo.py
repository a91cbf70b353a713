"""The example, and the summary that its demo prints about a run."""

from collections.abc import Callable
from typing import Any

import pytest

EXAMPLE = "ddp_digits"
MS = 1_000_000


def good_lines() -> list[str]:
    return [
        *(f"stamp up rank={rank} attempt=0 ns={rank}\n" for rank in range(4)),
        "epoch 1/8: loss 0.5, accuracy 90.00%\n",
        "epoch 2/8: loss 0.5, accuracy 90.00%\n",
        f"stamp dies rank=2 attempt=0 ns={100 * MS}\n",
        *(f"stamp up rank={rank} attempt=1 ns={140 * MS + rank}\n" for rank in range(4)),
        *(f"stamp trains rank={rank} attempt=1 ns={240 * MS + rank}\n" for rank in range(4)),
        "resumed after epoch 2\n",
        "final accuracy on held-out data: 97.50%\n",
    ]


def good_records() -> list[dict[str, Any]]:
    return [
        {"event": "started", "ns": 1, "restart_count": 0, "pids": [1, 2, 3, 4]},
        {
            "event": "failure_seen",
            "ns": 100 * MS + 200_000,
            "restart_count": 0,
            "local_rank": 2,
            "exitcode": -9,
        },
        {"event": "siblings_signalled", "ns": 100 * MS + 400_000, "restart_count": 0, "siblings": 3},
        {"event": "group_ended", "ns": 110 * MS, "restart_count": 0},
        {"event": "started", "ns": 115 * MS, "restart_count": 1, "pids": [5, 6, 7, 8]},
        {"event": "group_ended", "ns": 900 * MS, "restart_count": 1},
    ]


def test_the_summary_of_a_good_run_matches_the_golden_file(demo, golden):
    story = demo.tell(0, good_lines(), good_records())
    assert story.broken == []
    golden("demo", {"account of a good run": "\n".join(story.account)})


Change = Callable[[list[str], list[dict[str, Any]]], tuple[int, list[str], list[dict[str, Any]]]]
BROKEN: list[tuple[str, Change]] = [
    ("exit code 1", lambda lines, records: (1, lines, records)),
    ("no worker died", lambda lines, records: (0, [each for each in lines if "dies" not in each], records)),
    ("shows no failure", lambda lines, _: (0, lines, [])),
    ("no restart", lambda lines, records: (0, lines, records[:4])),
    (
        "not the SIGKILL of rank 2",
        lambda lines, records: (0, lines, [{**records[1], "exitcode": 1}, *records]),
    ),
    (
        "resumed after epochs [1]",
        lambda lines, records: (0, [*lines[:-2], "resumed after epoch 1\n", lines[-1]], records),
    ),
    ("resumed after epochs []", lambda lines, records: (0, [*lines[:-2], lines[-1]], records)),
    ("resumed after epochs [2, 2]", lambda lines, records: (0, [*lines, lines[-2]], records)),
    ("no final accuracy", lambda lines, records: (0, lines[:-1], records)),
    (
        "not above 95.0 %",
        lambda lines, records: (0, [*lines[:-1], lines[-1].replace("97.50", "95.00")], records),
    ),
]


@pytest.mark.parametrize(("complaint", "change"), BROKEN, ids=[complaint for complaint, _ in BROKEN])
def test_the_summary_names_every_unexpected_result(demo, complaint, change):
    story = demo.tell(*change(good_lines(), good_records()))
    assert [each for each in story.broken if complaint in each]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_demo_runs_as_documented(run_demo, tmp_path):
    printed = run_demo("ddp_digits/demo.py", "--keep", tmp_path)
    assert "stamp up" not in printed
    assert "  training resumed after epoch 2, from its checkpoint\n" in printed
    assert [path.name for path in tmp_path.glob("*.pt*")] == ["digits.pt"]
