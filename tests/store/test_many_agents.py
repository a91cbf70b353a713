"""Many agents with real connections. The cost of each agent does not depend on their number."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]

MEASURE = """
import json, sys
from benchmarks.scale import job, tables
figures = {n: job.measure(n, 2, idle=0.0) for n in (10, 50)}
drawn, table = tables.picture(figures, {}), tables.markdown(figures, {})
json.dump({"figures": figures, "picture": drawn, "table": table}, sys.stdout)
"""


def test_messages_per_agent_do_not_grow_from_10_to_50_agents():
    # The program waits for all agents at each stage. That it finishes shows that all of them started, learned
    # of the failure, restarted, saw an agent and the leader die, and left after success.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=ROOT, stdout=subprocess.PIPE, timeout=50, check=True, text=True
    )
    measured = json.loads(done.stdout)
    few, many = measured["figures"]["10"], measured["figures"]["50"]
    assert many["form: up"] <= 7
    assert many["form: down"] <= 11
    assert many["restart: up"] <= 2
    assert many["restart: down"] <= 7
    for way in ("up", "down"):
        # On a busy machine, messages are batched differently. A cost that grew with the number of agents
        # would be about 40 higher.
        assert many[f"form: {way}"] <= few[f"form: {way}"] + 1.5
        assert many[f"restart: {way}"] <= few[f"restart: {way}"] + 1.5
    for way in ("sent", "received"):
        # Allow a small difference. With more agents, keys have more digits and messages are batched
        # differently.
        assert many[f"restart: {way}"] <= few[f"restart: {way}"] * 1.1

    texts = {each.text for each in ElementTree.fromstring(measured["picture"]).iter()}
    assert {"last join", "all have it", "leader", "store", "all others", "restart, sent"} <= texts
    assert "| a worker fails → all agents have it |" in measured["table"]
