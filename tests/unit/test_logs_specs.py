"""Tests for the log settings under torch's names."""

import os

import pytest

from elasticrs.multiprocessing import DefaultLogsSpecs, Std, to_map


def envs(count, number="0", restarts="0"):
    own = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": restarts, "ELASTICRS_ROUND": number}
    return {local_rank: dict(own) for local_rank in range(count)}


def test_std_values_are_parsed_from_text():
    assert Std.from_str("3") == Std.ALL == Std.OUT | Std.ERR
    assert Std.from_str("0:1,12:2") == {0: Std.OUT, 12: Std.ERR}
    with pytest.raises(ValueError, match="4 does not match"):
        Std.from_str("4")


def test_to_map_expands_a_stream_selection_to_each_rank():
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.ERR}, 2) == {0: Std.NONE, 1: Std.ERR}


def test_the_log_layout_matches_torch(tmp_path):
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT, tee={1: Std.ERR})
    variables = envs(2)
    logs = specs.reify(variables)
    run = logs.stdouts[0].removesuffix("/attempt_0/0/stdout.log")
    assert os.path.dirname(run) == str(tmp_path) == specs.root_log_dir
    assert os.path.basename(run).startswith("job_")
    assert logs.stderrs == {0: "", 1: f"{run}/attempt_0/1/stderr.log"}
    assert logs.tee_stderrs == {1: logs.stderrs[1]}
    assert variables[1]["TORCHELASTIC_ERROR_FILE"] == logs.error_files[1] == f"{run}/attempt_0/1/error.json"
    assert os.path.isdir(os.path.dirname(logs.error_files[1]))


def test_an_attempt_directory_is_never_reused(tmp_path):
    specs = DefaultLogsSpecs(str(tmp_path))
    names = [os.path.dirname(os.path.dirname(specs.reify(envs(1)).error_files[0])) for _ in range(3)]
    assert [os.path.basename(name) for name in names] == ["attempt_0", "attempt_0_r0", "attempt_0_r0_1"]
    assert all(os.path.isdir(name) for name in names)


def test_rounds_with_the_same_restart_count_have_their_own_directories(tmp_path):
    specs = DefaultLogsSpecs(str(tmp_path))
    first = specs.reify(envs(1, number="3", restarts="1"))
    second = specs.reify(envs(1, number="4", restarts="1"))
    assert "/attempt_1/" in first.error_files[0]
    assert "/attempt_1_r4/" in second.error_files[0]


def test_the_null_device_as_log_dir_disables_log_files(tmp_path):
    variables = envs(1)
    logs = DefaultLogsSpecs(os.devnull, tee=Std.ALL).reify(variables)
    assert logs.stdouts == {0: ""}
    assert variables[0]["TORCHELASTIC_ERROR_FILE"] == ""


def test_a_file_as_log_dir_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=str(file)):
        DefaultLogsSpecs(str(file))


def test_logs_specs_with_equal_settings_are_equal(tmp_path):
    assert DefaultLogsSpecs(str(tmp_path), tee=Std.OUT) == DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    assert DefaultLogsSpecs(str(tmp_path)) != DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
