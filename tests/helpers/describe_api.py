"""Description of a module's names as JSON. A separate process makes it, because importing torch leaves a
thread behind.

As a program: the names of the module, then the functions to describe, ``=`` before those to call.
"""

import json
import sys
from typing import Any

from helpers.procs import run_program
from helpers.torch_programs import TorchPrograms

PROGRAM = """
import dataclasses, enum, importlib, inspect, json, sys
module = importlib.import_module(sys.argv[1])
described = {}
for name in sys.argv[2:]:
    found = getattr(module, name)
    if dataclasses.is_dataclass(found):
        fields = dataclasses.fields(found)
        described[name] = [(each.name, type(each.default).__name__, str(each.default)[:9]) for each in fields]
    elif inspect.isclass(found) and issubclass(found, enum.Enum):
        described[name] = [(each.name, each.value) for each in found]
    else:
        parameters = inspect.signature(found).parameters.values()
        described[name] = [(each.name, str(each.kind), str(each.default)) for each in parameters]
print(json.dumps(described))
"""


def describe(module: str, *names: str, programs: TorchPrograms | None = None) -> dict[str, Any]:
    """Return the fields of dataclasses, the members of enums, and the parameters of everything else.

    Args:
        programs: where to run the program, for a module of torch.
    """
    described: dict[str, Any] = json.loads(run(PROGRAM, module, *names, programs=programs))
    return described


def run(program: str, *arguments: str, programs: TorchPrograms | None = None) -> str:
    """Run a program and return the last line that it printed.

    Args:
        programs: where to run the program, if it uses torch.
    """
    if programs is None:
        output = run_program([sys.executable, "-c", program, *arguments], check=True).stdout
    else:
        output = programs.checked(program, *arguments)
    return output.splitlines()[-1]
