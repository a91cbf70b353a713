"""A job whose state is kept: after failures of all kinds, it ends as an undisturbed one, to the last bit."""

import pytest
from helpers.forker import WORKERS
from helpers.kept import KeptTraining

pytestmark = [pytest.mark.torch, pytest.mark.beyond_torchrun]

LAUNCH = f"import sys; sys.path.insert(0, {str(WORKERS)!r}); import kept_training as training"


def test_a_job_ends_as_if_nothing_had_failed(torch_programs, tmp_path):
    faults = ["kill:0:1:9", "raise:1:0:33", "exit:2:2:60"]
    options = ["--variant", "batch-norm", "--steps", "90", "--every", "4"]
    calm, hurt = (KeptTraining(tmp_path / name, 3) for name in ("calm", "hurt"))
    ordered = [argument for fault in faults for argument in ("--fault", fault)]
    runs = f"training.launch(3, {str(calm.folder)!r}, *{options}); "
    runs += f"training.launch(3, {str(hurt.folder)!r}, *{options + ordered})"
    torch_programs.checked(f"{LAUNCH}; {runs}")
    assert len(hurt.logged("restored")) == 3 * (len(faults) + 1)
    assert hurt.ends() == calm.ends()
    assert len(calm.ends()) == 3
    assert hurt.lost() == [0, 0, 0]
