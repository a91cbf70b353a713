"""Hangs of real gloo groups with 2 to 8 ranks, for each kind of fault and of training. The launcher names the
faulty ranks, or says that it is undecided and names candidates, which include the faulty ranks. It never
blames another rank.
"""

import re
from typing import NamedTuple

import pytest
from helpers.forker import WORKERS

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(180)]

PROGRAM = (
    f"import sys; sys.path.insert(0, {str(WORKERS)!r}); import hang_matrix; hang_matrix.launch(*sys.argv[1:])"
)

STOPS = ("sleep", "busy", "stopped", "leaves", "returns")
"""Faults after which a rank calls no further collective."""
SWERVES = ("skip", "extra", "other", "size")
"""Faults after which a rank calls other collectives than the other ranks. In a group of two ranks, the
evidence cannot show which rank is faulty.
"""


class Case(NamedTuple):
    """A job of ``nproc`` ranks in which the ranks ``guilty`` have a fault."""

    nproc: int
    shape: str
    kind: str
    guilty: tuple[int, ...]

    @property
    def is_open(self) -> bool:
        """True if the evidence may be insufficient to find the faulty rank. If the calls of two ranks differ,
        the evidence of a third rank is needed. In a mesh of four ranks, every group has only two ranks. If a
        rank passes more elements than the others, gloo may abort another rank before a third rank has called
        the collective.
        """
        return (
            (self.nproc == 2 and self.kind in SWERVES)
            or self.kind == "size"
            or ((self.nproc, self.shape) == (4, "mesh") and self.kind in ("skip-dp", "reorder"))
        )


def cases():
    for nproc, guilty in ((2, 1), (3, 0), (4, 2), (8, 5)):
        yield from (Case(nproc, "plain", kind, (guilty,)) for kind in (*STOPS, *SWERVES))
    for nproc, guilty in ((4, (1, 2)), (8, (3, 6)), (8, (0, 1, 2))):
        yield from (Case(nproc, "plain", kind, guilty) for kind in ("sleep", "leaves"))
    for nproc, guilty in ((4, 1), (8, 3)):
        kinds = ("skip-tp", "skip-dp", "extra-tp", "extra-dp", "reorder", "sleep", "stopped", "leaves")
        yield from (Case(nproc, "mesh", kind, (guilty,)) for kind in kinds)
    for shape in ("ddp", "fsdp"):
        for nproc, guilty in ((2, 0), (4, 1), (8, 6)):
            kinds = ("sleep", "leaves", "returns", "skip", "extra", "size")
            yield from (Case(nproc, shape, kind, (guilty,)) for kind in kinds)


CASES = list(cases())


def spans_of(text):
    """Return the ranks of a text such as ``0-3, 5``."""
    found = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return {rank for first, last in found for rank in range(first, last + 1)}


class Named(NamedTuple):
    """The ranks that a launcher has named."""

    first: list
    """Ranks in each of the launcher's first lines about the failure. Empty if no other rank was running."""
    root: set
    """Ranks in the field ``rank`` of the root cause."""
    is_decided: bool


def named(output):
    """Return the ranks that the output of a launcher names; ``None`` if the job has not failed."""
    if "Root Cause" not in output:
        return None
    root = output[output.index("Root Cause") :]
    (field,) = re.findall(r"^  rank      : (.*) \(local_rank", root, re.M)
    decided = "undecided" not in field
    # The launcher prints this line only if it stops other ranks that are still running. A line about a cause
    # that is not known yet blames no rank.
    first = re.findall(
        r"^elasticrs: (undecided, candidates: )?ranks? (\d[-\d, ]*)(?!.* not known yet;).*; stopping ",
        output,
        re.M,
    )
    assert all(decided is not bool(doubt) for doubt, _ in first), output
    return Named([spans_of(ranks) for _, ranks in first], spans_of(field), decided)


def run(programs, case, folder):
    guilty = ",".join(map(str, case.guilty))
    done = programs.run(PROGRAM, case.shape, case.kind, guilty, str(case.nproc), str(folder), timeout=120)
    return done.stderr + done.stdout


def test_there_are_at_least_77_cases():
    assert len(set(CASES)) == len(CASES) >= 77


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_guilty_ranks_are_named(torch_programs, case, tmp_path):
    output = run(torch_programs, case, tmp_path)
    found = named(output)
    assert found is not None, output
    if case.kind != "size":
        # For "size", skip this check. If gloo aborts a rank, the launcher may notice the exit of a peer first
        # and name that peer.
        assert found.first in ([], [found.root]), output
    if case.is_open and not found.is_decided:
        assert set(case.guilty) <= found.root, output
    else:
        assert (found.is_decided, found.root) == (True, set(case.guilty)), output
