"""Tests for the log files of workers and the prefixes of console lines."""

import os
import shutil
import stat

import pytest

from elasticrs._engine.job.config import LogSettings, UsageError, parse_streams
from elasticrs._engine.process.console import wants_colour
from elasticrs._engine.workers.logs import (
    LogPaths,
    RunLogs,
    coloured,
    followed_files,
    layout,
    line_prefixes,
)
from elasticrs._engine.workers.plan import NodeShare, assign
from elasticrs.multiprocessing import DefaultLogsSpecs, Std, to_map


def test_no_stream_is_redirected_by_default():
    paths = layout(LogSettings(), "/d", 2)
    assert paths.stdouts == paths.stderrs == {0: "", 1: ""}
    assert paths.tee_stdouts == paths.tee_stderrs == {}
    assert paths.error_files == {0: "/d/0/error.json", 1: "/d/1/error.json"}


def test_tee_also_writes_the_log_file():
    paths = layout(LogSettings(redirects={1: 2}, tee=1), "/d", 2)
    assert paths.stdouts == paths.tee_stdouts == {0: "/d/0/stdout.log", 1: "/d/1/stdout.log"}
    assert paths.stderrs == {0: "", 1: "/d/1/stderr.log"}
    assert paths.tee_stderrs == {}


def test_filtered_ranks_write_log_files_but_no_console_lines():
    settings = LogSettings(redirects=2, tee=1, local_ranks_filter=frozenset({1}))
    paths = layout(settings, "/d", 2)
    assert paths.stdouts[0] == "/d/0/stdout.log"
    assert paths.stderrs[0] == "/d/0/stderr.log"
    assert paths.tee_stdouts == {1: "/d/1/stdout.log"}
    hidden = layout(LogSettings(local_ranks_filter=frozenset({1})), "/d", 2)
    assert hidden.stdouts == hidden.stderrs == {0: os.devnull, 1: ""}


def test_log_files_without_tee_are_not_followed():
    settings = LogSettings(redirects={0: 3, 2: 1}, tee={1: 1}, local_ranks_filter=frozenset({0, 1}))
    paths = layout(settings, "/d", 3)
    written = [(0, 1, "/d/0/stdout.log"), (2, 1, "/d/2/stdout.log"), (0, 2, "/d/0/stderr.log")]
    assert paths.only_written() == written
    assert paths.are_new
    assert not layout(settings, "", 3).are_new
    # Paths from a user-defined log specs class: two streams share a file, and another stream is followed.
    shared = LogPaths({0: "a", 1: "b", 2: "c"}, {0: "a", 1: "t", 2: ""}, {}, {1: "t"}, {})
    assert shared.only_written() == [(1, 1, "b"), (2, 1, "c")]
    assert not shared.are_new


def test_captured_stderr_is_still_shown_on_the_console():
    paths = layout(LogSettings(capture_stderr=True), "/d", 1)
    assert paths.stderrs == paths.tee_stderrs == {0: "/d/0/stderr.log"}
    assert paths.stdouts == {0: ""}


def test_at_the_null_device_ranks_are_filtered_without_any_files():
    settings = LogSettings(log_dir=os.devnull, redirects=3, tee=3)
    paths = RunLogs(settings, "job", 1).attempt("0", {})
    assert paths.stdouts == paths.stderrs == paths.error_files == {0: ""}
    assert paths.tee_stdouts == {}
    assert followed_files(settings, 4) == 0
    settings = settings.replaced(local_ranks_filter=frozenset({1}))
    assert RunLogs(settings, "job", 2).attempt("0", {}).stdouts == {0: os.devnull, 1: ""}


def test_each_run_and_each_attempt_has_its_own_directory(tmp_path):
    base = tmp_path / "logs"
    settings = LogSettings(log_dir=str(base), redirects=3)
    first, second = RunLogs(settings, "job/1", 1), RunLogs(settings, "job/1", 1)
    assert first.directory != second.directory
    host = os.uname().nodename.split(".")[0]
    assert all(name.startswith(f"job_1_{host}_") for name in os.listdir(base))
    one, two = first.attempt("0", {}), first.attempt("1", {})
    assert one.stdouts != two.stdouts
    assert os.path.isdir(os.path.dirname(one.stdouts[0]))
    with pytest.raises(FileExistsError):
        first.attempt("0", {})


def test_an_unusable_log_dir_raises_a_usage_error(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"--log-dir: .*file: "):
        RunLogs(LogSettings(log_dir=str(file)), "job", 1)


def test_a_temporary_directory_without_files_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    empty = RunLogs(LogSettings(), "job", 2)
    empty.attempt("0", {})
    empty.remove_if_empty()
    assert os.listdir(tmp_path) == []
    used = RunLogs(LogSettings(), "job", 2)
    error_file = used.attempt("0", {}).error_files[1]
    with open(error_file, "w") as file:
        file.write("{}")
    used.remove_if_empty()
    assert os.path.exists(error_file)


@pytest.fixture(params=["command line", "log specs"])
def temporary(request, tmp_path, monkeypatch):
    """Return a function that sets up the next attempt in a temporary folder, and the folder of the first
    attempt.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if request.param == "command line":
        logs = RunLogs(LogSettings(), "job", 1)
        attempts = iter("01")

        def attempt():
            logs.attempt(next(attempts), {})
    else:
        specs = DefaultLogsSpecs()

        def attempt():
            specs.reify({0: {"TORCHELASTIC_RUN_ID": "job"}})

    attempt()
    (folder,) = tmp_path.iterdir()
    return attempt, folder


def test_a_deleted_temporary_directory_is_recreated_with_mode_700(temporary):
    attempt, folder = temporary
    shutil.rmtree(folder)
    attempt()
    (run,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, run)] == [0o700, 0o700]
    assert list(run.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a folder to another user")
def test_a_temporary_directory_of_another_user_is_refused(temporary):
    attempt, folder = temporary
    shutil.rmtree(folder)
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="another user"):
        attempt()
    assert list(folder.iterdir()) == []


def test_a_symbolic_link_in_place_of_a_temporary_directory_is_refused(temporary, tmp_path):
    attempt, folder = temporary
    shutil.rmtree(folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        attempt()
    assert list(elsewhere.iterdir()) == []


def test_a_log_dir_given_by_the_user_is_not_removed(tmp_path):
    logs = RunLogs(LogSettings(log_dir=str(tmp_path)), "job", 1)
    logs.attempt("0", {})
    logs.remove_if_empty()
    assert os.path.isdir(logs.directory)


@pytest.mark.parametrize("text", ["", "4", "a", "0:", "0:4", ":1", "0:1,", "-1:1", "0:1:2", "²:1"])
def test_malformed_stream_selections_are_refused(text):
    with pytest.raises(ValueError, match="LOCAL_RANK"):
        parse_streams(text)


def test_line_prefixes_follow_the_template():
    nodes = [NodeShare("a\x1b[2J", 1), NodeShare("default", 2)]
    ranks, host = assign(nodes, 1), os.uname().nodename.split(".")[0]
    assert line_prefixes(None, ranks) == {0: "[default0]:", 1: "[default1]:"}
    assert line_prefixes("${hostname}:${rank} ", ranks) == {0: f"{host}:1 ", 1: f"{host}:2 "}
    assert line_prefixes(None, assign(nodes, 0)) == {0: "[a\\x1b[2J0]:"}
    assert coloured("[x]:", 0).startswith("\x1b[36m[x]:")


def test_colour_is_used_only_on_terminals_without_no_color():
    reader, writer = os.pipe()
    main, tty = os.openpty()
    try:
        assert wants_colour(tty, {})
        assert not wants_colour(tty, {"NO_COLOR": "1"})
        assert not wants_colour(writer, {})
    finally:
        for fd in (reader, writer, main, tty):
            os.close(fd)


@pytest.mark.parametrize("tee", [0, 1, 2, 3, {0: 1, 2: 3, 9: 3}, {1: 0}])
@pytest.mark.parametrize("chosen", [None, {0, 1, 9}, set()])
@pytest.mark.parametrize("capture", [False, True])
def test_the_number_of_followed_files_matches_the_layout(tee, chosen, capture):
    ranks = None if chosen is None else frozenset(chosen)
    settings = LogSettings(tee=tee, capture_stderr=capture, local_ranks_filter=ranks)
    paths = layout(settings, "logs", 4)
    assert followed_files(settings, 4) == len(paths.tee_stdouts) + len(paths.tee_stderrs)
    settings = settings.replaced(duplicate_stdout_filters=["a"], duplicate_stderr_filters=["b"])
    assert followed_files(settings, 4) == 3 * (len(paths.tee_stdouts) + len(paths.tee_stderrs))


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
