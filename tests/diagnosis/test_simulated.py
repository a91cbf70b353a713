"""Diagnosis of culprits in a model of desynchronised ranks."""

import random

from hypothesis import assume, example, given
from hypothesis import strategies as st

from diagnosis.model import FAULTS, Run, job, mesh, program, with_fault
from elasticrs._engine.hangs.culprits import Confidence
from elasticrs._engine.hangs.diagnose import diagnose
from elasticrs._engine.hangs.flight_record import NoRecord

SHAPES = [(3, 3), (3, 4), (4, 4), (5, 3), (1, 5), (1, 8), (2, 2), (2, 3), (1, 2)]


def simulated(seed, shapes):
    """Return a simulated job with one faulty rank, and that rank. ``None`` if the fault does not block the
    job.
    """
    source = random.Random(seed)
    groups = [group for group in mesh(*source.choice(shapes)) if len(group[1]) > 1]
    kinds = {kind for kind, _ in groups}
    steps = [step for step in program(source, source.randrange(5, 30)) if step[0] in kinds]
    if not steps:
        return None
    healthy = job(groups, steps)
    rank = source.randrange(len(healthy.programs))
    run = Run(with_fault(healthy, rank, source.randrange(len(steps)), source.choice(FAULTS)))
    return (run, rank) if run.is_stuck() else None


def named(diagnosis):
    return {rank for culprit in diagnosis.culprits for rank in culprit.ranks}


def blamed(diagnosis):
    """Return the ranks that are named as more than possible culprits."""
    culprits = [each for each in diagnosis.culprits if each.confidence is not Confidence.POSSIBLE]
    return named(diagnosis._replace(culprits=culprits))


def test_the_faulty_rank_is_named_in_98_percent_of_simulated_jobs():
    found = [simulated(seed, SHAPES[:6]) for seed in range(400)]
    results = [(named(diagnose(run.evidence())), rank) for run, rank in filter(None, found)]
    assert len(results) > 300
    right = sum(ranks == {rank} for ranks, rank in results)
    assert right >= 0.98 * len(results), (right, len(results))


def test_the_faulty_rank_is_named_or_a_candidate_in_meshes_with_pairs():
    """In a group of two ranks, other groups of the same kind show which of two different calls is wrong."""
    found = list(filter(None, (simulated(seed, [(2, 2), (2, 4), (4, 2)]) for seed in range(300))))
    results = [(diagnose(run.evidence()), rank) for run, rank in found]
    right = sum(blamed(diagnosis) == {rank} for diagnosis, rank in results)
    assert right >= 0.85 * len(results), (right, len(results))
    assert all(rank in blamed(diagnosis) | set(diagnosis.candidates) for diagnosis, rank in results)


@given(st.integers(0, 10**9), st.booleans())
@example(106, False)
def test_healthy_ranks_are_never_blamed(seed, knows_groups):
    found = simulated(seed, SHAPES)
    assume(found is not None)
    run, rank = found
    diagnosis = diagnose(run.evidence(knows_groups=knows_groups))
    # If the members of the groups are unknown, any rank outside a collective may be the missing one.
    assert (named if knows_groups else blamed)(diagnosis) <= {rank}


@given(st.integers(0, 10**9), st.data())
def test_no_healthy_rank_is_blamed_if_records_are_missing(seed, data):
    """A healthy rank may only be named as a possible culprit, because its record is missing."""
    found = simulated(seed, SHAPES)
    assume(found is not None)
    run, rank = found
    evidence = run.evidence()
    missing = data.draw(st.sets(st.sampled_from(range(len(evidence))), max_size=3))
    reasons = [data.draw(st.sampled_from(list(NoRecord))) for _ in missing]
    for absent, reason in zip(missing, reasons, strict=True):
        evidence[absent] = evidence[absent]._replace(records=reason)
    assert blamed(diagnose(evidence)) <= {rank} | missing


@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_the_diagnosis_does_not_depend_on_the_order_of_the_ranks(seed, source):
    found = simulated(seed, SHAPES)
    assume(found is not None)
    evidence = found[0].evidence()
    expected = diagnose(evidence)
    source.shuffle(evidence)
    assert diagnose(evidence) == expected


def test_a_healthy_job_has_no_culprit():
    source = random.Random(0)
    for shape in SHAPES:
        groups = mesh(*shape)
        run = Run(job(groups, program(source, 20)))
        diagnosis = diagnose(run.evidence())
        assert (diagnosis.culprits, diagnosis.collectives) == ((), ())
        assert diagnosis.summary == "no rank waits in a collective that was recorded"
