"""Fake GPUs for processes that load NVML. The test describes them with files. See
``crates/elasticrs-fake-nvml``.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import procs
from helpers.built import built
from helpers.procs import HANG

LIBRARY = built("libfake_nvml.so")


class FakeGpus:
    """The files that describe the fake GPUs. By default, there is one GPU, with the recovery action "none".

    Attributes:
        environment: environment variables with which a process finds the fake library and the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "lib").mkdir(parents=True)
        (folder / "gpu0").mkdir()
        assert LIBRARY.exists(), "cargo build -p elasticrs-fake-nvml"
        (folder / "lib" / "libnvidia-ml.so.1").symlink_to(LIBRARY)
        self.environment = {"FAKE_NVML": str(folder), "LD_LIBRARY_PATH": str(folder / "lib")}
        self._fifos = {}
        for name in ("events", "calls", "kmsg"):
            os.mkfifo(folder / name)
            # Keep both ends open, because a reader would otherwise see the end of the file.
            self._fifos[name] = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
        self.set("gpu0/field230", 0)

    def path(self, name: str) -> Path:
        return self._folder / name

    def set(self, name: str, value: object) -> None:
        """Replace a file atomically, because the library may read it at any time."""
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(f"{value}\n")
        new.rename(path)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()

    def report_xid(self, gpu: int, xid: int) -> None:
        """Report an Xid of a GPU as an NVML event."""
        os.write(self._fifos["events"], f"{gpu} {xid}\n".encode())

    def log_xid(self, text: str, place: int = 6) -> None:
        """Add an Xid to the kernel log. ``place`` is the device number of the GPU on the PCI bus."""
        record = f"4,360,28078015,c;NVRM: Xid (PCI:0000:00:{place:02x}): {text}"
        os.write(self._fifos["kmsg"], f"{record}\n".encode())

    @property
    def was_used(self) -> bool:
        """True if the library has recorded calls that have not been read."""
        return procs.wait_readable(self._fifos["calls"], 0)

    def wait_for_calls(self, function: str, count: int = 1) -> None:
        """Wait until a function has been called ``count`` times. Calls that the test or a worker has read
        earlier do not count.
        """
        unread = b""
        while count > 0:
            assert procs.wait_readable(self._fifos["calls"]), f"{function} was not called"
            *lines, unread = (unread + os.read(self._fifos["calls"], 65536)).split(b"\n")
            count -= lines.count(function.encode())

    def launcher(self, **values: object) -> tuple[str, ...]:
        """Return the command line of a launcher that finds the fake GPUs and the test's kernel log.
        ``values`` replace further constants of the watcher.
        """
        constants = {
            "KERNEL_LOG": str(self.path("kmsg")),
            "KERNEL_PID_NAMESPACE": os.readlink("/proc/self/ns/pid"),
            "START_LIMIT": HANG,
            "ANSWER_LIMIT": HANG,
            **values,
        }
        program = (
            "import sys; from elasticrs.launch import main;"
            "from elasticrs._engine.supervise.run import gpu_watcher;"
            "from elasticrs._engine import gpus;"
            f"gpus.DEVICE = {str(self._folder)!r}; vars(gpu_watcher).update({constants!r});"
            "sys.exit(main())"
        )
        return (sys.executable, "-c", program)

    def close(self) -> None:
        for fd in self._fifos.values():
            os.close(fd)


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    fake = FakeGpus(tmp_path / "nvml")
    yield fake
    fake.close()
