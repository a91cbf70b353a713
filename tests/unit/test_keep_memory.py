"""How much memory kept state may take: a share of what is available, within the limits of the cgroups."""

import pytest

from elasticrs._engine.job.config import keep_bandwidth, keep_memory
from elasticrs._engine.supervise.run.keeping import available_memory, memory_budget

G = 1 << 30
MACHINE = {"/proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * G // 1024} kB\n"}
V2 = {
    **MACHINE,
    "/proc/self/cgroup": "0::/job/step",
    "/proc/self/mountinfo": "1 2 3:4 / /sys/fs/cgroup rw - cgroup2 cgroup rw",
    "/sys/fs/cgroup/job/step/memory.max": "max",
    "/sys/fs/cgroup/job/step/memory.current": "5",
    "/sys/fs/cgroup/job/memory.max": str(4 * G),
    "/sys/fs/cgroup/job/memory.current": str(3 * G),
    "/sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {G}\n",
}
FULL = {**V2, "/sys/fs/cgroup/job/memory.current": str(6 * G)}
V1 = {
    **MACHINE,
    "/proc/self/cgroup": "4:memory:/job",
    "/proc/self/mountinfo": "1 2 3:4 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(3 * G),
    "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(G),
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(G),
}


@pytest.mark.parametrize(
    ("files", "left"),
    [({}, 0), (MACHINE, 8 * G), (V2, 2 * G), (FULL, 0), (V1, 2 * G)],
    ids=["unknown", "machine", "v2", "more used than allowed", "v1"],
)
def test_available_memory_is_that_of_the_tightest_limit(files, left):
    assert available_memory(lambda path: files.get(path, "")) == left


def test_a_share_is_of_the_available_memory():
    assert 0 < memory_budget("1%") < available_memory() / 50
    assert memory_budget("2M") == 2 << 20
    assert memory_budget("0") == memory_budget("0%") == 0


@pytest.mark.parametrize("text", ["", "%", "91%", "-1%", "nan%", "nan", "-5", "1X", "1e300", "40 percent"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="a share of memory from 0% to 90%"):
        keep_memory(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("0", 0), ("1M", 1 << 20), ("500M", 500 << 20), ("2000000", 2000000)]
)
def test_a_bandwidth_is_a_number_of_bytes(text, rate):
    assert keep_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["", "40%", "1K", "-1", "fast"])
def test_other_bandwidths_are_refused(text):
    with pytest.raises(ValueError, match="at least 1M, or 0"):
        keep_bandwidth(text)
