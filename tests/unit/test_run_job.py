"""`run_job` runs a job from its `JobSpec` alone: programs and scripts, their log files, and restarts."""

import pytest

from elasticrs._engine.job.config import JobSpec, LogSettings, UsageError
from elasticrs._engine.supervise.run_job import run_job


class Console:
    """A console that keeps the printed lines for the test."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def write(self, text, *_args, **_named):
        self.lines.append(text)
        return True

    def flush(self, _seconds):
        return True


@pytest.fixture
def run(tmp_path):
    def run(nproc, *command, **more):
        console, agents = Console(), []
        logs = LogSettings(log_dir=str(tmp_path), redirects=3)
        job = JobSpec(nproc, "job", command=command, logs=logs, **more)
        result = run_job(job, console, None, owns_process=False, created=agents.append)
        assert [agent.result for agent in agents] == [result]
        outputs = sorted(path.read_text() for path in tmp_path.rglob("stdout.log"))
        return result, outputs, console.lines

    return run


def test_a_program_gets_the_variables_and_the_log_files_of_the_job(run):
    result, outputs, lines = run(
        2,
        "sh",
        "-c",
        'echo "$RANK of $WORLD_SIZE: $WORD ${local_rank}"',
        variables={"WORD": "w"},
        notices=["n"],
    )
    assert (result.exit_code, len(result.attempts)) == (0, 1)
    assert outputs == ["0 of 2: w 0\n", "1 of 2: w 1\n"]
    assert lines[0] == "n"


def test_a_failed_program_is_restarted_and_then_succeeds(run):
    result, outputs, _ = run(
        1,
        "sh",
        "-c",
        "echo $TORCHELASTIC_RESTART_COUNT; exit $((1 - TORCHELASTIC_RESTART_COUNT))",
        max_restarts=1,
    )
    assert (result.exit_code, result.restarts) == (0, 1)
    assert outputs == ["0\n", "1\n"]


def test_a_script_runs_in_function_workers(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, *sys.argv[1:])")
    result, outputs, _ = run(1, str(script), "a", run_path=True)
    assert result.return_values == {0: None}
    assert outputs == ["__main__ a\n"]


def test_a_log_folder_that_cannot_be_made_ends_the_job_before_it_starts(tmp_path):
    file = tmp_path / "file"
    file.touch()
    job = JobSpec(1, "job", command=["true"], logs=LogSettings(log_dir=str(file)))
    started = []
    with pytest.raises(UsageError, match="log-dir"):
        run_job(job, Console(), None, owns_process=False, created=started.append)
    assert started == []
