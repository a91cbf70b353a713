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


@pytest.mark.parametrize("more", [(), ("--sharded",)], ids=["replicated", "sharded"])
def test_damage_of_all_copies_costs_one_attempt(torch_programs, tmp_path, more):
    options = ["--steps", "30", "--every", "4", *more]
    calm, hurt = (KeptTraining(tmp_path / name) for name in ("calm", "hurt"))
    faults = ["--fault", "kill:0:1:13", "--fault", "flip:1:*:0"]
    runs = f"training.launch(2, {str(calm.folder)!r}, *{options}); "
    runs += f"training.launch(2, {str(hurt.folder)!r}, *{options + faults}, max_same_failures=1)"
    torch_programs.checked(f"{LAUNCH}; {runs}")
    assert hurt.ends() == calm.ends()
    assert [(each.attempt, each.step) for each in hurt.logged("restored")] == [(0, 0), (0, 0), (2, 0), (2, 0)]


@pytest.mark.parametrize("max_nodes", [1, 2])
def test_a_single_rank_whose_newest_copy_is_damaged_uses_the_older_one(torch_programs, tmp_path, max_nodes):
    options = ["--steps", "30", "--every", "4"]
    calm, hurt = (KeptTraining(tmp_path / name, 1) for name in ("calm", "hurt"))
    nodes = f"max_nodes={max_nodes}, rdzv_backend='c10d', rdzv_endpoint='localhost:0'"
    nodes += ", rdzv_configs={'last_call_timeout': 1}"
    faults = ["--fault", "kill:0:0:15", "--fault", "flip-newest:1:0:0"]
    runs = f"training.launch(1, {str(calm.folder)!r}, *{options}); "
    runs += f"training.launch(1, {str(hurt.folder)!r}, *{options + faults}, {nodes})"
    torch_programs.checked(f"{LAUNCH}; {runs}")
    assert [(each.attempt, each.step) for each in hurt.logged("restored")] == [(0, 0), (1, 8)]
    assert hurt.ends() == calm.ends()


def test_fully_sharded_job_loses_no_step_if_all_ranks_can_copy_and_few_after_a_kill(torch_programs, tmp_path):
    every = 4
    faults = ["raise:0:1:10", "kill:1:0:20", "exit:2:0:30"]
    options = ["--variant", "fsdp", "--steps", "35", "--every", str(every)]
    calm, hurt = (KeptTraining(tmp_path / name) for name in ("calm", "hurt"))
    ordered = [argument for fault in faults for argument in ("--fault", fault)]
    runs = f"training.launch(2, {str(calm.folder)!r}, *{options}); "
    runs += f"training.launch(2, {str(hurt.folder)!r}, *{options + ordered})"
    torch_programs.checked(f"{LAUNCH}; {runs}")
    assert hurt.ends() == calm.ends()
    assert len(set(calm.ends().values())) == 2
    lost_at_raise, lost_at_kill, lost_at_exit = hurt.lost()
    assert (lost_at_raise, lost_at_exit) == (0, 0)
    assert 0 < lost_at_kill <= every + 1


@pytest.mark.slow
def test_sharded_state_of_a_failed_job_goes_on_in_a_job_with_more_ranks(torch_programs, tmp_path):
    two, three = KeptTraining(tmp_path / "two"), KeptTraining(tmp_path / "three", 3)
    options = ["--variant", "fsdp", "--steps", "15", "--every", "4"]
    runs = f"""
from elasticrs.errors import JobFailedError
save = {{"keep_save": {str(tmp_path / "saved")!r}}}
try:
    training.launch(2, {str(two.folder)!r}, *{[*options, "--fault", "raise:0:1:10"]}, max_restarts=0, **save)
except JobFailedError:
    training.launch(3, {str(three.folder)!r}, *{options}, **save)
"""
    torch_programs.checked(f"{LAUNCH}\n{runs}")
    assert {each.step for each in three.logged("restored")} == {9}
    assert len(three.ends()) == 3
