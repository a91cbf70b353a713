"""Ask NVML, the management library of NVIDIA's driver, whether the GPUs of this node can run workers."""

from __future__ import annotations

import _thread
import os
import sys

from elasticrs.host import nvml
from elasticrs.host.health_program import NO_ANSWER, UNFIT, NoAnswerError, say
from elasticrs.host.nvml import NvmlError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.host.nvml import Nvml

LIMIT = 40.0
"""Seconds that the calls may take together. The initialization takes long if the driver was not loaded."""

_FIELDS = (nvml.RECOVERY_ACTION, nvml.REMAP_FAILURE, nvml.REMAP_PENDING, nvml.ECC_UNCORRECTABLE)
_PROOFS = {
    nvml.GPU_IS_LOST: "it has fallen off the bus or is not accessible",
    nvml.RESET_REQUIRED: "it needs a reset before it can be used again",
}
"""Return values of a function that prove that the GPU cannot be used."""


class Verdict:
    """What is known about the GPUs.

    Attributes:
        unfit: a reason for each GPU that cannot run workers.
        remarks: facts that do not make a GPU unfit.
        count: number of GPUs that were examined.
    """

    def __init__(self) -> None:
        self.unfit: list[str] = []
        self.remarks: list[str] = []
        self.count = 0

    def line(self) -> str:
        """Return the result as one sentence."""
        if self.unfit:
            return "; ".join(self.unfit)
        if not self.count:
            return "NVML shows no GPU"
        return f"{self.count} GPU{'s are' if self.count > 1 else ' is'} fit"


def examine(library: Nvml, verdict: Verdict) -> None:
    """Examine all GPUs.

    Raises:
        NvmlError: the library cannot count the GPUs.
    """
    for index in range(library.count()):
        verdict.count += 1
        try:
            device = library.device(index)
            fields = library.fields(device, _FIELDS)
        except NvmlError as error:
            if error.code in _PROOFS:
                verdict.unfit.append(f"GPU {index} is unfit: {_PROOFS[error.code]} ({error})")
            else:
                verdict.remarks.append(f"GPU {index} could not be examined: {error}")
            continue
        name = f"GPU {index} ({device.address})"
        reason = why_unfit(fields)
        if reason is not None:
            verdict.unfit.append(f"{name} is unfit: {reason}")
        verdict.remarks += [f"{name}: {remark}" for remark in remarks(fields)]


def why_unfit(fields: dict[int, int]) -> str | None:
    """Return the reason why a GPU with these fields cannot run workers; ``None`` if it can.

    If the driver reports a recovery action, that action takes all errors into account. Otherwise the other
    fields must agree, because an uncorrectable error alone may have been repaired.
    """
    action = fields.get(nvml.RECOVERY_ACTION)
    if action in nvml.RECOVERY_ACTIONS and action != 0:
        return f"the driver asks for {nvml.RECOVERY_ACTIONS[action]}"
    if fields.get(nvml.REMAP_FAILURE):
        return "a faulty row of its memory could not be replaced"
    if action is None and fields.get(nvml.REMAP_PENDING) and fields.get(nvml.ECC_UNCORRECTABLE):
        return "its memory has uncorrectable errors, and faulty rows that are replaced at the next reset"
    return None


def remarks(fields: dict[int, int]) -> list[str]:
    """Return facts that do not make a GPU unfit, but that an administrator should know."""
    found = []
    action = fields.get(nvml.RECOVERY_ACTION)
    if action is None:
        found.append("the driver does not report a recovery action")
    elif action not in nvml.RECOVERY_ACTIONS:
        found.append(f"the driver asks for the recovery action {action}, which is not known here")
    if errors := fields.get(nvml.ECC_UNCORRECTABLE):
        found.append(f"{errors} uncorrectable memory error{'s' if errors > 1 else ''} since the last reset")
    if fields.get(nvml.REMAP_PENDING):
        found.append("a faulty row of the memory is replaced at the next reset")
    return found


def problem_of(error: NvmlError) -> str:
    """Return the sentence for a library that cannot be used."""
    if error.code == nvml.LIBRARY_NOT_FOUND:
        return f"NVML is not available ({error})"
    if error.code == nvml.DRIVER_NOT_LOADED:
        return "the NVIDIA driver is not loaded"
    if error.code == nvml.VERSION_MISMATCH:
        return "NVML and the loaded driver are of different versions; a reboot usually helps"
    if error.code == nvml.FUNCTION_NOT_FOUND:
        return f"this version of NVML cannot tell ({error})"
    return f"NVML failed ({error})"


def main() -> int:
    """Print the result. Return 1 if a GPU is unfit, otherwise 0. If the library hangs, exit.

    Raises:
        NoAnswerError: the library cannot be used, and nothing proves that a GPU is unfit.
    """
    verdict, over = Verdict(), _thread.allocate_lock()
    problems: list[str] = []
    libraries: list[Nvml] = []
    over.acquire()

    def run() -> None:
        try:
            libraries.append(nvml.Nvml())
            examine(libraries[0], verdict)
        except NvmlError as error:
            problems.append(problem_of(error))
        finally:
            over.release()

    _thread.start_new_thread(run, ())
    has_answered = over.acquire(timeout=LIMIT)
    if not has_answered:
        where = libraries[0].calling if libraries else "nvmlInit_v2"
        problems.append(f"NVML hangs in {where} (for {LIMIT:g} s)")
    for remark in verdict.remarks:
        say(remark)
    if verdict.unfit or not problems:
        say("; ".join([verdict.line(), *problems]))
    if not has_answered:
        if not verdict.unfit:
            say("; ".join(problems))
        sys.stdout.flush()
        # A thread that hangs in the driver would keep the interpreter from exiting.
        os._exit(UNFIT if verdict.unfit else NO_ANSWER)
    if problems and not verdict.unfit:
        raise NoAnswerError("; ".join(problems))
    return 1 if verdict.unfit else 0
