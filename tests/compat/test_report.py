"""Comparison of how jobs end under both launchers: the report and the error file."""

import json
import os
import re

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.beyond_torchrun,  # the test itself starts both launchers, regardless of --launcher
]

BOTH = ("torchrun", "elasticrs")

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
    lines = report[report.rindex(" FAILED\n") :].splitlines()
    text = "\n".join(re.sub(r"^[=-]{10,}$", "-----", line.rstrip()) for line in lines)
    # elasticrs prints times with milliseconds and the offset from UTC. torchrun prints whole seconds.
    text = re.sub(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?", "TIME", text)
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
    # elasticrs prints the root cause first, and may print additional lines. Compare the lines of torchrun
    # before its root cause and the lines from the root cause on separately: the lines of each part appear in
    # the same order.
    wanted = without_frames(reports["torchrun"])
    root = next(index for index, line in enumerate(wanted) if line.startswith("Root Cause"))
    for part in (wanted[:root], wanted[root:]):
        assert in_order(part, reports["elasticrs"]) is None, reports
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
