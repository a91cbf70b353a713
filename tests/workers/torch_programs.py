"""Imports torch once, and runs each program in a fork of this process; see `helpers/torch_programs.py`.

Writes a line when torch is there. Takes one JSON object per line, and writes the exit code of each program as
one line.
"""

import json
import os
import sys
import traceback
import types

import torch.distributed  # noqa: F401

main = sys.modules["__main__"] = types.ModuleType("__main__")


def run(order):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(order[name], flags), number)
    sys.argv[:] = ["-c", *order["arguments"]]
    code = 0
    try:
        exec(compile(order["program"], "<string>", "exec"), vars(main))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not shut the interpreter down, because threads of torch sometimes abort the shutdown.
    os._exit(code)


print("torch is there", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
