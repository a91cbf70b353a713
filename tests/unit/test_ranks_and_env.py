"""Tests for the ranks and the environment variables of workers."""

from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.config import JobSpec
from elasticrs._engine.workers.plan import NodeShare, Plan, assign, worker_env

nodes = st.lists(
    st.builds(NodeShare, st.sampled_from(["trainer", "reader"]), st.integers(1, 5)), min_size=1, max_size=6
)


@given(nodes)
def test_global_and_role_ranks_are_unique_and_consecutive(shares):
    workers = [worker for group_rank in range(len(shares)) for worker in assign(shares, group_rank)]
    assert [worker.global_rank for worker in workers] == list(range(len(workers)))
    assert {worker.world_size for worker in workers} == {len(workers)}
    for role in {share.role for share in shares}:
        mine = [worker for worker in workers if worker.role == role]
        assert [worker.role_rank for worker in mine] == list(range(len(mine)))
        assert {worker.role_world_size for worker in mine} == {len(mine)}


@given(nodes)
def test_local_ranks_count_from_zero_on_each_node(shares):
    for group_rank, share in enumerate(shares):
        workers = assign(shares, group_rank)
        assert [worker.local_rank for worker in workers] == list(range(share.local_world_size))
        assert {worker.group_rank for worker in workers} == {group_rank}
        assert {worker.group_world_size for worker in workers} == {len(shares)}


def env_of(worker, inherited=()):
    job = JobSpec(1, "job", max_restarts=3)
    plan = Plan([worker], "localhost", 4711)
    return worker_env(worker, job, plan, round=2, restarts=1, inherited=dict(inherited))


def test_a_worker_gets_the_environment_variables_of_torch():
    worker = assign([NodeShare("reader", 2), NodeShare("trainer", 4)], 1)[3]
    assert env_of(worker) == {
        "RANK": "5",
        "LOCAL_RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "ELASTICRS_ROUND": "2",
    }


def test_nccl_error_handling_set_by_the_user_is_kept():
    worker = assign([NodeShare("trainer", 1)], 0)[0]
    inherited = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert env_of(worker, inherited)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
