"""Closed, full or blocked standard descriptors, odd names, and directories that vanish."""

import errno
import os
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from helpers import procs
from helpers.launcher import LAUNCHERS, clean_environment, launcher_with
from helpers.procs import HANG, run_program

pytestmark = pytest.mark.beyond_torchrun

COMMAND = LAUNCHERS["elasticrs"]
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def under_shell(redirection, *args, cwd):
    """Run the launcher in a shell that redirects its descriptors."""
    line = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *map(str, args)]
    return run_program(line, env=clean_environment(), cwd=cwd)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors_are_replaced_by_dev_null(tmp_path, worker_script, closed):
    script = worker_script("""
        import os
        files = [os.readlink(f"/proc/{os.environ['LAUNCHER']}/fd/{fd}") for fd in (0, 1, 2)]
        open(os.environ["LAUNCHER"], "w").write("\\n".join(files))
    """)
    program = f'LAUNCHER=$(cut -d " " -f 4 /proc/$PPID/stat) exec "{sys.executable}" "{script}"'
    done = under_shell(closed, "--no-python", "sh", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = [path for path in tmp_path.iterdir() if path.name.isdecimal()]
    assert "socket" not in shown.read_text()
    assert "anon_inode" not in shown.read_text()
    assert "/dev/null" in shown.read_text()


def test_a_usage_error_exits_with_2_without_a_usable_stderr(tmp_path):
    assert under_shell("2>&-", "--no-such-flag", cwd=tmp_path).returncode == 2
    assert under_shell("2>/dev/full", "--no-such-flag", cwd=tmp_path).returncode == 2


def test_help_fails_with_one_line_if_it_cannot_be_written(tmp_path):
    done = under_shell(">/dev/full", "--help", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(f": {os.strerror(errno.ENOSPC)}\n")


@pytest.fixture
def stuck():
    """Yield the write end of a pipe that is full and that nothing reads."""
    reader, writer = os.pipe()
    other = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(other, b"x" * 4096)
    except BlockingIOError:
        yield writer
    finally:
        for fd in (reader, writer, other):
            os.close(fd)


TELLS_END = """
from elasticrs._engine.supervise.run.tracker import AttemptTracker
tidy_up = AttemptTracker.tidy_up
AttemptTracker.tidy_up = lambda self: (tidy_up(self), open("ended", "w").close())
"""


@pytest.fixture
def stuck_launcher(tmp_path):
    """Return a function that starts a launcher, and returns it when its workers have ended."""
    started = []

    def start(*argv, **streams):
        argv = (argv[0], argv[1], TELLS_END + argv[2], *argv[3:])
        started.append(subprocess.Popen(argv, text=True, cwd=tmp_path, env=clean_environment(), **streams))
        procs.wait_until((tmp_path / "ended").exists)
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


@pytest.fixture
def unread_report(stuck_launcher, stuck):
    """Return a function that starts a launcher whose report nothing reads. It gives up writing after
    ``patience`` seconds.
    """

    def start(patience):
        argv = (*launcher_with("_engine.cli.command_line", WRITE_TIMEOUT=patience), "--no-python", "false")
        return stuck_launcher(*argv, stdout=subprocess.DEVNULL, stderr=stuck)

    return start


def test_a_signal_stops_a_launcher_blocked_by_an_unread_report(unread_report):
    launcher = unread_report(2 * procs.HANG)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(0.5)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(procs.HANG) == 1


def test_the_launcher_gives_up_writing_a_report_that_is_not_read(unread_report):
    assert unread_report(0.5).wait(procs.HANG) == 1


def test_a_signal_while_the_console_is_blocked_does_not_hang_the_launcher(stuck_launcher, stuck, tmp_path):
    impatient = launcher_with("_engine.supervise.run.tracker", DRAIN_TIMEOUT=2.0)
    argv = (*impatient, "--log-dir", str(tmp_path), "--tee", "1")
    launcher = stuck_launcher(*argv, "--no-python", "seq", "10", stdout=stuck, stderr=subprocess.PIPE)
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=procs.HANG)
    assert launcher.returncode == 0, "all workers had succeeded"
    assert "console" in stderr


@pytest.mark.parametrize("env", [{}, ASCII], ids=["utf-8", "ascii"])
def test_script_and_folder_names_may_contain_any_bytes(launch, tmp_path, env):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\n b\xc3\xb6")
    os.mkdir(folder)
    script = Path(folder, os.fsdecode(b"-\xfe \n.py"))
    script.write_text("raise ValueError('SAID')")
    launched = launch(
        "--log-dir", os.path.join(folder, "logs"), "--tee", "3", script.name, env=env, cwd=folder
    ).exits(2)
    assert "unknown option" in launched.stderr
    launched = launch("--log-dir", "logs", "--tee", "3", "--", script.name, env=env, cwd=folder).exits(1)
    assert "[default0]:ValueError: SAID" in launched.stderr
    assert "Root Cause" in launched.stderr
    (log,) = Path(folder).glob("logs/*/attempt_0/0/stderr.log")
    assert "SAID" in log.read_text()


def test_a_non_ascii_process_name_in_an_ascii_locale_causes_no_traceback(launch, tmp_path):
    program = tmp_path / "schläfer"
    program.symlink_to("/bin/sleep")
    launched = launch(
        *("--linger", "0", "--no-python", "sh", "-c", f"setsid {program} 1000 & exec true"), env=ASCII
    ).exits(0)
    assert "Traceback" not in launched.stderr


def test_clearing_the_temporary_directory_costs_no_additional_restart(launch, tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    program = f'[ "$TORCHELASTIC_RESTART_COUNT" = 1 ] && exit 0; rm -r {folder}/*; exit 1'
    launch("--max-restarts", "1", "--no-python", "sh", "-c", program, env={"TMPDIR": str(folder)}).exits(0)
    assert not list(folder.iterdir())


MARK = "print('STARTED')"
PATIENT = launcher_with("_engine.gpus.devices", SLOW=HANG)
"""On a loaded machine, the import of torch takes so long that a second line says so."""


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        (["--rdzv-conf", "jion_timeout=3", "{script}"], {}, "jion_timeout"),
        (["-m", ""], {}, "-m"),
        (["{script}"], {"PET_MAX_RESTARTS": "-3"}, "PET_MAX_RESTARTS"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_usage_error_prints_one_line_and_starts_no_workers(
    launch, worker_script, tmp_path, args, env, says
):
    script = str(worker_script(MARK))
    launched = launch(*(arg.format(script=script) for arg in args), env=env, argv=PATIENT).exits(2)
    assert launched.stdout == ""
    (line,) = launched.stderr.splitlines()
    assert line.startswith("elasticrs: ")
    assert says.format(script=script) in line
    assert os.listdir(tmp_path) == ["worker.py"]


def test_help_and_version_exit_with_0(launch):
    for flag, shows in (("--help", "--nproc-per-node"), ("--version", "elasticrs ")):
        launched = launch(flag).exits(0)
        assert shows in launched.stdout
        assert not launched.stderr


SETUP = """
set -e
mount --bind "$1" /etc/resolv.conf
shift
exec "$@"
"""


@pytest.fixture
def name_server(tmp_path):
    """Yield a socket that receives DNS queries but never answers, and a command prefix.

    A command with this prefix uses the socket as its name server.
    """
    address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 53))
        conf = tmp_path / "resolv.conf"
        conf.write_text(f"nameserver {address}\noptions timeout:30 attempts:5\n")
        yield sock, ("unshare", "--mount", "sh", "-c", SETUP, "sh", str(conf))


@pytest.mark.parametrize(
    "where",
    [
        ("--rdzv-backend=c10d", "--rdzv-endpoint=store.example:29400"),
        ("--master-addr=store.example", "--node-rank=1"),
        ("--master-addr=store.example", "--node-rank=0"),
    ],
)
def test_a_signal_is_handled_during_name_resolution(launch, worker_script, name_server, where):
    sock, prefix = name_server
    launched = launch("--nnodes=2", *where, worker_script("print('never')"), prefix=prefix)
    assert procs.wait_readable(sock.fileno())
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert launched.stdout == ""


LAUNCH = [sys.executable, "-m", "elasticrs.launch", "--redirects=0"]


def test_the_terminal_gets_its_echo_back_when_a_worker_is_killed_without_it(worker_script):
    script = worker_script("""
        import os, termios
        settings = termios.tcgetattr(0)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, settings)
        os.kill(os.getpid(), 9)
    """)
    end, terminal = os.openpty()
    try:
        done = run_program([*LAUNCH, script], stdin=terminal, env=clean_environment())
        assert done.returncode == 1
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
    finally:
        os.close(end)
        os.close(terminal)


IN_BACKGROUND = """
import fcntl, os, subprocess, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY)
sys.exit(subprocess.Popen(sys.argv[1:], process_group=0).wait())
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="process_group needs Python 3.11")
def test_workers_of_a_launcher_in_the_background_have_no_terminal_as_input(worker_script):
    script = worker_script("import os, sys; print(os.readlink('/proc/self/fd/0'), repr(sys.stdin.read()))")
    end, terminal = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", IN_BACKGROUND, *LAUNCH, script],
            stdin=terminal,
            capture_output=True,
            text=True,
            env=clean_environment(),
            timeout=HANG,
            check=False,
        )
        assert done.stdout == "/dev/null ''\n", done.stderr
    finally:
        os.close(end)
        os.close(terminal)
