"""Replays recorded failures and checks the decisions. Each row of the tables in ``docs/failures.md`` and each
rule of the restart policy and the root cause has at least one case.
"""

import json
import re
import tempfile
from pathlib import Path

import pytest
from helpers.said import says
from helpers.schema import DOCS
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.failures import failure
from elasticrs._engine.job import restart_policy
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import parse
from elasticrs._engine.nodes.protocol import round_outcome
from verdicts.played import NODES, Played, expected, orders

RECORDED = json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))
ENDS, CASES = RECORDED["ends"], RECORDED["cases"]

USAGE = "the script does not exist"
COVERED_BELOW = {USAGE, "POLICY-4"}
ELSEWHERE = {
    "a collective times out": "timer/test_hang_diagnosis_nodes.py",
    "`gloo::EnforceNotMet`": "verdicts/test_hangs.py",
    "the node did not answer": "network/test_hang_diagnosis.py",
    "a note about an Xid": "e2e/test_gpu_watch.py",
    "dead workers still hold": "e2e/test_gpu_watch.py",
    "fails before a node joins": "e2e/test_verdicts.py",
    "`nvml`": "unit/test_nvml_check.py",
}
"""Rows that need a real process or a service, with the tests that cover them."""
# ROOT-5 covers failures without exact times, which only code written for torch creates; see
# `tests/errors/test_root_cause.py`.
WITHOUT_TIMES = "ROOT-5"


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_every_node_reaches_the_recorded_verdict_in_any_report_order(case, tmp_path):
    for number, order in enumerate(orders(case)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for node, verdict in zip(NODES, Played(case, ENDS, folder, order).verdicts(), strict=False):
            found, wanted = verdict._asdict(), expected(case, node)
            assert {name: found[name] for name in wanted} == wanted, (order, node, verdict)
            says(verdict.text, *case["then"].get("says", ()))


def test_a_script_that_does_not_exist_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"missing\.py"):
        resolve(parse([str(tmp_path / "missing.py")], {}), {})


def rows():
    """Return the first cell of each table row in ``docs/failures.md``, except for the header rows."""
    text = (DOCS / "failures.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return [cell for cell in cells if cell not in ("symptom", "`--exit-codes`", "source", "---")]


def test_every_row_of_the_tables_and_every_rule_has_a_case():
    named = {row for case in CASES for row in case["rows"]} | COVERED_BELOW | ELSEWHERE.keys()
    assert [file for file in ELSEWHERE.values() if not (DOCS.parent / "tests" / file).exists()] == []
    rules = {
        rule
        for module in (restart_policy, failure, round_outcome)
        for rule in re.findall(r"\*\*([A-Z]+-\d)\*\*", module.__doc__)
    }
    assert len(rules) >= 12
    assert [row for row in rows() if not any(name in row for name in named)] == []
    assert [name for name in named - rules if not any(name in row for row in rows())] == []
    assert rules - named == {WITHOUT_TIMES}


@st.composite
def jobs(draw):
    """Draw a job of three nodes with two workers each. The workers end in any way, at different times."""
    times = iter(draw(st.permutations(range(6))))
    words = [draw(st.sampled_from(sorted(ENDS))) for _ in range(6)]
    workers = [word if word == "shot" else f"{word}@{100 * next(times)}" for word in words]
    nodes = " | ".join(", ".join(workers[place : place + 2]) for place in (0, 2, 4))
    options = draw(st.sampled_from(["--max-restarts 0", "--fatal-exit-codes 3,40-49", "--exit-codes worker"]))
    times = draw(st.sampled_from([1, 3]))
    step = draw(st.none() | st.integers(0, 3))
    return {"attempts": [{"nodes": nodes, "step": step, "times": times}], "options": options}


@pytest.mark.timeout(900)  # The thorough profile runs many examples.
@given(jobs(), st.permutations(range(3)))
def test_the_verdict_does_not_depend_on_the_order_of_the_reports(case, order):
    found = []
    for each in (range(3), order):
        with tempfile.TemporaryDirectory() as folder:
            verdicts = Played(case, ENDS, Path(folder), each).verdicts()
        found.append({verdict._replace(text="") for verdict in verdicts})
    assert found[0] == found[1]
    assert len(found[0]) == 1
