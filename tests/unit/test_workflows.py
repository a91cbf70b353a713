"""The CI workflows call only make targets and scripts that exist, and have minimal permissions."""

import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
JOBS = [(file, name, job) for file, workflow in WORKFLOWS.items() for name, job in workflow["jobs"].items()]
STEPS = [step for *_, job in JOBS for step in job["steps"]]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands():
    return "\n".join(step["run"] for step in STEPS if "run" in step)


def test_the_workflows_are_ci_and_release():
    assert list(WORKFLOWS) == ["ci", "release"]


def test_make_targets_and_scripts_used_by_workflows_exist():
    targets = re.findall(r"\bmake ([a-z-]+)", commands())
    assert {"wheel", "release", "rebuild", "try-release"} == set(targets)
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
    assert ".ci/run" in commands()
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("action", sorted({step["uses"] for step in STEPS if "uses" in step}))
def test_each_action_is_pinned_to_a_major_version_or_commit(action):
    assert re.search(r"@(?:release/)?v[0-9]+$|@[0-9a-f]{40}$", action)


def test_only_the_publish_job_has_write_permissions():
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    assert [(file, name) for file, name, job in JOBS if "permissions" in job] == [("release", "publish")]
    assert WORKFLOWS["release"]["jobs"]["publish"]["needs"] == "try"


def test_no_checkout_step_persists_credentials():
    checkouts = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_every_job_has_a_time_limit():
    assert all(job["timeout-minutes"] <= 120 for *_, job in JOBS)
