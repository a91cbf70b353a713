"""If modules cannot be preloaded or the machine is in a bad state, the agent prints a single line, and the
workers start.
"""

import re
import venv
import zipapp

import pytest
from helpers.broken_logs import namespace, why_not
from helpers.said import says

pytestmark = pytest.mark.beyond_torchrun

RUNS = "import os, sys\nos.write(1, f\"RUNS {'colorsys' in sys.modules}\\n\".encode())\n"


def remarks(launched):
    return re.findall(r"^elasticrs: warm: (.*)$", launched.stderr, re.MULTILINE)


def test_a_script_with_a_syntax_error_starts_cold(launch, worker_script):
    launched = launch("--warm=auto", worker_script("import colorsys\ndef (:")).exits(1)
    (remark,) = remarks(launched)
    says(remark, "worker.py", "line 2: invalid syntax")
    assert "SyntaxError: invalid syntax" in launched.stderr


def test_a_module_beside_the_script_is_imported_by_each_worker(launch, worker_script, tmp_path):
    (tmp_path / "mine.py").write_text("import os\nos.write(1, b'READ\\n')\n")
    script = worker_script(f"import mine\n{RUNS}")
    launched = launch("--nproc-per-node=2", "--warm=mine,colorsys", script).exits(0)
    (remark,) = remarks(launched)
    says(remark, "mine ", "worker.py")
    assert sorted(launched.stdout.split("\n")) == ["", "READ", "READ", "RUNS True", "RUNS True"]


@pytest.mark.parametrize(("warm", "how"), [("auto", ()), ("csv,colorsys", ("--run-path",))], ids=str)
def test_modules_in_a_zip_app_come_before_those_of_the_library(launch, tmp_path, warm, how):
    app = tmp_path / "app"
    app.mkdir()
    (app / "csv.py").write_text("MINE = True\n")
    (app / "__main__.py").write_text(f"import csv\nassert csv.MINE\n{RUNS}")
    zipapp.create_archive(app, tmp_path / "app.pyz")
    launched = launch(f"--warm={warm}", *how, tmp_path / "app.pyz").exits(0)
    (remark,) = remarks(launched)
    says(remark, "csv " if warm != "auto" else "app.pyz")
    assert launched.stdout == f"RUNS {warm != 'auto'}\n"


def test_a_module_missing_in_another_interpreter_is_left_out(launch, worker_script, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    env = {"PYTHON_EXEC": str(tmp_path / "bare/bin/python")}
    launched = launch("--warm=torch,colorsys", worker_script(RUNS), env=env).exits(0)
    (remark,) = remarks(launched)
    says(remark, "torch ", "not found")
    assert launched.stdout == "RUNS True\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    ["mount -t tmpfs -o ro none $0", "mount -t tmpfs -o size=4k none $0 && head -c 4096 /dev/zero > $0/full"],
    ids=["read-only", "full"],
)
def test_workers_start_warm_without_space_for_temporary_files(launch, worker_script, tmp_path, setup):
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = namespace(setup, disk)
    if (reason := why_not(prefix)) is not None:
        pytest.skip(reason)
    launched = launch("--warm=colorsys", worker_script(RUNS), prefix=prefix, env={"TMPDIR": str(disk)}).exits(
        0
    )
    assert remarks(launched) == []
    assert launched.stdout == "RUNS True\n"
