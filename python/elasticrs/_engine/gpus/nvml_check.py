"""Checks with NVML, the management library of NVIDIA's driver, whether this node's GPUs can run workers."""

from __future__ import annotations

import os
import sys

from elasticrs._engine.gpus import nvml
from elasticrs._engine.gpus.node_check import UNFIT
from elasticrs._engine.gpus.nvml import NvmlError
from elasticrs._engine.process.background_call import BackgroundCall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.gpus.nvml import Nvml

NO_ANSWER = 75
"""Exit code if NVML gave no answer (``EX_TEMPFAIL`` in sysexits.h)."""

LIMIT = 40.0
"""Time limit in seconds for all NVML calls. The initialization is slow if the driver is not loaded yet."""

_FIELDS = (nvml.RECOVERY_ACTION, nvml.REMAP_FAILURE, nvml.REMAP_PENDING, nvml.ECC_UNCORRECTABLE)
_PROOFS = {
    nvml.GPU_IS_LOST: "it has fallen off the bus or is not accessible",
    nvml.RESET_REQUIRED: "it needs a reset before it can be used again",
}
"""Return values of NVML functions that prove that a GPU cannot be used, with the reason for users."""


class GpuFindings:
    """Results of the check so far. ``remarks`` are facts that do not make a GPU unfit."""

    def __init__(self) -> None:
        self.unfit: list[str] = []
        self.remarks: list[str] = []
        self.unexamined: list[str] = []
        self._count = 0
        self._library: Nvml | None = None

    @property
    def calling(self) -> str:
        return "nvmlInit_v2" if self._library is None else self._library.calling

    def verdict(self, *, is_complete: bool) -> list[str]:
        if self.unfit or not is_complete:
            return self.unfit
        if not self._count:
            return ["NVML shows no GPU"]
        return [f"{self._count} GPU{'s are' if self._count > 1 else ' is'} fit"]

    def collect(self) -> None:
        """Examine all GPUs. Raise :class:`NvmlError` if the library cannot count them."""
        self._library = library = nvml.Nvml()
        for index in range(library.count()):
            try:
                device = library.device(index)
                fields = library.fields(device, _FIELDS)
            except NvmlError as error:
                if error.code in _PROOFS:
                    self.unfit.append(f"GPU {index} is unfit: {_PROOFS[error.code]} ({error})")
                else:
                    self.unexamined.append(f"GPU {index} could not be examined: {error}")
                continue
            self._count += 1
            name = f"GPU {index} ({device.address})"
            reason = why_unfit(fields)
            if reason is not None:
                self.unfit.append(f"{name} is unfit: {reason}")
            self.remarks += [f"{name}: {remark}" for remark in remarks(fields)]


def why_unfit(fields: dict[int, int]) -> str | None:
    """Return why a GPU with these field values cannot run workers; ``None`` if it can.

    A GPU is unfit if the driver requests a recovery action, or a faulty memory row could not be replaced.
    Older drivers do not report recovery actions. With them, a GPU is also unfit if it has uncorrectable
    memory errors and a faulty row that will be replaced at the next reset. One of the two alone is
    no proof, because the memory may have been repaired.
    """
    action = fields.get(nvml.RECOVERY_ACTION)
    if action in nvml.RECOVERY_ACTIONS and action != 0:
        return f"the driver asks for {nvml.RECOVERY_ACTIONS[action]}"
    if fields.get(nvml.REMAP_FAILURE):
        return "a faulty row of its memory could not be replaced"
    if action is None and fields.get(nvml.REMAP_PENDING) and fields.get(nvml.ECC_UNCORRECTABLE):
        return "its memory has uncorrectable errors, and a faulty row will be replaced only at the next reset"
    return None


def remarks(fields: dict[int, int]) -> list[str]:
    found = []
    action = fields.get(nvml.RECOVERY_ACTION)
    if action is None:
        found.append("the driver does not report a recovery action")
    elif action not in nvml.RECOVERY_ACTIONS:
        found.append(f"the driver asks for recovery action {action}, which elasticrs does not know")
    if errors := fields.get(nvml.ECC_UNCORRECTABLE):
        found.append(f"{errors} uncorrectable memory error{'s' if errors > 1 else ''} since the last reset")
    if fields.get(nvml.REMAP_PENDING):
        found.append("a faulty memory row will be replaced at the next reset")
    return found


def problem_of(error: NvmlError) -> str:
    if error.code == nvml.LIBRARY_NOT_FOUND:
        return f"NVML is not available ({error})"
    if error.code == nvml.DRIVER_NOT_LOADED:
        return "the NVIDIA driver is not loaded"
    if error.code == nvml.VERSION_MISMATCH:
        return "NVML and the loaded driver have different versions; a reboot usually helps"
    if error.code == nvml.FUNCTION_NOT_FOUND:
        return f"NVML does not support this check ({error})"
    return f"NVML failed ({error})"


def say(line: str) -> None:
    """Print a line as UTF-8 in any locale. Replace characters that cannot be encoded."""
    sys.stdout.buffer.write(line.encode("utf-8", "replace") + b"\n")


def main() -> int:
    """Return the exit code: :data:`.UNFIT` if a GPU is unfit, otherwise :data:`NO_ANSWER` if NVML could not
    be used for all GPUs, otherwise 0. If an NVML call hangs, exit the process.
    """
    findings = GpuFindings()
    call = BackgroundCall(findings.collect)
    has_answered = call.wait(LIMIT)
    problems = []
    if not has_answered:
        problems.append(f"NVML hangs in {findings.calling} (for {LIMIT:g} s)")
    else:
        try:
            call.take()
        except NvmlError as error:
            problems.append(problem_of(error))
        # Catch all exceptions, because a GPU may already have been found unfit, which must still be reported.
        except Exception as error:
            problems.append(f"the check failed ({error!r})")
    problems += findings.unexamined
    for remark in findings.remarks:
        say(remark)
    say("; ".join([*findings.verdict(is_complete=not problems), *problems]))
    code = UNFIT if findings.unfit else NO_ANSWER if problems else 0
    if not has_answered:
        sys.stdout.flush()
        # The normal exit would wait for the thread that hangs in the driver.
        os._exit(code)
    return code
