"""The launcher's messages about a job: the log folder, failures, restarts, and the result."""

import os
import re
import signal
import sys

import pytest
from helpers import ports
from helpers.launcher import clean_environment
from helpers.lines import long_lines
from helpers.nodes import meeting
from helpers.procs import reap_adopted, run_program
from helpers.said import says

pytestmark = pytest.mark.beyond_torchrun

RAISES = """
    import os, signal
    if os.environ["RANK"] == "1":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2":
            def load():
                raise FileNotFoundError("data.bin")
            load()
    elif os.environ["TORCHELASTIC_RESTART_COUNT"] < "2":
        signal.pause()
"""


def logs_folder(stderr):
    (folder,) = {match[1] for match in re.finditer(r"logs in (\S+)$", stderr, re.MULTILINE)}
    return folder


def test_a_restart_message_names_rank_exception_line_and_restart(launch, worker_script):
    job = launch("--nproc-per-node=3", "--max-restarts=3", worker_script(RAISES)).exits(0)
    lines = re.findall(
        r"rank 1 \(pid \d+\): FileNotFoundError: data\.bin \(worker\.py:(\d+)\);"
        r" restarting\D*(\d) of 3\)$",
        job.stderr,
        re.MULTILINE,
    )
    assert [restart for _, restart in lines] == ["1", "2"]
    source = worker_script(RAISES).read_text().splitlines()
    assert {source[int(line) - 1].strip() for line, _ in lines} == {'raise FileNotFoundError("data.bin")'}
    (end,) = re.findall(r"elasticrs: succeeded after [\d.]+ s.*", job.stderr)
    assert end.endswith("2 restarts charged")
    assert job.stdout == ""


def test_output_of_stopped_ranks_comes_after_the_stop_message(launch, worker_script, tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    script = worker_script("""
        import os, signal, sys
        def stopped(*_):
            raise RuntimeError("stopped in the middle")
        signal.signal(signal.SIGTERM, stopped)
        if os.environ["RANK"] == "2":
            open(sys.argv[1]).read()
            os._exit(3)
        os.write(1, b"READY\\n")
        signal.pause()
    """)
    job = launch("--nproc-per-node=3", script, go)
    job.wait_for_lines("READY", 2)
    go.write_text("go")
    assert job.wait() == 1
    # Python writes a traceback in several pieces, so the tracebacks of two ranks can be mixed. This line is
    # always one piece.
    piece = "Traceback (most recent call last):\n"
    before, _, after = job.stderr.partition(piece)
    assert re.search(r"rank 2 \(pid \d+\) exited with code 3.*stopping the others", before)
    assert piece in after
    assert "stopped in the middle" in after


BLAMES_THE_FIRST = """
    import atexit, os, signal, sys
    fifo, rank = sys.argv[1], int(os.environ["RANK"])
    if rank == 1:
        file = open(fifo)
        # Exit only when rank 0 has failed because it was stopped, and has exited.
        atexit.register(file.read)
        def load():
            raise FileNotFoundError("data.bin")
        load()
    elif rank == 0:
        def fail(*_):
            raise RuntimeError("the other rank is gone")
        signal.signal(signal.SIGTERM, fail)
        file = open(fifo, "w")
    signal.pause()
"""


def test_the_stop_message_names_the_exception_of_the_first_failed_rank(launch, worker_script, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    job = launch("--nproc-per-node=3", worker_script(BLAMES_THE_FIRST), tmp_path / "fifo").exits(1)
    # Rank 0 may have exited before it could be stopped.
    (line,) = re.findall(r"^elasticrs: (.*); stopping the others", job.stderr, re.MULTILINE)
    assert re.fullmatch(r"rank 1 \(pid \d+\) raised FileNotFoundError", line)


def test_the_root_cause_stands_first_in_the_report_and_once_more_in_the_last_line(launch, worker_script):
    job = launch("--nproc-per-node=3", "--redirects=3", worker_script(RAISES)).exits(1)
    assert job.stderr.count("FileNotFoundError: data.bin") == 2
    report = job.stderr.partition("\n======")[2]
    says(
        report, "Root Cause (first observed failure):", "rank      : 1", "data.bin", "Failures:", "verdict: "
    )
    assert "data.bin" in job.stderr.splitlines()[-1]


def test_the_report_ends_with_the_verdict_and_what_to_do_next(launch, worker_script):
    for script, word in (("raise ValueError", "transient"), ("import there_is_no_such_module", "permanent")):
        job = launch(worker_script(script)).exits(1)
        (verdict,) = re.findall(r"^verdict: (\w+) \(.*\); next: \w+", job.stderr, re.MULTILINE)
        assert verdict == word


def test_the_last_line_and_the_notes_name_the_causes_of_all_attempts(launch, worker_script):
    job = launch("--nproc-per-node=3", "--max-restarts=1", worker_script(RAISES)).exits(1)
    report = job.stderr.partition("\n======")[2]
    root = r"rank 1 of 3: FileNotFoundError: data\.bin \(worker\.py:\d+\)"
    assert re.fullmatch(rf"elasticrs: failed after [\d.]+ s: {root}; 1 of 1 .*", report.splitlines()[-1])
    (earlier,) = re.findall(r"  note      : (earlier.*)", report)
    assert re.search(r"attempt 0: rank 1: FileNotFoundError: data\.bin \(worker\.py:\d+\)$", earlier)


def test_equal_causes_of_consecutive_attempts_share_one_line(launch, worker_script):
    script = worker_script("""
        import os
        raise KeyError(os.environ["TORCHELASTIC_RESTART_COUNT"] == "2")
    """)
    job = launch("--max-restarts=4", "--max-same-failures=0", script).exits(1)
    earlier = re.findall(
        r"  note      : earlier.*((?:in|from) attempt .*): rank 0: KeyError: (\w+)", job.stderr
    )
    assert earlier == [("from attempt 0 to 1", "False"), ("in attempt 2", "True"), ("in attempt 3", "False")]


def test_the_log_folder_is_named_at_the_start_and_after_a_failure(launch, worker_script, tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    job = launch("-r", "3", worker_script("raise ValueError"), env=env).exits(1)
    assert job.stderr.count("logs in ") == 2
    folder = logs_folder(job.stderr)
    assert folder.startswith(f"{tmp_path}/elasticrs_")
    assert os.path.isfile(f"{folder}/attempt_0/0/stderr.log")
    assert re.search(r"elasticrs: failed after [\d.]+ s: .*; 0 of 0 ", job.stderr)


def test_an_empty_log_folder_is_neither_named_nor_kept(launch, worker_script, tmp_path):
    job = launch(worker_script("import os; os._exit(3)"), env={"TMPDIR": str(tmp_path)}).exits(1)
    assert "logs in" not in job.stderr
    assert list(tmp_path.glob("elasticrs_*")) == []


def test_a_stopped_job_reports_its_duration(launch, worker_script):
    job = launch(worker_script("import os, signal; os.write(1, b'READY\\n'); signal.pause()"))
    job.wait_for_line("READY")
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    assert re.search(r"elasticrs: stopped by SIGTERM after [\d.]+ s", job.stderr)
    assert "Root Cause" not in job.stderr


@pytest.mark.parametrize(
    ("level", "is_quiet"), [("WARNING", True), ("40", True), ("INFO", False), ("", False)]
)
def test_a_successful_job_is_silent_at_log_level_warning(launch, worker_script, level, is_quiet):
    job = launch("-r", "3", worker_script("pass"), env={"LOGLEVEL": level}).exits(0)
    assert (job.stderr == "") == is_quiet


def test_elastic_launch_prints_nothing_on_success(worker_script, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from elasticrs.launcher.api import LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(1, 1, 1, rdzv_backend='c10d', rdzv_endpoint='localhost:0')\n"
        f"elastic_launch(config, {sys.executable!r})({str(worker_script('pass'))!r})\n"
    )
    done = run_program([sys.executable, program], env=clean_environment())
    assert (done.returncode, done.stderr) == (0, "")


def test_agents_on_one_host_have_different_message_prefixes(launch, worker_script):
    arguments = (*meeting(), "--max-restarts=3")
    agents = [launch(*arguments, worker_script(RAISES)) for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0]
    group_ranks = []
    for agent in agents:
        prefixes = set(re.findall(r"^elasticrs.*?: ", agent.stderr, re.MULTILINE))
        bare = f"elasticrs[{os.uname().nodename}:{agent.pid}]: "
        (with_rank,) = prefixes - {bare}
        group_ranks.append(re.fullmatch(re.escape(bare[:-3]) + r" group (\d)\]: ", with_rank)[1])
        # A node prints its first line before it has a rank, and its last line when it no longer has one.
        lines = [line for line in agent.stderr.splitlines() if line.startswith("elasticrs[")]
        assert lines[-1].startswith(f"{bare}succeeded")
        assert re.search(r"rank 1 .*: FileNotFoundError: data\.bin \(worker\.py:\d+\)", agent.stderr)
        assert "restart 1 of 3" in agent.stderr
    assert sorted(group_ranks) == ["0", "1"]


def test_every_node_names_the_exception_when_it_stops_its_workers(launch, worker_script, tmp_path):
    arguments = (*meeting(), "--nproc-per-node=3", "--max-restarts=0")
    os.mkfifo(tmp_path / "fifo")
    script = worker_script(BLAMES_THE_FIRST)
    agents = [launch(*arguments, script, tmp_path / "fifo") for _ in range(2)]
    assert [agent.wait() for agent in agents] == [1, 1]
    root = r"FileNotFoundError: data\.bin \(worker\.py:\d+\)"
    for agent in agents:
        (line,) = re.findall(r"\]: (.*); stopping round 1", agent.stderr)
        assert re.fullmatch(rf"rank 1 \(pid \d+\) on node \S+: {root}", line)
        assert re.search(rf"failed after .* rank 1 of 6( on node \S+)?: {root}; ", agent.stderr)


def test_a_round_has_the_same_log_folder_name_on_all_nodes(launch, worker_script, tmp_path):
    conf = "--rdzv-conf=last_call_timeout=0,scale_up_delay=0"
    arguments = (*meeting("1:2"), "--redirects=2", conf)
    script = worker_script("""
        import os, signal
        if os.environ["WORLD_SIZE"] == "1":
            os.write(1, b"ALONE\\n")
            signal.pause()
    """)
    first = launch(*arguments, f"--log-dir={tmp_path / 'first'}", script)
    first.wait_for_line("ALONE")
    second = launch(*arguments, f"--log-dir={tmp_path / 'second'}", script)
    assert [first.wait(), second.wait()] == [0, 0]
    assert "0 restarts charged, 1 not charged" in first.stderr
    host = os.uname().nodename.split(".")[0]
    names = [
        sorted(path.name for path in (tmp_path / node).glob(f"job_{host}_*/attempt_*"))
        for node in ("first", "second")
    ]
    assert names == [["attempt_0", "attempt_0_r2"], ["attempt_0_r2"]]


OF_EIGHT = """
    import os, signal
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    os.write(1, f"READY {attempt} {os.environ['WORLD_SIZE']}\\n".encode())
    if attempt == "0" and rank == 5:
        os._exit(3)
    signal.pause()
"""


def test_no_line_about_eight_ranks_is_too_long(launch, worker_script, tmp_path):
    options = (
        "--nproc-per-node=8",
        "--max-restarts=3",
        "--warm=auto",
        "--redirects=2",
        f"--log-dir={tmp_path}",
    )
    job = launch(*options, worker_script(OF_EIGHT))
    job.wait_for_lines("READY 1 8", 8)
    job.signal(signal.SIGTERM)
    job.exits(1)
    says(
        job.stderr,
        "exited with code 3, the cause",
        "stopping the others",
        "restarting",
        "attempt 1 is running",
    )
    assert long_lines(job.stderr) == []


@pytest.mark.privileged
def test_no_line_about_three_nodes_is_too_long(launch, worker_script):
    options = (*meeting("2:3"), "--nproc-per-node=8", "--max-restarts=3", worker_script(OF_EIGHT))

    def node(number):
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"gpu-node-{number:03d}")
        return launch("--rdzv-conf=last_call_timeout=60", *options, prefix=named)

    agents = [node(number) for number in range(3)]
    for agent in agents:
        agent.wait_for_lines("READY 1 24", 8)
    hosts = next(agent for agent in agents if ports.listens(agent.pid, int(options[2].rpartition(":")[2])))
    lost, leaves = (agent for agent in agents if agent is not hosts)
    lost.signal(signal.SIGKILL)
    for agent in (hosts, leaves):
        agent.wait_for_lines("READY 1 16", 8)
    leaves.signal(signal.SIGTERM)
    leaves.exits(1)
    hosts.wait_for_line("waiting for nodes: 1 of at least 2", "stderr")
    hosts.signal(signal.SIGTERM)
    hosts.exits(1)
    says(hosts.stderr, "rank 5 (pid", "exited with code 3", "round 2 starts", "gpu-node-", "was lost")
    assert [long_lines(agent.stderr) for agent in agents] == [[], [], []]
    lost.exits(-signal.SIGKILL)
    reap_adopted()
