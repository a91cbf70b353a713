"""``--warm``: what it accepts, and what is refused before anything starts."""

import pytest

from elasticrs.job.config import UsageError
from elasticrs.launcher import LaunchConfig, elastic_launch
from elasticrs.launcher.arguments import parse, resolve


def preload(*argv, **environ):
    return resolve(parse(argv, environ), {"PATH": "/usr/bin:/bin", **environ}).job.preload


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import json")
    return str(path)


def test_off_is_the_default(script):
    assert preload(script) is preload("--warm=off", script) is None
    assert preload("--warm", "auto", script).modules == ("json",)
    assert preload("--warm=csv, json.tool", script).modules == ("csv", "json.tool")
    assert preload(script, PET_WARM="csv").modules == ("csv",)
    assert preload("--warm= off ", script, PET_WARM="csv") is None


@pytest.mark.parametrize(
    "text", ["", ",", "a b", "json,", "json.", ".json", "a-b", "off,json", "json,auto", "1"]
)
def test_a_text_that_cannot_be_meant_is_refused(script, text):
    expected = "expected off, auto, or names of modules separated by commas, such as torch,numpy"
    with pytest.raises(UsageError, match=expected):
        preload(f"--warm={text}", script)
    with pytest.raises(UsageError, match=f"^PET_WARM: got '{text}', {expected}"):
        preload(script, PET_WARM=text)
    with pytest.raises(
        ValueError, match="warm must be 'off', 'auto' or names of modules separated by commas"
    ):
        LaunchConfig(1, 1, 1, warm=text)


def test_a_module_that_does_not_exist_is_refused(script, launch):
    refused = launch("--warm", "json,nosuchmodule", script)
    assert refused.wait() == 2
    expected = "elasticrs: --warm: got 'json,nosuchmodule', but there is no module 'nosuchmodule'"
    assert refused.stderr.splitlines() == [expected]
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="localhost:0", warm="nosuchmodule")
    with pytest.raises(ValueError, match="warm: got 'nosuchmodule', but there is no module 'nosuchmodule'"):
        elastic_launch(config, print)()


@pytest.mark.parametrize(
    ("options", "program", "line"),
    [
        (
            ["--warm=json", "--no-python"],
            "true",
            "no effect: with --no-python the workers are no Python programs",
        ),
        (
            ["--warm=json", "--run-path", "--start-method=fork"],
            None,
            "no effect: functions that are started by fork or forkserver have what their program imported",
        ),
        (["--warm=auto", "--run-path"], None, None),
    ],
)
def test_what_has_no_effect_is_said_once(launch, script, options, program, line):
    started = launch(*options, program or script)
    assert started.wait() == 0, started.stderr
    assert started.stderr.count("warm: ") == started.stderr.count(f"elasticrs: warm: {line}\n") == bool(line)


def test_a_program_is_told_too(tmp_path, capfd):
    from elasticrs.multiprocessing import DefaultLogsSpecs

    config = LaunchConfig(
        1,
        1,
        1,
        DefaultLogsSpecs(str(tmp_path)),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        warm="json",
    )
    elastic_launch(config, "true")()
    assert "elasticrs: warm: no effect: true is not a Python interpreter\n" in capfd.readouterr().err


def test_how_long_the_imports_may_take(script):
    job = resolve(parse(["--warm=json", script], {}), {"PATH": "/usr/bin:/bin"}).job
    assert job.warm_timeout == 120.0
    job = resolve(parse([script], {"PET_WARM_TIMEOUT": "2.5"}), {"PATH": "/usr/bin:/bin"}).job
    assert job.warm_timeout == 2.5
    with pytest.raises(UsageError, match="--warm-timeout: got '0', expected seconds, more than 0"):
        parse(["--warm-timeout=0", script], {})
    with pytest.raises(ValueError, match="warm_timeout must be seconds above 0"):
        LaunchConfig(1, 1, 1, warm_timeout=0)
