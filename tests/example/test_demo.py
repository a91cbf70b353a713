"""The example, and the summary that its demo prints about a run."""

import json
from collections.abc import Callable
from typing import Any

import pytest

EXAMPLE = "ddp_digits"
MS = 1_000_000
WALL = 1_700_000_000_000


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


def event(
    name: str, at_ms: int, restarts: int, duration_ms: float | None = None, **about: Any
) -> dict[str, Any]:
    metadata = {"agent_restarts": restarts, "duration_ms": duration_ms, "metadata": json.dumps(about)}
    return {"name": name, "timestamp": WALL + at_ms, "metadata": metadata}


def good_events() -> list[dict[str, Any]]:
    return [
        event("torchelastic.worker.status.START", 1, 0, local_rank=[2], exit_code=[None]),
        *(
            event("torchelastic.worker.status.FAILED", 110, 0, local_rank=[rank], exit_code=[code])
            for rank, code in ((0, -15), (1, -15), (2, -9), (3, -15))
        ),
        event("torchelastic.worker.status.START", 115, 1, local_rank=[2], exit_code=[None]),
        event(
            "attempt running", 120, 1, 18.9, phases_ms={"signalling": 1.0, "stopping": 8.4, "starting": 9.5}
        ),
        event("torchelastic.worker.status.SUCCEEDED", 900, 1, local_rank=[2], exit_code=[0]),
    ]


def test_the_summary_of_a_good_run_matches_the_golden_file(demo, golden):
    story = demo.tell(0, good_lines(), good_events(), WALL)
    assert story.broken == []
    golden("demo", {"account of a good run": "\n".join(story.account)})


Change = Callable[[list[str], list[dict[str, Any]]], tuple[int, list[str], list[dict[str, Any]]]]
BROKEN: list[tuple[str, Change]] = [
    ("exit code 1", lambda lines, events: (1, lines, events)),
    ("no worker died", lambda lines, events: (0, [each for each in lines if "dies" not in each], events)),
    ("of ranks []", lambda lines, _: (0, lines, [])),
    ("no restart", lambda lines, events: (0, lines, events[:-2])),
    ("no SIGKILL of rank 2 alone", lambda lines, events: (0, lines, [*events[:3], *events[4:]])),
    ("of ranks [2, 2]", lambda lines, events: (0, lines, [events[3], *events])),
    (
        "resumed after epochs [1]",
        lambda lines, events: (0, [*lines[:-2], "resumed after epoch 1\n", lines[-1]], events),
    ),
    ("resumed after epochs []", lambda lines, events: (0, [*lines[:-2], lines[-1]], events)),
    ("resumed after epochs [2, 2]", lambda lines, events: (0, [*lines, lines[-2]], events)),
    ("no final accuracy", lambda lines, events: (0, lines[:-1], events)),
    (
        "not above 95.0 %",
        lambda lines, events: (0, [*lines[:-1], lines[-1].replace("97.50", "95.00")], events),
    ),
]


@pytest.mark.parametrize(("complaint", "change"), BROKEN, ids=[complaint for complaint, _ in BROKEN])
def test_the_summary_names_every_unexpected_result(demo, complaint, change):
    story = demo.tell(*change(good_lines(), good_events()), WALL)
    assert [each for each in story.broken if complaint in each]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_demo_runs_as_documented(run_demo, tmp_path):
    printed = run_demo("ddp_digits/demo.py", "--keep", tmp_path)
    assert "stamp up" not in printed
    assert "  training resumed after epoch 2, from its checkpoint\n" in printed
    assert [path.name for path in tmp_path.glob("*.pt*")] == ["digits.pt"]
