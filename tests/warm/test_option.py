"""Tests for ``--warm``: valid values, and values that are rejected before any process is started."""

import pytest
from helpers.said import line_with, says

from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import parse
from elasticrs.launcher import LaunchConfig, elastic_launch


def preload(*argv, **environ):
    return resolve(parse(argv, environ), {"PATH": "/usr/bin:/bin", **environ}).preload


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import json")
    return str(path)


def test_warm_is_off_by_default(script):
    assert preload(script) is preload("--warm=off", script) is None
    assert preload("--warm", "auto", script).modules == ("json",)
    assert preload("--warm=csv, json.tool", script).modules == ("csv", "json.tool")
    assert preload(script, PET_WARM="csv").modules == ("csv",)
    assert preload("--warm= off ", script, PET_WARM="csv") is None


@pytest.mark.parametrize(
    "text", ["", ",", "a b", "json,", "json.", ".json", "a-b", "off,json", "json,auto", "1"]
)
def test_an_invalid_warm_value_is_refused_with_its_source(script, text):
    with pytest.raises(UsageError, match="--warm"):
        preload(f"--warm={text}", script)
    with pytest.raises(UsageError, match=f"^PET_WARM: got '{text}'"):
        preload(script, PET_WARM=text)
    with pytest.raises(ValueError, match=r"^warm "):
        LaunchConfig(1, 1, 1, warm=text)


def test_a_module_that_does_not_exist_is_refused(script, launch):
    refused = launch("--warm", "json,nosuchmodule", script)
    assert refused.wait() == 2
    (line,) = refused.stderr.splitlines()
    says(line, "elasticrs: --warm: got 'json,nosuchmodule'", "'nosuchmodule'")
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="localhost:0", warm="nosuchmodule")
    with pytest.raises(ValueError, match="warm: got 'nosuchmodule'"):
        elastic_launch(config, print)()


@pytest.mark.parametrize(
    ("options", "program", "token"),
    [
        (["--warm=json", "--no-python"], "true", "--no-python"),
        (["--warm=json", "--run-path", "--start-method=fork"], None, "forkserver"),
        (["--warm=auto", "--run-path"], None, None),
    ],
)
def test_a_warm_start_without_effect_is_reported_once(launch, script, options, program, token):
    started = launch(*options, program or script).exits(0)
    if token is None:
        assert "warm: " not in started.stderr
    else:
        says(line_with(started.stderr, "warm: "), "no effect", token)


def test_elastic_launch_reports_a_warm_start_without_effect(tmp_path, capfd):
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
    line_with(capfd.readouterr().err, "elasticrs: warm: no effect", "true ")


def test_the_time_limit_for_imports_can_be_set(script):
    job = resolve(parse(["--warm=json", script], {}), {"PATH": "/usr/bin:/bin"})
    assert job.warm_timeout == 120.0
    job = resolve(parse([script], {"PET_WARM_TIMEOUT": "2.5"}), {"PATH": "/usr/bin:/bin"})
    assert job.warm_timeout == 2.5
    with pytest.raises(UsageError, match="--warm-timeout: got '0'"):
        parse(["--warm-timeout=0", script], {})
    with pytest.raises(ValueError, match="warm_timeout"):
        LaunchConfig(1, 1, 1, warm_timeout=0)
