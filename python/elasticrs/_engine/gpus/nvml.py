""":mod:`ctypes` bindings for NVML, the management library of NVIDIA's driver.

Use it only in child processes. A call may hang in the driver, and the library leaves threads and file
descriptors behind when it is shut down.
"""

from __future__ import annotations

import ctypes

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LIBRARY = "libnvidia-ml.so.1"

NOT_SUPPORTED = 3
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18

ECC_UNCORRECTABLE = 4
"""Field for the uncorrectable memory errors since the driver was loaded or the GPU was last reset."""
REMAP_PENDING = 144
"""Field that is 1 if a faulty memory row will be replaced at the next reset."""
REMAP_FAILURE = 145
"""Field that is 1 if a faulty memory row could not be replaced."""
RECOVERY_ACTION = 230
"""Field for the recovery action that the GPU needs before it can be used again."""

RECOVERY_ACTIONS = {
    0: "nothing",
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "an end to the peer-to-peer traffic between GPUs (drain P2P)",
    4: "an end to the jobs on the GPU, and then a reset (drain and reset)",
    5: "a recovery of the IMEX domain",
    6: "a reset of the GPU's PCIe bus",
    7: "a reboot of the system",
}
"""Recovery actions as text for users, keyed by the driver's numbers."""

_XID_EVENT = 8
_UNSIGNED_TYPES = {1: ctypes.c_uint, 2: ctypes.c_ulong, 3: ctypes.c_ulonglong, 4: ctypes.c_longlong}
_NAME_SIZE = 96
_MAX_PROCESSES = 1024


class NvmlError(Exception):
    """Raised if a call to NVML fails.
    ``code`` is the return value. ``function`` is ``dlopen`` if the library cannot be loaded. The code
    :data:`FUNCTION_NOT_FOUND` also means that the installed library lacks the function.
    """

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.function = function
        self.code = code


class _Field(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("code", ctypes.c_int),
        ("value", ctypes.c_ubyte * 8),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("address", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _MemoryWithoutReserve(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Device(Value):
    """GPU with its number in ``nvidia-smi``, its ``GPU-…`` identifier, and its PCI address."""

    handle: ctypes.c_void_p
    index: int
    uuid: str
    address: str


class Nvml:
    """The initialized NVML library. ``calling`` is the current function, except a wait for an event.
    Raises :class:`NvmlError` if the driver is not loaded or has a different version.
    """

    def __init__(self) -> None:
        self.calling = ""
        self._events = ctypes.c_void_p()
        self._watched: list[Device] = []
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError("dlopen", LIBRARY_NOT_FOUND, str(error)) from None
        self._call("nvmlInit_v2")

    def count(self) -> int:
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(number))
        return number.value

    def device(self, index: int) -> Device:
        """Return a GPU. Raise :class:`NvmlError` if it is unusable, for example with :data:`GPU_IS_LOST`."""
        handle, uuid, pci = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_SIZE), _Pci()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_NAME_SIZE))
        self._call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
        return Device(handle, index, uuid.value.decode("ascii", "replace"), pci.address.decode())

    def fields(self, device: Device, names: Iterable[int]) -> dict[int, int]:
        """Return the values of fields, without fields that the GPU or the driver does not support."""
        fields = (_Field * len(wanted := tuple(names)))()
        for field, number in zip(fields, wanted, strict=True):
            field.field = number
        self._call("nvmlDeviceGetFieldValues", device.handle, len(wanted), fields)
        return {
            field.field: kind.from_buffer(field.value).value
            for field in fields
            if field.code == 0 and (kind := _UNSIGNED_TYPES.get(field.type)) is not None
        }

    def used_memory(self, device: Device) -> int:
        """Return the bytes in use. With old drivers, they include the driver's own reserve."""
        memory = _MemoryWithoutReserve(version=ctypes.sizeof(_MemoryWithoutReserve) | 2 << 24)
        if self._is_supported("nvmlDeviceGetMemoryInfo_v2", device.handle, ctypes.byref(memory)):
            return int(memory.used)
        old = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", device.handle, ctypes.byref(old))
        return int(old.used)

    def processes(self, device: Device) -> dict[int, int]:
        """Return the bytes of each pid. In a container, pids may be the host's, and some may be missing."""
        found, number = (_Process * _MAX_PROCESSES)(), ctypes.c_uint(_MAX_PROCESSES)
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        if not self._is_supported(name, device.handle, ctypes.byref(number), found):
            return {}
        # The driver reports this number if it does not know how much memory a process holds.
        unknown = 2**64 - 1
        return {each.pid: each.used for each in found[: number.value] if each.used != unknown}

    def is_divided(self, device: Device) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        modes = ctypes.byref(current), ctypes.byref(pending)
        return self._is_supported("nvmlDeviceGetMigMode", device.handle, *modes) and current.value == 1

    def watch_xids(self, devices: Iterable[Device]) -> None:
        """Start to receive Xids. Raise :class:`NvmlError` if the library or all of the GPUs lack support."""
        self._call("nvmlEventSetCreate", ctypes.byref(self._events))
        problem = NvmlError("nvmlDeviceRegisterEvents", NOT_SUPPORTED, "there is no GPU")
        for device in devices:
            kinds = ctypes.c_ulonglong(_XID_EVENT)
            try:
                self._call("nvmlDeviceRegisterEvents", device.handle, kinds, self._events)
            except NvmlError as error:
                problem = error
            else:
                self._watched.append(device)
        if not self._watched:
            raise problem

    def next_xid(self, seconds: float) -> tuple[Device, int] | None:
        """Return an Xid with its GPU; ``None`` if none arrives within ``seconds``, or another event does.
        Raise :class:`NvmlError` if a GPU is lost, or the driver failed.
        """
        event = _Event()
        milliseconds = ctypes.c_uint(int(1000 * seconds))
        try:
            self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), milliseconds, is_wait=True)
        except NvmlError as error:
            if error.code != TIMEOUT:
                raise
            return None
        device = next((each for each in self._watched if each.handle.value == event.device), None)
        return None if device is None or event.type != _XID_EVENT else (device, event.data)

    def _is_supported(self, name: str, *arguments: object) -> bool:
        """Call a function of NVML. Return false if this version of NVML, or the GPU, does not support it."""
        try:
            self._call(name, *arguments)
        except NvmlError as error:
            if error.code not in (FUNCTION_NOT_FOUND, NOT_SUPPORTED, INSUFFICIENT_SIZE):
                raise
            return False
        return True

    def _call(self, name: str, *arguments: object, is_wait: bool = False) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(name, FUNCTION_NOT_FOUND, "this version of NVML lacks the function") from None
        if not is_wait:
            self.calling = name
        code = function(*arguments)
        if not is_wait:
            self.calling = ""
        if code != 0:
            raise NvmlError(name, code, self._text(code))

    def _text(self, code: int) -> str:
        try:
            function = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return (function(code) or b"").decode("utf-8", "replace") or f"error {code}"


def main() -> int:
    """Print the UUIDs of all GPUs, one per line. Return the exit code."""
    try:
        library = Nvml()
        print(*(library.device(index).uuid for index in range(library.count())), sep="\n")
    except NvmlError:
        return 1
    return 0
