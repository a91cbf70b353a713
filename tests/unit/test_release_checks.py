"""Tests for the licences and the bill of materials in a wheel. A wheel that does not list all linked
components is rejected.
"""

import json
from pathlib import Path

import pytest
from tools import linked, wheel_checks
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
