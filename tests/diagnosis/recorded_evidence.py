"""Evidence from real gloo groups, recorded by ``recording.py``."""

import json
from pathlib import Path

from elasticrs._engine.hangs.diagnose import RankEvidence
from elasticrs._engine.hangs.flight_record import NoRecord

RECORDED = Path(__file__).resolve().parent / "recorded"


def evidence_from(ranks, *, knows_groups=True, has_stacks=True):
    """Return the evidence that recorded ranks reported. There are two ranks on each node."""
    return [
        RankEvidence(
            rank["rank"],
            f"node{rank['rank'] // 2}",
            (rank["record"].encode(),) if "record" in rank else NoRecord.EXITED,
            rank.get("stacks") if has_stacks else None,
            rank.get("groups", {}) if knows_groups else {},
            rank.get("raised", False),
        )
        for rank in ranks
    ]


def recorded(name, **options):
    """Return the recorded evidence of one scenario."""
    return evidence_from(json.loads((RECORDED / f"{name}.json").read_text())["ranks"], **options)
