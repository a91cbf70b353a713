"""Run three collectives, and then read torch's flight recorder in the same process."""

import json

import torch
import torch.distributed as dist
from kit import BACKEND, DEVICE, choose_device, report

choose_device()
dist.init_process_group(BACKEND)
for _ in range(3):
    part = torch.ones(1, device=DEVICE)
    dist.all_reduce(part)
    part.item()
c10d = torch._C._distributed_c10d
# Since torch 2.11, NCCL and the other backends have separate recorders.
dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
texts = [dump(includeCollectives=True, onlyActive=False) for dump in dumps if dump is not None]
names = [entry["profiling_name"] for text in texts for entry in json.loads(text).get("entries", [])]
report("recorded", names=names, bytes=sum(map(len, texts)))
dist.destroy_process_group()
