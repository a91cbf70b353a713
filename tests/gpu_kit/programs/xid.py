"""Access an illegal address of device memory. On a CPU, simulate a driver that reports such an access."""

import ctypes
import os

import torch
from kit import ON_GPU, choose_device, report, wait_for_calls, write_driver_file

PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry fault()
{
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
\0"""


def check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"a call of the CUDA driver failed with {code}")


choose_device()
report("faults")
if ON_GPU:
    torch.ones(1, device="cuda").item()
    cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"fault"))
    check(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    torch.cuda.synchronize()
else:
    text = f"31, pid={os.getpid()}, name=python3, channel 0x0000000a. MMU Fault"
    write_driver_file("kmsg", f"4,1,1,c;NVRM: Xid (PCI:0000:00:06): {text}")
    write_driver_file("events", "0 31")
    # The second wait shows that the watcher has received this event.
    wait_for_calls("nvmlEventSetWait_v2", 2)
    raise RuntimeError("an illegal memory access was encountered")
