"""GPUs that a test describes with files, for processes that load NVML. See ``crates/elasticrs-fake-nvml``."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[2] / "target"))


class FakeGpus:
    """The files that describe the GPUs. There is one GPU with a recovery action (none), unless a test changes
    that.

    Attributes:
        environment: environment variables with which a process finds the fake library and the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "libnvidia-ml.so.1").symlink_to(TARGET / "debug" / "libfake_nvml.so")
        self.environment = {"FAKE_NVML": str(folder), "LD_LIBRARY_PATH": str(folder / "lib")}
        os.mkfifo(folder / "events")
        self._events = os.open(folder / "events", os.O_RDWR | os.O_CLOEXEC)
        self.set("gpu0/field230", 0)

    def path(self, name: str) -> Path:
        return self._folder / name

    def set(self, name: str, value: object) -> None:
        """Replace a file as a whole, because the library may read it at any time."""
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(f"{value}\n")
        new.rename(path)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()

    def report_xid(self, gpu: int, xid: int) -> None:
        """Report an event of a GPU."""
        os.write(self._events, f"{gpu} {xid}\n".encode())

    def close(self) -> None:
        os.close(self._events)


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    fake = FakeGpus(tmp_path / "nvml")
    yield fake
    fake.close()
