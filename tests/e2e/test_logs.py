"""Log files and console output: correct paths, whole lines, and every byte."""

import json
import os
import random
import sys

import pytest
from helpers import procs
from helpers.packages import install

BOTH = """
    import os
    rank = os.environ["RANK"]
    os.write(1, f"out {rank}\\n".encode())
    os.write(2, f"err {rank}\\n".encode())
"""


def logs_of(folder, attempt=0):
    """Return the log files of one attempt, keyed by local rank and file name."""
    (run,) = folder.iterdir()
    files = (run / f"attempt_{attempt}").glob("*/std*.log")
    return {(int(file.parent.name), file.name): file.read_bytes() for file in files}


def test_redirected_output_is_in_files_and_not_on_the_console(launch, worker_script, tmp_path):
    arguments = ("--log-dir", tmp_path / "logs", "--redirects", "3", "--rdzv-id", "job")
    launched = launch("--nproc-per-node", "2", *arguments, worker_script(BOTH)).exits(0)
    assert logs_of(tmp_path / "logs") == {
        (0, "stdout.log"): b"out 0\n",
        (0, "stderr.log"): b"err 0\n",
        (1, "stdout.log"): b"out 1\n",
        (1, "stderr.log"): b"err 1\n",
    }
    assert "out" not in launched.stdout
    assert "err 0" not in launched.stderr


def test_tee_writes_to_files_and_prints_with_a_prefix(launch, worker_script, tmp_path):
    arguments = ("--log-dir", tmp_path / "logs", "--tee", "3", "--role", "trainer")
    launched = launch("--nproc-per-node", "2", *arguments, worker_script(BOTH)).exits(0)
    assert sorted(launched.stdout.splitlines()) == ["[trainer0]:out 0", "[trainer1]:out 1"]
    assert {"[trainer0]:err 0", "[trainer1]:err 1"} <= set(launched.stderr.splitlines())
    assert logs_of(tmp_path / "logs")[1, "stderr.log"] == b"err 1\n"


def test_redirects_and_tee_can_differ_by_rank(launch, worker_script, tmp_path):
    arguments = ("--log-dir", tmp_path / "logs", "--redirects", "0:1,1:2", "--tee", "1:2")
    launched = launch("--nproc-per-node", "2", *arguments, worker_script(BOTH)).exits(0)
    written = {key: text for key, text in logs_of(tmp_path / "logs").items() if text}
    assert written == {(0, "stdout.log"): b"out 0\n", (1, "stderr.log"): b"err 1\n"}
    assert launched.stdout == "out 1\n"
    assert {"err 0", "[default1]:err 1"} <= set(launched.stderr.splitlines())


def test_local_ranks_filter_hides_the_console_output_of_other_ranks(launch, worker_script, tmp_path):
    arguments = ("--log-dir", tmp_path / "logs", "--tee", "3", "--local-ranks-filter", "1")
    launched = launch("--nproc-per-node", "3", *arguments, worker_script(BOTH)).exits(0)
    assert launched.stdout == "[default1]:out 1\n"
    assert logs_of(tmp_path / "logs")[2, "stdout.log"] == b"out 2\n"


def test_every_attempt_keeps_its_logs(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt, flush=True)
        os._exit(attempt != "2")
    """)
    launch("--log-dir", tmp_path / "logs", "--redirects", "3", "--max-restarts", "2", script).exits(0)
    for attempt in range(3):
        assert logs_of(tmp_path / "logs", attempt)[0, "stdout.log"] == b"attempt %d\n" % attempt


@pytest.mark.beyond_torchrun
def test_console_lines_of_several_workers_are_not_mixed(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        rank = os.environ["RANK"]
        for number in range(2000):
            os.write(1, f"{rank}:{number}:".encode())
            os.write(1, b"x" * 500 + b"\\n")
    """)
    launched = launch("--nproc-per-node", "4", "--log-dir", tmp_path / "logs", "--tee", "1", script).exits(0)
    expected = {
        rank: [f"[default{rank}]:{rank}:{number}:{'x' * 500}" for number in range(2000)] for rank in range(4)
    }
    lines = launched.stdout.splitlines()
    assert {rank: [line for line in lines if line[8] == str(rank)] for rank in range(4)} == expected


@pytest.mark.parametrize("how", ["os._exit(0)", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_output_just_before_an_exit_is_not_lost(launch, worker_script, tmp_path, how):
    script = worker_script(f"""
        import os
        os.write(1, b"x" * 1_000_000 + b"\\nhalf a line")
        {how}
    """)
    launched = launch("--log-dir", tmp_path / "logs", "--tee", "1", script)
    assert launched.wait() == (how != "os._exit(0)")
    assert logs_of(tmp_path / "logs")[0, "stdout.log"] == b"x" * 1_000_000 + b"\nhalf a line"
    assert "half a line" in launched.stdout
    assert launched.stdout.count("x") == 1_000_000


@pytest.mark.beyond_torchrun
def test_non_text_bytes_are_passed_through_unchanged(launch, worker_script, tmp_path):
    # Leave out carriage returns, because the launcher drops the text before them, as a terminal would.
    script = worker_script(r"""
        import os
        os.write(1, bytes(range(256)).translate(None, b"\r\n") + b"\n")
    """)
    launched = launch("--log-dir", tmp_path / "logs", "--tee", "1", script).exits(0)
    written = bytes(range(256)).translate(None, b"\r\n") + b"\n"
    assert logs_of(tmp_path / "logs")[0, "stdout.log"] == written
    assert launched.stdout_bytes == b"[default0]:" + written


@pytest.mark.beyond_torchrun
def test_a_relative_log_dir_is_relative_to_the_launchers_directory(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        os.chdir("/")
        os.write(1, b"out")
        raise ValueError("from elsewhere")
    """)
    launched = launch("--log-dir", "logs", "--redirects", "1", script, cwd=tmp_path).exits(1)
    assert logs_of(tmp_path / "logs")[0, "stdout.log"] == b"out"
    assert "ValueError: from elsewhere" in launched.stderr
    assert len(list((tmp_path / "logs").glob("*/attempt_0/0/error.json"))) == 1


def test_jobs_with_the_same_id_can_share_a_log_dir(launch, worker_script, tmp_path):
    script = worker_script("import sys; print(sys.argv[1])")
    arguments = ("--log-dir", tmp_path / "logs", "--redirects", "1", "--rdzv-id", "same")
    arguments += ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    jobs = [launch(*arguments, script, name) for name in ("a", "b")]
    assert [job.wait() for job in jobs] == [0, 0]
    files = (tmp_path / "logs").glob("same_*/attempt_0/0/stdout.log")
    assert sorted(file.read_text() for file in files) == ["a\n", "b\n"]


def test_random_bytes_reach_log_files_unchanged(launch, worker_script, tmp_path):
    script = worker_script("""
        import os, random
        source = random.Random(int(os.environ["RANK"]))
        for _ in range(500):
            rest = source.randbytes(source.randrange(9000))
            while rest:
                rest = rest[os.write(1, rest):]
    """)
    launch("--nproc-per-node", "2", "--log-dir", tmp_path / "logs", "--tee", "1", script).exits(0)
    for rank in range(2):
        source = random.Random(rank)
        expected = b"".join(source.randbytes(source.randrange(9000)) for _ in range(500))
        assert logs_of(tmp_path / "logs")[rank, "stdout.log"] == expected


RECORD = {
    "elasticrs": "elasticrs.multiprocessing.errors",
    "torch": "torch.distributed.elastic.multiprocessing.errors",
}
LAUNCHER = {"elasticrs": "elasticrs.launch", "torch": "torch.distributed.run"}


@pytest.mark.parametrize(
    "inner", ["elasticrs", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.slow])]
)
def test_an_error_file_is_passed_up_through_nested_launchers(launch, worker_script, tmp_path, inner):
    script = worker_script(f"""
        from {RECORD[inner]} import record

        @record
        def main():
            raise ValueError("deep down")

        main()
    """)
    launch(
        "--no-python",
        sys.executable,
        "-m",
        LAUNCHER[inner],
        script,
        env={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "top.json")},
        # Allow more time, because the inner launcher imports torch a second time.
    ).exits(1, timeout=2.5 * procs.HANG)
    found = json.loads((tmp_path / "top.json").read_text())
    assert found["message"]["message"] == "ValueError: deep down"
    assert found["message"]["errorCode"] == 1


@pytest.mark.beyond_torchrun
def test_an_error_file_of_a_user_defined_logs_specs_class_may_be_a_fifo(launch, worker_script, tmp_path):
    env = install(tmp_path / "site", "my_specs", SPECS, "elasticrs.logs_specs", mine="Mine")
    folder = tmp_path / "special"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        launched = launch(
            "--logs-specs=mine",
            worker_script('raise ValueError("told on stderr alone")'),
            env={**env, "SPECIAL": str(folder / "pipe")},
        ).exits(1)
        assert b"told on stderr alone" in os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert os.listdir(folder) == ["pipe"]
    assert "ValueError: told on stderr alone" in launched.stderr


SPECS = """
import json
import os
import random
from elasticrs.multiprocessing import LogsDest, LogsSpecs

class Mine(LogsSpecs):
    root_log_dir = ""

    def reify(self, envs):
        envs[0]["TORCHELASTIC_ERROR_FILE"] = os.environ["SPECIAL"]
        return LogsDest({0: ""}, {0: ""}, {}, {}, {0: os.environ["SPECIAL"]})
"""
