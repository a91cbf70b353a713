"""The build backend reports in one line what is missing for a build from source."""

import pytest
from tools.build import build_backend

HOOKS = (
    "get_requires_for_build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that writes shell scripts into a folder, which is the only one in PATH."""
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
