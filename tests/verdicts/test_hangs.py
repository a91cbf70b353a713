"""Some cases of the hang matrix (``tests/attack/test_hang_matrix.py``), with up to four ranks."""

import pytest
from attack.test_hang_matrix import Case, named, run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

CASES = [
    Case(4, "ddp", "sleep", (1,)),
    Case(4, "plain", "size", (1,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_no_innocent_rank_is_blamed(torch_programs, case, tmp_path):
    output = run(torch_programs, case, tmp_path)
    found = named(output)
    assert found is not None, output
    assert case.kind == "size" or found.first in ([], [found.root]), output
    assert found.is_decided or case.is_open, output
    assert set(case.guilty) == found.root if found.is_decided else set(case.guilty) <= found.root, output
