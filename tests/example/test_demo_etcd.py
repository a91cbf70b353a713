"""The etcd demo runs as its documentation promises."""

import pytest
from helpers import etcd
from helpers.procs import reap_adopted


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_training_continues_after_an_agent_and_an_etcd_member_are_killed(run_demo):
    if etcd.binary() is None:
        pytest.skip("needs etcd")
    printed = run_demo("ddp_multinode/demo_etcd.py", "--epochs=10")
    # Reap the nursery of the killed agent.
    reap_adopted()
    told = [line[11:].split(":")[0] for line in printed.splitlines() if line[8:9] == "s"]
    assert [line for line in told if "workers train" in line] == ["3 workers train", "2 workers train"]
    assert "NOT AS PROMISED" not in printed
