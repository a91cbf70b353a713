"""Comparison of how jobs end under both launchers: signals, exit codes, the report and the error file."""

import json
import os
import re
import signal

import pytest
from helpers import procs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.beyond_torchrun,  # the test itself starts both launchers, regardless of --launcher
]

BOTH = ("torchrun", "elasticrs")

LEAVES = """
    import os, signal

    def leave(signum, frame):
        os.write(1, f"GOT {signal.Signals(signum).name} {os.environ['RANK']}\\n".encode())
        os._exit(0)

    for name in ("TERM", "INT", "HUP", "QUIT", "USR1"):
        signal.signal(signal.Signals["SIG" + name], leave)
    os.write(1, f"READY {os.getpid()} {os.getsid(0) == os.getpid()}\\n".encode())
    while True:
        signal.sigtimedwait([], 0.05)
"""


@pytest.mark.parametrize(
    ("signum", "arguments"),
    [
        (signal.SIGTERM, []),
        pytest.param(signal.SIGINT, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, ["--signals-to-handle=SIGUSR1"], marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher(start, worker_script, signum, arguments):
    script = worker_script(LEAVES)
    seen = {}
    for launcher in BOTH:
        launched = start(launcher, "--nproc-per-node=2", "--max-restarts=2", *arguments, script)
        leads = [match[1] for match in launched.wait_for_lines(r"READY \d+ (\w+)", 2)]
        launched.signal(signum)
        code = launched.wait()
        got = sorted(match[0] for match in launched.wait_for_lines(r"GOT \w+ \d", 2))
        seen[launcher] = code, leads, got, launched.stdout.count("READY")
    assert seen["elasticrs"] == seen["torchrun"]
    assert seen["torchrun"][0] == 1


@pytest.mark.slow
def test_a_signal_that_is_not_handled(start, worker_script):
    script = worker_script(LEAVES)
    for launcher in reversed(BOTH):
        launched = start(launcher, script)
        pid = int(launched.wait_for_line(r"READY (\d+)")[1])
        launched.signal(signal.SIGALRM)
        launched.exits(-signal.SIGALRM)
        if launcher == "elasticrs":
            procs.reap_adopted()
            procs.assert_gone([pid])
        else:
            # torchrun leaves this worker running as an orphan.
            assert procs.process(pid).state != "Z"


CODES = [
    pytest.param(["--no-such-option", "x.py"], 2, 2, id="unknown option"),
    pytest.param(["--nnodes=3:2", "x.py"], 1, 2, id="bad range of nodes"),
    pytest.param(["--no-python", "-m", "x"], 1, 2, id="options that exclude each other"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "theirs", "ours"), CODES)
def test_a_mistake(start, arguments, theirs, ours):
    assert start("torchrun", *arguments).wait() == theirs
    launched = start("elasticrs", *arguments).exits(ours)
    assert launched.stderr.count("\n") == 1


# Each launcher runs with the `record` decorator of its package.
FAILS = """
    import os, sys
    if os.environ.get("ELASTICRS_ROUND"):
        from elasticrs.multiprocessing.errors import record
    else:
        from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        {how}

    main()
"""


def normalised(report):
    """Return the last report in a text, without the parts that vary between runs."""
    lines = report[report.rindex("Failures:") :].splitlines()
    text = "\n".join(re.sub(r"^[=-]{10,}$", "-----", line.rstrip()) for line in lines)
    # elasticrs prints times with milliseconds, and torchrun prints whole seconds.
    text = re.sub(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d(\.\d+)?", "TIME", text)
    text = re.sub(r"(host +: ).*", r"\1HOST", text)
    text = re.sub(r"(?i)\b(pid:? )\d+", r"\1PID", text)
    # With elasticrs, the path of the logs also contains the host name.
    ours = rf"/\S*/(\w+)_{re.escape(os.uname().nodename.split('.')[0])}_\w{{8}}/attempt_0"
    text = re.sub(ours, r"\1/attempt_0", text)
    text = re.sub(r"/\S*/(\w+)_\S{8}/attempt_0", r"\1/attempt_0", text)
    text = re.sub(r'File ".*/(\w+\.py)", line \d+, in wrapper', r"WRAPPER", text)
    return re.sub(r"(?<=[ (\"])/\S*/(?=\w+\.py)", "", text).splitlines()


def in_order(wanted, lines):
    """Return the first line of ``wanted`` that is missing from ``lines`` or out of order."""
    rest = iter(lines)
    return next((line for line in wanted if line not in rest), None)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise ValueError('no such\\nthing')", "os.kill(os.getpid(), 11)"])
def test_the_report_and_the_error_file(start, worker_script, tmp_path, how):
    script = worker_script(FAILS.format(how=how))
    reports, errors = {}, {}
    for launcher in BOTH:
        logs = tmp_path / launcher / "logs"
        # Use any free port, because another program may be using torch's default port.
        rendezvous = ("--rdzv-id=job", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
        launched = start(launcher, "--log-dir", logs, *rendezvous, script).exits(1)
        reports[launcher] = normalised(launched.stderr)
        found = list(logs.glob("*/attempt_0/0/error.json"))
        errors[launcher] = [comparable(json.loads(file.read_text())) for file in found]
    # Our report may have additional lines, but it contains all of torchrun's lines in the same order.
    assert in_order(without_frames(reports["torchrun"]), reports["elasticrs"]) is None, reports
    assert errors["elasticrs"] == errors["torchrun"]
    assert bool(errors["torchrun"]) == ("raise" in how)


def without_frames(lines):
    """Remove the frames of the ``record`` decorator, which differ between the packages, and torch's advice to
    use it.
    """
    own = re.compile(r"WRAPPER|\bf\(|\^\^\^|To enable traceback see|^$")
    return [line for line in lines if not own.search(line)]


def comparable(error):
    """Return an error file's content in a comparable form: without our additions and without
    variable parts.
    """
    error.pop("elasticrs", None)
    extra = error["message"]["extraInfo"]
    assert extra["timestamp"].isdecimal()
    extra["timestamp"] = "a whole number"
    stack = extra["py_callstack"].splitlines()
    extra["py_callstack"] = [stack[0], *stack[-2:]]
    return error
