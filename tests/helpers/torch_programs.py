"""Programs that use torch, forked from one process that has imported it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from helpers import procs
from helpers.forker import Forker
from helpers.launcher import LAUNCHERS
from helpers.procs import HANG

RUN = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Forked:
    """Process of :meth:`TorchPrograms.popen`, with the members of `subprocess.Popen` that `Launched` uses."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


class TorchPrograms(Forker):
    """Runs programs in forks of a process that has imported ``torch.distributed``, because an import for each
    program takes longer than most of these programs.

    Args:
        folder: a folder for the output of the programs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("torch_programs.py")
        self._folder = folder
        self._take_line(2 * HANG, "the import of torch hangs")

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
            code = int(self._take_line(timeout, "the program hangs"))
            output = (files[name].read_text(encoding="utf-8") for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess([program, *arguments], code, *output)

    def popen(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdin: int, **how: Any) -> Any:
        """Start elasticrun or a Python program as a fork of the process that has imported torch. Start any
        other program by :class:`subprocess.Popen`, which this method replaces. The workers of elasticrun are
        forks, too, so no process has to import torch again.
        """
        arguments: Sequence[str]
        if tuple(argv[:3]) == LAUNCHERS["elasticrs"]:
            program = "import sys; from elasticrs.launch import main; sys.exit(main())"
            arguments = ("--run-path", "--start-method=fork", *argv[3:])
        elif argv[0] == sys.executable:
            program, arguments = RUN, argv[1:]
        else:
            return subprocess.Popen(argv, env=env, cwd=cwd, stdin=stdin, **how)
        ours, theirs = zip(*(os.pipe()[:: 1 if name else -1] for name in range(3)), strict=True)
        names = [f"/proc/{os.getpid()}/fd/{file}" for file in theirs]
        if stdin == subprocess.DEVNULL:
            names[0] = os.devnull
        files = dict(zip(("stdin", "stdout", "stderr"), names, strict=True))
        self.order({"program": program, "arguments": arguments, **files, "env": dict(env), "cwd": str(cwd)})
        pid = int(self._take_line(HANG, "the program does not start"))
        for file in theirs:
            os.close(file)
        return Forked(pid, open(ours[0], "wb"), open(ours[1], "rb"), open(ours[2], "rb"))

    def preload(self, *modules: str) -> None:
        """Import modules into the process whose forks run the programs, so that later programs need not."""
        for module in modules:
            self.order({"import": module})
            assert self._take_line(HANG, f"the import of {module} hangs")

    def _take_line(self, timeout: float, trouble: str) -> str:
        in_time = procs.wait_readable(self.answers.fileno(), timeout)
        if not in_time:
            programs = [program.pid for program in procs.children(self._process.pid)]
            for pid in programs or [self._process.pid]:
                os.kill(pid, signal.SIGKILL)
        line: str = self.answers.readline()
        assert in_time, trouble
        return line

    def run_module(self, module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
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
