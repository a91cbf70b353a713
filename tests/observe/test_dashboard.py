"""The Grafana dashboard and the alert rules in contrib/ query metrics that jobs serve."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from helpers.http_client import get, port_of
from helpers.procs import run_program, wait_until

CONTRIB = Path(__file__).resolve().parents[2] / "contrib"
RULES = CONTRIB / "prometheus" / "alerts.yaml"
BEATS = """
import os, signal
from elasticrs.timer import heartbeat
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
heartbeat(7)
os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
signal.sigwait([signal.SIGUSR1])
"""


def queries():
    """Return all queries to Prometheus in the Grafana dashboard and in the alert rules."""
    dashboard = json.loads((CONTRIB / "grafana" / "elasticrs.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [
        variable["query"]["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    return found + [
        rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def test_the_queries_name_only_metrics_and_labels_that_a_job_serves(launch, worker_script):
    parser = pytest.importorskip("prometheus_client.parser")
    options = (
        "--health-check-port=0",
        "--nproc-per-node=1",
        "--hang-timeout=60",
        "--max-restarts=3/1h",
        "--tee=3",
    )
    job = launch(*options, worker_script(BEATS))
    port, pid = port_of(job), int(job.wait_for_line(r"here 0 (\d+)\.")[1])
    text = wait_until(lambda: get(port, "/metrics")[2], lambda text: "elasticrs_worker_step{" in text)
    samples = [each for family in parser.text_string_to_metric_families(text) for each in family.samples]
    # This metric is not served, because the job has not put a value into it.
    named = {sample.name for sample in samples} | {"elasticrs_metric_last"}
    labels = {label for sample in samples for label in sample.labels} | {"instance", "group", "name"}
    for query in queries():
        used = set(re.findall(r"\belasticrs_\w+", query))
        assert used, query
        assert used <= named, query
        groups = re.findall(r"(?:by|on|group_left) \(([\w, ]+)\)", query)
        matchers = re.findall(r'(\w+)(?:=~|!=|=)"', query)
        assert {*matchers, *(each.strip() for group in groups for each in group.split(","))} <= labels, query
        activities = {sample.labels.get("activity") for sample in samples}
        assert set(re.findall(r'activity="(\w+)"', query)) <= activities
    os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr


def panels():
    return json.loads((CONTRIB / "grafana" / "elasticrs.json").read_text())["panels"]


def test_what_needs_heartbeats_says_that_it_needs_a_hang_timeout():
    beats = re.compile(r"elasticrs_worker_(step|heartbeat)")
    for panel in panels():
        if any(beats.search(target["expr"]) for target in panel["targets"]):
            assert "--hang-timeout" in panel["description"], panel["title"]
    text, page = RULES.read_text(), (CONTRIB.parent / "docs" / "operating.md").read_text()
    head = text.partition("groups:")[0]
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    named = {rule["alert"] for rule in rules if beats.search(rule["expr"])}
    assert len(named) == 2
    for place in (head, page):
        line = next(
            line for line in place.replace("\n# ", " ").split(". ") if named <= {*re.findall(r"\w+", line)}
        )
        assert "--hang-timeout" in line


def test_bytes_and_seconds_of_keep_have_their_own_axes():
    """Grafana draws an axis for each unit."""
    (panel,) = [panel for panel in panels() if "elasticrs.keep" in panel["targets"][0]["expr"]]
    units = {"unit": panel["fieldConfig"]["defaults"]["unit"]}
    found = {}
    for name in ("step", "bytes", "age_seconds", "blocked_seconds", "copies", "failed_copies"):
        rules = panel["fieldConfig"]["overrides"]
        matching = [
            rule for rule in rules if re.search(rule["matcher"]["options"].strip("/"), f"{name} (gpu1)")
        ]
        assert len(matching) <= 1
        found[name] = matching[0]["properties"][0]["value"] if matching else units["unit"]
    assert found == {
        "step": "short",
        "bytes": "bytes",
        "age_seconds": "s",
        "blocked_seconds": "s",
        "copies": "none",
        "failed_copies": "none",
    }


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)"
)
def test_prometheus_accepts_the_rules_and_they_fire_when_they_should(tmp_path):
    for command in (
        ["check", "rules", "--lint-fatal", RULES],
        ["test", "rules", RULES.with_name("alerts_test.yaml")],
    ):
        done = run_program(["promtool", *command])
        assert done.returncode == 0, done.stdout + done.stderr
    # Replace the variables in the dashboard's queries, as Grafana does, so that Prometheus can parse them.
    plain = [re.sub(r"\$__\w+", "5m", query).replace("$run_id", ".+") for query in queries()]
    rules = [
        {"record": f"query:{number}", "expr": query}
        for number, query in enumerate(plain)
        if not query.startswith("label_values")
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = run_program(["promtool", "check", "rules", path])
    assert done.returncode == 0, done.stdout + done.stderr
