"""Tests for the licences and the bill of materials in a wheel. A wheel that does not list all linked
components is rejected.
"""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from tools import linked, wheel_checks
from tools.build import build_backend
from tools.linked import Component
from tools.wheel_checks import RejectedWheelError

ROOT = Path(__file__).resolve().parents[2]
INFO = "elasticrs-1.dist-info"
EXTENSION = b"panicked\0cargo/some-crate-1.2.3/src/lib.rs\0"


@pytest.fixture(scope="module")
def crates():
    return {
        component.name: component
        for component in linked.crates(linked.metadata(ROOT, "x86_64-unknown-linux-gnu"))
    }


@pytest.fixture
def components(tmp_path):
    one, other = tmp_path / "LICENSE", tmp_path / "COPYING"
    one.write_text("shared text\n")
    other.write_text("other text\n")
    return [
        Component("elasticrs-python", "1.0.0", "BSD-3-Clause", (), ("pkg:cargo/some-crate@1.2.3",), "cargo"),
        Component("some-crate", "1.2.3", "MIT", (one,), (), "cargo"),
        Component("libc", "7", "MIT OR ISC", (one, other)),
    ]


@pytest.fixture
def members(components):
    """Return the files of a wheel that lists all of its components and their licences."""
    bill = linked.bill_of_materials("1.0.0", components, {"rustc": "1"}, 0)
    return {
        f"{INFO}/METADATA": b"License-File: LICENSE\nLicense-File: LICENSE-third-party.txt\n",
        f"{INFO}/licenses/LICENSE": b"ours",
        f"{INFO}/licenses/LICENSE-third-party.txt": linked.licence_texts(components).encode(),
        f"{INFO}/sboms/elasticrs.cdx.json": json.dumps(bill).encode(),
    }


def test_build_time_crates_are_not_listed_as_linked(crates):
    assert {"elasticrs-python", "elasticrs-nursery", "tokio", "pyo3", "ring"} <= set(crates)
    assert not {"syn", "quote", "cc", "thiserror-impl", "pyo3-macros", "proptest"} & set(crates)


def test_each_third_party_crate_has_a_licence_and_its_text(crates):
    foreign = [each for each in crates.values() if not each.name.startswith("elasticrs-")]
    assert all(each.licence and each.texts and "/" not in each.licence for each in foreign)


def test_a_crate_without_a_licence_text_is_rejected(tmp_path):
    package = {
        "id": "some",
        "name": linked.BINDINGS,
        "version": "1.0.0",
        "license": "MIT",
        "source": "a registry",
        "manifest_path": str(tmp_path / "Cargo.toml"),
    }
    found = {"packages": [package], "resolve": {"nodes": [{"id": "some", "deps": []}]}}
    with pytest.raises(linked.MissingLicenceError, match=linked.BINDINGS):
        list(linked.crates(found))
    (tmp_path / "LICENSE-MIT").touch()
    assert [component.name for component in linked.crates(found)] == [linked.BINDINGS]


def test_a_licence_text_shared_by_several_components_appears_once(components):
    document = linked.licence_texts(components)
    assert document.count("shared text") == 1
    assert document.count("other text") == 1
    assert "\nlibc 7: MIT OR ISC (text 1, text 2)\n" in document


def test_the_bill_of_materials_lists_the_dependencies_of_components(components):
    bill = linked.bill_of_materials("1.0.0", components, {"rustc": "1"}, 0)
    used = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert used["pkg:pypi/elasticrs@1.0.0"] == ["pkg:cargo/elasticrs-python@1.0.0", "pkg:generic/libc@7"]
    assert used["pkg:cargo/elasticrs-python@1.0.0"] == ["pkg:cargo/some-crate@1.2.3"]
    assert set(used) == {bill["metadata"]["component"]["bom-ref"]} | {
        each["bom-ref"] for each in bill["components"]
    }


def test_a_wheel_that_lists_all_its_components_passes(members):
    assert (
        wheel_checks.check_licences(members, EXTENSION)
        == members[f"{INFO}/sboms/elasticrs.cdx.json"].decode()
    )


def rejected(members, image=EXTENSION):
    with pytest.raises(RejectedWheelError) as raised:
        wheel_checks.check_licences(members, image)
    return str(raised.value)


def test_a_wheel_without_a_licence_file_is_rejected(members):
    del members[f"{INFO}/licenses/LICENSE"]
    assert "LICENSE" in rejected(members)


def test_a_wheel_without_third_party_licences_in_its_metadata_is_rejected(members):
    members[f"{INFO}/METADATA"] = b"Name: elasticrs\nLicense-File: LICENSE\n"
    assert "licences" in rejected(members)


def test_a_wheel_with_a_component_without_a_licence_text_is_rejected(members, components):
    texts = linked.licence_texts(components[:2])
    members[f"{INFO}/licenses/LICENSE-third-party.txt"] = texts.encode()
    assert "libc 7" in rejected(members)


def test_a_wheel_with_a_crate_missing_from_the_bill_of_materials_is_rejected(members):
    assert "other" in rejected(members, EXTENSION + b"cargo/other-2.0.0/src/main.rs")
    assert rejected(members, b"")


def test_paths_and_hosts_of_the_build_machine_in_a_binary_are_found(tmp_path, monkeypatch):
    registry = tmp_path / "registry" / "src" / "index.example.org-0123456789abcdef"
    registry.mkdir(parents=True)
    monkeypatch.setenv("CARGO_HOME", str(tmp_path))
    folder = Path("/a/clone")
    assert wheel_checks.paths_of_this_machine(b"cargo/some-1.2.3 /a/clones", [folder]) == []
    for image, found in (
        (b"in /a/clone/lib.rs", "/a/clone/"),
        (bytes(registry / "some-1.2.3"), f"{registry.parent}/"),
        (b"elsewhere/index.example.org-ffff", "index.example.org"),
    ):
        assert found in wheel_checks.paths_of_this_machine(image, [folder])


@pytest.mark.parametrize(
    ("symbols", "future", "foreign"),
    [
        ([], {}, []),
        (["PyModExport__core"], {}, []),
        (["PyModExport__core", "PyCode_New"], {"PyType_Freeze": "3.14"}, ["PyCode_New", "PyType_Freeze"]),
    ],
)
def test_symbols_outside_the_stable_abi_are_found(tmp_path, symbols, future, foreign):
    wheel = tmp_path / "some.whl"
    result = {"non_abi3_symbols": symbols, "future_abi3_objects": future}
    report = json.dumps({"specs": {str(wheel): {"wheel": [{"result": result}]}}})
    audit = tmp_path / "abi3audit"
    audit.write_text(f"#!/bin/sh\necho '{report}'\nexit {1 if symbols else 0}\n")
    audit.chmod(0o755)
    assert wheel_checks.symbols_outside_of_the_stable_abi(wheel, tmp_path / "python") == foreign


def test_an_abi_audit_without_a_report_stops_the_script(tmp_path):
    audit = tmp_path / "abi3audit"
    audit.write_text("#!/bin/sh\necho 'no such wheel' >&2\nexit 1\n")
    audit.chmod(0o755)
    with pytest.raises(SystemExit, match="no such wheel"):
        wheel_checks.symbols_outside_of_the_stable_abi(tmp_path / "some.whl", tmp_path / "python")


HOOKS = (
    "get_requires_for_build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that writes shell scripts into a folder. PATH contains only this folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def write(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    return write


def line_of(hook):
    with pytest.raises(SystemExit) as raised:
        hook()
    (line,) = str(raised.value).splitlines()
    return line


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("cargo", [None, "cargo 1.63.0 (fd9c4297c 2022-07-01)"])
def test_a_missing_or_old_cargo_is_reported(programs, hook, cargo):
    programs("cc", "exit 1")
    if cargo is not None:
        programs("cargo", f"echo '{cargo}'")
    line = line_of(getattr(build_backend, hook))
    assert "Rust 1." in line
    assert ("no cargo" if cargo is None else "cargo 1.63.0") in line


def test_the_error_of_a_failing_cargo_is_reported(programs):
    programs("cargo", "echo 'no default toolchain' >&2; exit 1")
    assert "no default toolchain" in line_of(build_backend.get_requires_for_build_wheel)


def test_a_missing_c_compiler_is_reported(programs, monkeypatch):
    programs("cargo", "echo 'cargo 99.0.0'")
    assert "'cc'" in line_of(build_backend.get_requires_for_build_wheel)
    monkeypatch.setenv("CC", "gcc-99 -m64")
    assert "'gcc-99'" in line_of(build_backend.get_requires_for_build_wheel)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_complete_toolchain_is_accepted(programs, hook):
    programs("cargo", "echo 'cargo 99.0.0'")
    programs("cc", "exit 1")
    assert getattr(build_backend, hook)() == []


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
