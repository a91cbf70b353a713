"""The demo of etcd keeps its promises."""

import pytest
from helpers import etcd
from helpers.procs import reap_adopted

EPOCHS = "16"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_an_agent_and_a_member_of_etcd_are_killed(run_demo):
    if etcd.binary() is None:
        pytest.skip("needs etcd")
    printed = run_demo("ddp_multinode/demo_etcd.py", "--epochs", EPOCHS)
    # The nursery of the killed agent.
    reap_adopted()
    told = [line[11:].split(":")[0] for line in printed.splitlines() if line[8:9] == "s"]
    assert [line for line in told if "workers train" in line] == ["3 workers train", "2 workers train"]
    assert "NOT AS PROMISED" not in printed
