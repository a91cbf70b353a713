"""Worker like ``raises.py`` that first computes a result with torch and reports ``torch``."""

import torch
from raises import wait_and_fail
from report import report

assert (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item() == 512
report("torch")
wait_and_fail()
