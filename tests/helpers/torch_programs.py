"""Programs that use torch, forked from one process that has imported it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import procs
from helpers.launcher import clean_environment
from helpers.procs import HANG

_PROGRAM = Path(__file__).resolve().parent.parent / "workers" / "torch_programs.py"


class TorchPrograms:
    """Runs programs in forks of a process that has imported ``torch.distributed``, because an import for each
    program takes longer than most of these programs.

    Args:
        folder: a folder for the output of the programs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        # This process outlives the tests that use it, and other tests must not wait for it as an orphan.
        procs.bystanders.add(self._process.pid)

    def run(
        self, program: str, *arguments: str, text: str = "", timeout: float = HANG
    ) -> subprocess.CompletedProcess[str]:
        """Run a program until it exits, and return its exit code and output.

        Args:
            text: the standard input of the program.
            timeout: seconds after which the program hangs.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            files = {name: Path(folder) / name for name in ("stdin", "stdout", "stderr")}
            files["stdin"].write_text(text, encoding="utf-8")
            paths = {name: str(path) for name, path in files.items()}
            order = {"program": program, "arguments": arguments, **paths}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            assert procs.wait_readable(self._process.stdout.fileno(), timeout), "the program hangs"
            code = int(self._process.stdout.readline())
            output = (files[name].read_text(encoding="utf-8") for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess([program, *arguments], code, *output)

    def run_module(self, module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module of this folder as a program."""
        program = (
            "import os, runpy, sys; folder, module = sys.argv[1:3]; del sys.argv[1:3]; os.chdir(folder);"
            " sys.path.insert(0, folder); runpy.run_module(module, run_name='__main__', alter_sys=True)"
        )
        return self.run(program, str(folder), module, *arguments)

    def checked(self, program: str, *arguments: str, text: str = "", timeout: float = HANG) -> str:
        """Run a program that must succeed, and return what it wrote to its standard output."""
        done = self.run(program, *arguments, text=text, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        procs.bystanders.discard(self._process.pid)
