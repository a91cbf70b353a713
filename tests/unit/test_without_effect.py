"""Before a job starts, elasticrun reports settings without effect, and missing scripts and modules."""

import os
import zipfile

import pytest

from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import parse

ENV = {"PATH": "/usr/bin:/bin"}
SEVERAL = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--rdzv-id=x")
BY_HANDLER = ("--rdzv-backend=c10d", "--rdzv-endpoint=/tmp/x", "--rdzv-conf=store_type=file")


def notices(*argv, **environ):
    return resolve(parse(argv, environ), {**ENV, **environ}).notices


@pytest.mark.parametrize(
    ("before", "after", "environ", "named"),
    [
        ((), ("--nproc_per_node=4", "--lr", "3"), {}, ["--nproc_per_node"]),
        ((), ("--max-restarts", "3", "--rdzv-id", "x"), {}, ["--max-restarts", "--rdzv-id"]),
        ((), ("--", "--max-restarts", "3"), {}, []),
        # These names are not reported, because a script may have options with the same names.
        ((), ("--log-dir", "x", "--role=y", "--tee", "-m", "nnodes"), {}, []),
        (("--local-ranks-filter=0,1",), (), {}, ["--local-ranks-filter:"]),
        (("--local-ranks-filter=0",), (), {}, []),
        ((), (), {"PET_MAX_RESTART": "3", "PET_ROLE": "x", "PET_X": ""}, ["PET_MAX_RESTART", "PET_X"]),
        ((), (), {"PET_LOGS_SPECS": "x"}, ["PET_LOGS_SPECS"]),
        (("--log-line-prefix-template=${rank}${node}",), (), {}, ["--log-line-prefix-template:"]),
        (("--log-line-prefix-template=${rank} $x {y",), (), {}, []),
        (("--standalone", "--rdzv-endpoint=a:1", "--rdzv-id=x"), (), {}, ["--rdzv-endpoint", "--rdzv-id"]),
        (("--standalone",), (), {}, []),
        (
            (
                *BY_HANDLER,
                "--report=file:r",
                "--exit-codes=worker",
                "--fatal-exit-codes=3",
                "--node-check=true",
            ),
            (),
            {"PET_MAX_SAME_FAILURES": "5", "PET_MAX_RESTARTS": "3/1h", "PET_RESTART_DELAY": "1s"},
            [],
        ),
        (BY_HANDLER, (), {}, []),
        (("--on-failure=replace", "--restart-delay=1s"), (), {}, ["--restart-delay"]),
        ((*SEVERAL, "--on-failure=replace", "--restart-delay=1s"), (), {}, []),
        ((*SEVERAL, "--on-failure=replace", "--max-excluded-nodes=9"), (), {}, ["--max-excluded-nodes"]),
        ((*BY_HANDLER, "--max-excluded-nodes=9"), (), {}, ["--max-excluded-nodes"]),
    ],
)
def test_a_setting_without_effect_is_reported(script, before, after, environ, named):
    assert [line.split()[0] for line in notices(*before, script, *after, **environ)] == named


def test_a_misspelled_variable_gets_a_hint(script):
    (line,) = notices(script, PET_MAX_RESTART="3")
    assert line.endswith("PET_MAX_RESTARTS?")


def test_a_local_ranks_filter_without_a_match_is_reported(script):
    (line,) = notices("--local-ranks-filter=7", script)
    assert line.startswith("--local-ranks-filter: ")
    assert "7" in line


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["train.py --lr 3"], "separate words"),
        (["no.py --lr 3"], None),
        (["\u2013nproc-per-node", "2", "train.py"], "type --nproc-per-node"),
        (["\u2014\u2014standalone", "train.py"], "type --standalone"),
    ],
)
def test_a_missing_script_gets_a_hint(script, monkeypatch, argv, hint):
    monkeypatch.chdir(os.path.dirname(script))
    with pytest.raises(UsageError) as raised:
        notices(*argv)
    text = str(raised.value)
    assert ";" not in text if hint is None else hint in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.py", "-m"),
        ("no_such_module", "'no_such_module'"),
        ("package.no_such", "'package.no_such'"),
        ("package", "__main__"),
        ("train", None),
        ("package.inner", None),
        ("open.anything", None),
        ("namespace.inner", None),
        ("json.tool", None),
        ("os.path", None),
    ],
)
def test_a_missing_module_is_a_usage_error(script, monkeypatch, name, said):
    folder = os.path.dirname(script)
    monkeypatch.chdir(folder)
    for path, text in {
        "package/__init__.py": "raise RuntimeError('imported')",
        "package/inner.py": "",
        "open/__init__.py": "__path__.append('elsewhere')",
        "namespace/inner.py": "",
    }.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    if said is None:
        assert notices("-m", name) == []
        return
    with pytest.raises(UsageError) as raised:
        notices("-m", name)
    assert said in str(raised.value)


def test_a_module_in_a_zip_archive_is_not_checked(script, monkeypatch):
    monkeypatch.chdir(os.path.dirname(script))
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/inner.py", "")
    monkeypatch.syspath_prepend("archive.zip")
    assert notices("-m", "zipped.inner") == []
