"""The whole way, from real gloo processes to the name of the culprit."""

import pytest

from diagnosis.recorded_evidence import evidence_from
from elasticrs.diagnosis.diagnose import diagnose
from elasticrs.diagnosis.values import Confidence, Reason


@pytest.mark.torch
def test_the_rank_that_loads_data_is_named():
    from diagnosis.recording import LOAD, Scenario, record, reduce

    scenario = Scenario(3, {1: [reduce(), LOAD], -1: [reduce(), reduce()]}, {1: 1, -1: 2})
    found = diagnose(evidence_from(record(scenario)))
    (culprit,) = found.culprits
    assert (culprit.ranks, culprit.reason) == ((1,), Reason.DID_NOT_ENTER), found.evidence
    assert culprit.confidence is Confidence.CERTAIN
    assert found.summary.startswith(
        "2 of 3 ranks wait in all_reduce #2 of the default group (collectives.py:"
    )
