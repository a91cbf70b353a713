"""The program that watches GPUs, with a fake NVML and a fake kernel log."""

import json
import os
import select
import subprocess
import time

import pytest
from helpers.fake_nvml import gpus
from helpers.procs import HANG

from elasticrs._engine.process.other_processes import command

__all__ = ["gpus"]

GIB = 1 << 30


class Watched:
    """The process that watches GPUs, its messages, and the requests to it."""

    def __init__(self, gpus, log="kmsg", pids=None, program=None, **environment):
        pids = os.readlink("/proc/self/ns/pid") if pids is None else pids
        arguments = (str(gpus.path(log)), pids)
        self._process = subprocess.Popen(
            [*(program or command("elasticrs._engine.gpus.gpu_watch")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **gpus.environment, **environment},
        )
        self.pid = self._process.pid
        self._unread = b""
        self.messages = []

    def ask(self, **request):
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, key):
        """Wait for the next message with this key."""
        end = time.monotonic() + HANG
        while True:
            for index, message in enumerate(self.messages):
                if key in message:
                    return self.messages.pop(index)
            ready, _, _ = select.select([self._process.stdout], [], [], end - time.monotonic())
            assert ready, f"no message {key!r}"
            part = os.read(self._process.stdout.fileno(), 65536)
            assert part, f"the program has exited without a message {key!r}"
            *lines, self._unread = (self._unread + part).split(b"\n")
            self.messages += map(json.loads, lines)

    def begin(self, *workers, attempt=0):
        self.ask(begin=attempt)
        self.ask(workers=workers)
        assert self.wait("begun") == {"begun": attempt}

    def settle(self, attempt=0):
        self.ask(settle=attempt)
        settled = self.wait("settled")
        assert settled["settled"] == attempt
        return settled["held"]

    def close(self):
        self._process.stdin.close()
        code = self._process.wait(HANG)
        self._process.stdout.close()
        return code


@pytest.fixture
def watch(gpus):
    started = []

    def start(*arguments, **how):
        started.append(Watched(gpus, *arguments, **how))
        return started[-1]

    yield start
    assert [each.close() for each in started] == [0] * len(started)


@pytest.fixture
def watched(watch):
    """Start the program, and the first attempt."""
    started = watch()
    started.begin()
    return started


def test_xid_events_from_nvml_are_reported(watched, gpus):
    gpus.report_xid(0, 31)
    message = watched.wait("xid")
    assert message["attempt"] == 0
    assert message["xid"] == {"code": 31, "gpu": 0, "pids": [], "workers": [], "detail": "", "count": 1}


def test_the_kernel_log_adds_process_and_detail_to_the_same_xid(watch, gpus):
    watched = watch()
    watched.begin(os.getpid())
    gpus.log_xid("13, Graphics SM Warp Exception on (GPC 1): Misaligned Address")
    first = watched.wait("xid")["xid"]
    assert (first["count"], first["pids"], first["detail"][:8]) == (1, [], "Graphics")
    gpus.log_xid("13, Graphics Exception: ESR 0x519730=0x500000f")
    gpus.log_xid(f"13, pid={os.getpid()}, name=python3, Graphics Exception: channel 0x0000000a")
    second = watched.wait("xid")["xid"]
    assert (second["count"], second["workers"]) == (3, [os.getpid()])
    assert second["detail"] == first["detail"]
    gpus.report_xid(0, 13)
    gpus.report_xid(0, 31)
    # NVML reported one error, for which the kernel had written three records.
    assert watched.wait("xid")["xid"] == {**second, "count": 1}
    assert watched.wait("xid")["xid"]["code"] == 31


def test_repeated_records_are_counted_and_not_reported_one_by_one(watched, gpus):
    for _ in range(100):
        gpus.log_xid("43, pid=1, name=x, channel 0x0000000a")
    assert watched.wait("xid")["xid"]["count"] == 1
    watched.settle()
    assert [message["xid"]["count"] for message in watched.messages if "xid" in message] == [100]


def test_at_most_64_different_xids_are_reported(watched, gpus):
    for code in range(200):
        gpus.log_xid(f"{code}, pid=1, name=x")
    watched.settle()
    reported = {message["xid"]["code"] for message in watched.messages if "xid" in message}
    assert len(reported) == 64


def test_a_new_attempt_has_no_earlier_xids(watched, gpus):
    gpus.report_xid(0, 31)
    watched.wait("xid")
    watched.begin(attempt=1)
    gpus.report_xid(0, 31)
    message = watched.wait("xid")
    assert (message["attempt"], message["xid"]["count"]) == (1, 1)


@pytest.mark.parametrize(("pids", "is_named"), [(None, True), ("pid:[1]", False)])
def test_an_xid_names_the_worker_only_within_the_same_pid_namespace(watch, gpus, pids, is_named):
    watched = watch(pids=pids)
    watched.begin(os.getpid())
    gpus.log_xid(f"31, pid={watched.pid}, name=python3, channel 0x0000000a")
    xid = watched.wait("xid")["xid"]
    assert (xid["pids"], xid["workers"]) == ([watched.pid], [os.getpid()] if is_named else [])


def test_gpus_that_are_not_visible_to_the_job_are_not_watched(watch, gpus):
    gpus.set("count", 2)
    watched = watch(CUDA_VISIBLE_DEVICES="1")
    watched.begin()
    gpus.log_xid("31, pid=1, name=x", place=6)
    gpus.log_xid("43, pid=1, name=x", place=7)
    assert watched.wait("xid")["xid"]["gpu"] == 1
    gpus.set("gpu0/memory", GIB)
    assert watched.settle() == {}


def test_gpu_memory_near_its_baseline_counts_as_released(watch, gpus):
    gpus.set("gpu0/memory", 5 * GIB)
    watched = watch()
    watched.begin()
    gpus.set("gpu0/memory", 5 * GIB + (16 << 20))
    assert watched.settle() == {}


def test_gpu_memory_that_is_still_held_is_reported_until_it_is_free(watched, gpus):
    gpus.set("gpu0/memory", f"{8 * GIB} 5")
    assert watched.settle() == {"0": 8 * GIB}
    assert watched.wait("settled") == {"settled": 0, "held": {}}
    assert gpus.path("gpu0/memory").read_text() == "0\n"


def test_gpu_memory_of_an_unrelated_process_is_not_waited_for(watched, gpus):
    gpus.set("gpu0/processes", f"{os.getpid()} {8 * GIB}")
    gpus.set("gpu0/memory", 8 * GIB)
    assert watched.settle() == {}
    gpus.set("gpu0/memory", 9 * GIB)
    assert watched.settle() == {"0": GIB}


def test_gpu_memory_of_a_running_worker_is_waited_for(watch, gpus):
    """The agent asks for the memory while it is still stopping the other workers."""
    watched = watch()
    watched.begin(os.getpid())
    gpus.set("gpu0/processes", f"{watched.pid} {8 * GIB}")
    gpus.set("gpu0/memory", f"{8 * GIB} 5")
    assert watched.settle() == {"0": 8 * GIB}
    gpus.remove("gpu0/processes")
    assert watched.wait("settled")["held"] == {}


def test_the_memory_of_a_gpu_with_mig_enabled_is_not_watched(watch, gpus):
    gpus.set("gpu0/mig", 1)
    watched = watch()
    watched.begin()
    gpus.set("gpu0/memory", 8 * GIB)
    assert watched.settle() == {}


@pytest.mark.parametrize("function", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMigMode"])
def test_an_nvml_version_without_optional_functions_is_sufficient(watch, gpus, function):
    gpus.set("fails", f"{function} 13")
    watched = watch()
    watched.begin()
    gpus.set("gpu0/memory", 8 * GIB)
    assert watched.settle() == {"0": 8 * GIB}


@pytest.mark.parametrize(("function", "code"), [("nvmlInit_v2", 9), ("nvmlDeviceGetCount_v2", 999)])
def test_an_nvml_initialization_failure_is_reported(watch, gpus, function, code):
    gpus.set("fails", f"{function} {code}")
    message = watch().wait("problem")
    assert message["is_blind"]
    assert function in message["problem"]


def test_the_kernel_log_is_used_if_nvml_events_are_not_available(watch, gpus):
    gpus.set("fails", "nvmlEventSetCreate 13")
    watched = watch()
    watched.begin()
    assert "nvmlEventSetCreate" in watched.wait("problem")["problem"]
    gpus.log_xid("31, pid=1, name=x")
    assert watched.wait("xid")["xid"]["code"] == 31


def test_the_kernel_log_is_used_after_a_lost_gpu_ends_nvml_events(watched, gpus):
    gpus.path("events").write_text("lost\n")
    assert "is_blind" not in watched.wait("problem")
    gpus.log_xid("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    assert watched.wait("xid")["xid"]["code"] == 79


def test_an_unreadable_kernel_log_is_reported_and_nvml_is_still_used(watch, gpus):
    watched = watch(log="no such file")
    assert "no such file" in watched.wait("problem")["problem"]
    watched.begin()
    gpus.report_xid(0, 31)
    assert watched.wait("xid")["xid"]["code"] == 31


def test_a_hanging_nvml_call_is_reported_and_the_kernel_log_is_still_read(watch, gpus):
    gpus.set("hangs", "nvmlDeviceGetMemoryInfo_v2 2")
    program = list(command("elasticrs._engine.gpus.gpu_watch"))
    program[program.index("-c") + 1] = program[program.index("-c") + 1].replace(
        "sys.exit", "main.__globals__['CALL_LIMIT'] = 0.2; sys.exit"
    )
    watched = watch(program=program)
    watched.begin()
    watched.ask(settle=0)
    message = watched.wait("problem")
    assert message["is_blind"]
    assert "nvmlDeviceGetMemoryInfo_v2" in message["problem"]
    gpus.log_xid("31, pid=1, name=x")
    assert watched.wait("xid")["xid"]["code"] == 31
