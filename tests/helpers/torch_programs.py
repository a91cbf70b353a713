"""Programs that use torch, forked from one process that has imported it."""

import subprocess
import tempfile
from pathlib import Path

from helpers import procs
from helpers.forker import Forker
from helpers.procs import HANG


class TorchPrograms(Forker):
    """Runs programs in forks of a process that has imported ``torch.distributed``, because an import for each
    program takes longer than most of these programs.

    Args:
        folder: a folder for the output of the programs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("torch_programs.py")
        self._folder = folder

    def run(
        self, program: str, *arguments: str, text: str = "", timeout: float = HANG
    ) -> subprocess.CompletedProcess[str]:
        """Run a program until it exits, and return its exit code and output.

        Args:
            text: the standard input of the program.
            timeout: seconds after which the program hangs.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            files = {name: Path(folder) / name for name in ("stdin", "stdout", "stderr")}
            files["stdin"].write_text(text, encoding="utf-8")
            paths = {name: str(path) for name, path in files.items()}
            self.order({"program": program, "arguments": arguments, **paths})
            assert procs.wait_readable(self.answers.fileno(), timeout), "the program hangs"
            code = int(self.answers.readline())
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
