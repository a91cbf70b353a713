"""Imports torch once, and runs each program in a fork of this process; see `helpers/torch_programs.py`.

Writes a line when torch has been imported. Then reads orders, one JSON object per line, and answers each of
them by a line: an order to run a program by its exit code, an order to start a program by its pid, and an
order to import a module by ``True``.
"""

import gc
import json
import os
import sys
import traceback
import types

import torch._dynamo  # Import it once here. Otherwise, each fork would do so at its optimizer's first step.
import torch.distributed  # noqa: F401

main = sys.modules["__main__"] = types.ModuleType("__main__")


def redirect(order):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.open(order[name], os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)


def run(order):
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


def start(order):
    """Start a program in a grandchild of this process. Return the pid of the grandchild, which becomes a
    child of the process that runs the tests, because that one adopts orphans.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        # Open the pipes before the pid is sent. When the tests have received it, they close their ends.
        redirect(order)
        if pid := os.fork():
            os.write(writer, b"%d" % pid)
            os._exit(0)
        os.close(reader)
        os.close(writer)
        os.setsid()
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        run(order)
    os.waitpid(between, 0)
    os.close(writer)
    with open(reader, "rb") as file:
        return int(file.read())


gc.collect()
gc.freeze()  # Otherwise, garbage collection in a fork would copy all pages with torch's objects.
print("torch is there", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "import" in order:
        print(bool(__import__(order["import"])), flush=True)
        gc.freeze()
        continue
    if "cwd" in order:
        print(start(order), flush=True)
        continue
    pid = os.fork()
    if not pid:
        redirect(order)
        run(order)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
