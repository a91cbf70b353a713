"""A real Slurm on several simulated hosts: the controller on one host, and a ``slurmd`` on each of the
others.

Each host is a network namespace, so nodes have names and addresses of their own. The programs are those on
PATH, or those that ``make setup`` has put into the environment. There is no authentication, no accounting and
no control group, so nothing of the machine is touched. Slurm signals the process group of each task. The
workers do not get these signals, because each worker has a process group of its own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from helpers import procs
from helpers.control import INSIDE
from helpers.hosts import Host, Network
from helpers.launcher import clean_environment

CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PropagateResourceLimits=NONE
{plugins}
NodeName={nodes} CPUs=16 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""


class Programs(NamedTuple):
    """Paths of the Slurm programs.

    Attributes:
        path: folders of programs.
        libraries: folders of libraries that are not where their programs look for them.
        slurmctld: the controller.
        slurmd: the daemon of a node.
        slurmstepd: the program that ``slurmd`` starts for each step; ``None`` for the one that it knows.
    """

    path: Sequence[str]
    libraries: Sequence[str]
    slurmctld: str
    slurmd: str
    slurmstepd: str | None


def find() -> Programs | None:
    """Find the Slurm programs. Return ``None`` if they are not installed."""
    usr = Path(sys.prefix) / "slurm/usr"
    if usr.is_dir():
        (plugins,) = usr.glob("lib/*/slurm-wlm")
        daemons = [str(usr / f"sbin/{name}-wlm") for name in ("slurmctld", "slurmd", "slurmstepd")]
        return Programs([str(usr / "bin")], [str(plugins), str(plugins.parent)], *daemons)
    slurmctld, slurmd = shutil.which("slurmctld"), shutil.which("slurmd")
    return Programs([], [], slurmctld, slurmd, None) if slurmctld and slurmd else None


def environment(programs: Programs, folder: Path, **values: str) -> dict[str, str]:
    """Write the configuration to the folder, and return the environment for commands of users.

    Args:
        values: values of the configuration.
    """
    configuration = CONFIGURATION.format(
        folder=folder,
        plugins=f"PluginDir={programs.libraries[0]}" if programs.libraries else "",
        **{"controller": "localhost", "nodes": "localhost", "spool": str(folder), **values},
    )
    (folder / "slurm.conf").write_text(configuration, encoding="utf-8")
    return clean_environment(
        {
            "PATH": ":".join([*programs.path, str(Path(sys.executable).parent), os.environ["PATH"]]),
            "LD_LIBRARY_PATH": ":".join(programs.libraries),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "TMPDIR": str(folder),
        }
    )


class Slurm:
    """A running cluster.

    Args:
        folder: for configuration, state and logs.
        network: its first host gets the controller, and is where users submit jobs; the others are nodes.
        programs: see :func:`find`.

    Attributes:
        login: the host with the controller.
        nodes: the other hosts.
        env: environment of users.
    """

    def __init__(self, folder: Path, network: Network, programs: Programs) -> None:
        self.folder = folder
        self.login, *self.nodes = network.hosts
        (folder / "state").mkdir()
        nodes = ",".join(node.name for node in self.nodes)
        # Use a short path, because sockets in this folder have long names, and a socket's path is limited to
        # 108 bytes.
        self._spool = tempfile.TemporaryDirectory(prefix="slurm-")
        self.env = environment(
            programs, folder, controller=self.login.name, nodes=nodes, spool=self._spool.name
        )
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._own: set[int] = set()
        stepd = ["-d", programs.slurmstepd] if programs.slurmstepd else []
        try:
            self._start(self.login, programs.slurmctld, "-D", "-i")
            for node in self.nodes:
                self._start(node, programs.slurmd, "-D", "-N", node.name, *stepd)
            self.wait_idle()
            for daemon in self._daemons:
                self._own |= {each.pid for each in procs.descendants(daemon.pid)}
            procs.bystanders.update(self._own)
        except BaseException:
            self.close()
            raise

    def _start(self, host: Host, *command: str) -> None:
        with (self.folder / f"{host.name}.log").open("wb") as log:
            daemon = subprocess.Popen(
                [*host.prefix(self.folder), sys.executable, "-I", "-S", INSIDE / "reaper.py", *command],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)
        self._own.add(daemon.pid)

    def wait_idle(self) -> None:
        def are_idle() -> bool:
            shown = self.run("sinfo", "--noheader", "--format", "%D %T", check=False)
            return shown.stdout.split() == [str(len(self.nodes)), "idle"]

        try:
            procs.wait_until(are_idle)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"=== {log.name}\n{log.read_text(encoding='utf-8')}" for log in logs)

    def run(self, *command: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a user's command on the login host, and wait until it exits."""
        return procs.run_program(
            self.prefix(*command), check=check, env={**self.env, **env}, stdin=subprocess.DEVNULL
        )

    def prefix(self, *command: str | Path) -> list[str]:
        """Return the command line that runs a command on the login host."""
        return [*self.login.prefix(self.folder), *map(str, command)]

    def job(self, number: int | str) -> dict[str, str]:
        shown = self.run("scontrol", "show", "job", "--oneliner", str(number)).stdout
        return dict(part.partition("=")[::2] for part in shown.split())

    def queue(self) -> str:
        """Return the pending and running jobs, one per line."""
        return self.run("squeue", "--noheader").stdout

    def close(self) -> None:
        """Stop the daemons, and kill and reap all processes that still run on the nodes."""
        procs.bystanders.difference_update(self._own)
        for daemon in self._daemons:
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(procs.HANG)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for host in (self.login, *self.nodes):
            for process in host.processes():
                with suppress(ProcessLookupError):
                    host.kill(process.pid)
        self._spool.cleanup()
        procs.reap_adopted(keep={host.pid for host in (self.login, *self.nodes)})
