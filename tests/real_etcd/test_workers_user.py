"""``--on-failure replace`` with an etcd that is hosted by the agents and protected by a token."""

import pytest
from helpers import ports
from helpers.etcd import binary
from helpers.nodes import rdzv
from helpers.procs import reap_adopted

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.torch, pytest.mark.timeout(180)]

SCRIPT = """
    import os
    import torch
    from torch import distributed
    from elasticrs import _core
    from elasticrs.store.session import Client
    from elasticrs.train import AgentCoordinator, State, train
    from elasticrs.train.agent import agent_place

    class Steps(State):
        done = 0
        def sync(self, world_size, rank):
            distributed.all_reduce(torch.ones(1))

    def step(state):
        if state.done == 3:
            raise StopIteration
        distributed.all_reduce(torch.ones(1))
        state.done += 1
        return state, None

    def reads(etcd):
        client = etcd.client("x")
        try:
            client.txn(1, [], [("get", "/elasticrs/a%2Fjob/head")], [])
            while client.wait(30.0):
                for event in client.take():
                    if isinstance(event, _core.Reply):
                        return "reads"
                    if isinstance(event, _core.ConnectionLost):
                        return event.kind
        finally:
            client.close()

    place = agent_place().rendezvous
    agents, own = reads(place.etcd.replaced(prefix="/torchelastic/p2p")), reads(place.etcd)
    state = train(AgentCoordinator("gloo"), step, Steps())
    os.write(1, f"USER {place.etcd.user} {agents} {own} {state.done}.\\n".encode())
"""


def test_workers_use_an_etcd_user_that_cannot_read_the_keys_of_agents(launch, worker_script, etcd_program):
    (port,) = ports.pairs(1)
    if binary() is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    job = launch(
        *rdzv("etcd", f"127.0.0.1:{port}", "a/job", host=1, lease_ttl=30),
        *("--nnodes=1", "--nproc-per-node=2", "--on-failure=replace", "--warm=torch"),
        worker_script(SCRIPT),
        env={"TORCHELASTIC_ETCD_BINARY_PATH": binary(), "ELASTICRS_TOKEN": "secret"},
    ).exits(0)
    assert job.stdout.count("USER elasticrs-workers denied reads 3.") == 2
    reap_adopted()
