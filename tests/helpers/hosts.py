"""Several simulated hosts on one machine: network namespaces with host names, addresses, hosts files and
cables.

A host is a shell (`HOLD`), the holder, in a network, a UTS and a mount namespace of its own. The switch, to
which all hosts are connected, is another such shell, with a network bridge that has a port for each host. The
tests set everything up from inside these namespaces, so they never touch the machine's own links, names and
mounts. The namespaces have no names, so any number of test runs can share a machine. All processes have the
pids of the machine.

1. All processes in the namespaces of a holder end with it, and each holder ends with the process of the
   tests, even if SIGKILL ends that.
2. A host's cable is cut at the switch, so the host's peers get no FIN and no reset.
"""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers import procs
from helpers.packets import PacketRelay
from helpers.procs import run_program

NAMESPACES = ("--net", "--uts", "--mount")

SET_UP = """
set -e
ip link set lo up
hostname "$1"
mount --bind "$2" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind /dev/null /etc/resolv.conf; fi
"""
"""First in the namespaces of a host. Without servers to ask, names that are not in the file fail at once."""

QUIET = """
set -e
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
"""
"""The switch has no address and says nothing of its own."""

HOLD = """
set +e
echo ready
read -r word
[ "$word" = end ] && exit 0
mine=$(readlink /proc/$$/ns/net)
for pass in 1 2 3 4 5 6 7 8 9 10; do
    for each in /proc/[0-9]*; do
        pid=${each#/proc/}
        [ "$pid" != $$ ] && [ "$(readlink "$each/ns/net" 2>/dev/null)" = "$mine" ] && kill -9 "$pid"
    done
done
"""
"""Script of a holder, after the set-up. The shell ends when the tests write ``end``. If the tests end without
that, for example by SIGKILL, it kills all other processes in its network namespace, several times, because
these may have started others.
"""


REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))
except ConnectionRefusedError:
    pass
"""
"""Connects to a port on which nothing listens. Fails unless the other host refuses the connection."""


@functools.cache
def why_not() -> str | None:
    """Return why this user cannot create hosts on this machine, or ``None`` if it is possible."""
    command = ["unshare", *NAMESPACES, "--", "ip", "link", "add", "type", "bridge"]
    try:
        tried = run_program(command)
    except FileNotFoundError:
        return "no network namespaces: unshare(1) is not installed"
    return None if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


def network_of(pid: int) -> str | None:
    """Return the network namespace of a process. ``None`` if the process has exited (including zombies) or
    belongs to another user.
    """
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


class Namespaces:
    """A set of namespaces, kept alive by a process inside them."""

    def __init__(self, *set_up: str) -> None:
        text, *arguments = set_up
        self._holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "--propagation", "private", "--", "sh", "-c", text + HOLD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        self.pid = self._holder.pid
        procs.bystanders.add(self.pid)
        assert self._holder.stdout.readline() == b"ready\n", f"no namespaces: {self._holder.wait()}"
        self._net = network_of(self.pid)

    def prefix(self, cwd: Path | str = "/") -> tuple[str, ...]:
        """Return a command prefix that runs a command in the namespaces. The started process becomes the
        command, with the same pid.
        """
        # Entering a mount namespace changes the working directory to the root of that namespace.
        return ("nsenter", f"--target={self.pid}", *NAMESPACES, f"--wdns={cwd}", "--")

    def configure(self, *lines: str) -> None:
        """Run lines of ip(8) commands in the namespaces."""
        command = [*self.prefix(), "ip", "-batch", "-"]
        done = run_program(command, input="\n".join(lines))
        assert done.returncode == 0, f"{lines}: {done.stderr}"

    def processes(self) -> list[procs.Process]:
        """Return all running processes in the namespaces except for the holder."""
        return [each for each in procs.processes() if each.pid != self.pid and self.holds(each.pid)]

    def holds(self, pid: int) -> bool:
        return network_of(pid) == self._net

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process, which must run in these namespaces.

        Raises:
            ProcessLookupError: the process has ended.
        """
        pidfd = os.pidfd_open(pid)
        try:
            where = network_of(pid)
            if where is None:  # the process is exiting
                raise ProcessLookupError(pid)
            assert where == self._net, f"{procs.process(pid)} does not run on {self}"
            signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)

    def kill_all(self) -> None:
        """Kill all processes in these namespaces except for the holder, and wait until they have exited."""
        while running := self.processes():
            for each in running:
                try:
                    self.kill(each.pid)
                except ProcessLookupError:
                    continue
            procs.assert_gone([each.pid for each in running])

    def close(self) -> list[str]:
        """Kill everything in the namespaces. Return the processes that should have exited before."""
        left = [str(each) for each in self.processes()]
        self.kill_all()
        self._holder.communicate(b"end\n")
        procs.bystanders.discard(self.pid)
        return left


class Host(Namespaces):
    """A simulated host, which programs on it cannot distinguish from a separate machine.

    Attributes:
        name: its host name, which all others can resolve.
        address: without brackets or prefix length.
    """

    def __init__(self, network: "Network", number: int) -> None:
        self.name, self.address = f"node{number}", network.address_of(number)
        super().__init__(SET_UP, "sh", self.name, str(network.hosts_file))
        self._network, self.port = network, f"p{number}"

    def __repr__(self) -> str:
        return f"{self.name} ({self.address})"

    def endpoint(self, port: int) -> str:
        """Return this host's address with a port, in the format of the launcher's options."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"

    def run(
        self, *command: str | Path, check: bool = True, timeout: float = procs.HANG
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and wait until it exits."""
        argv = [*self.prefix(), *map(str, command)]
        done = run_program(argv, timeout=timeout)
        assert not check or done.returncode == 0, f"{command} on {self}: {done.stderr}"
        return done

    def can_reach(self, other: "Host", seconds: float = procs.HANG) -> bool:
        """Return true if the other host answers within this time."""
        argv = (sys.executable, "-I", "-S", "-c", REACH, other.address, str(seconds))
        return not self.run(*argv, check=False).returncode

    # --- faults ----------------------------------------------------------------------------------------

    def link_down(self) -> None:
        """Unplug the cable. Both sides keep their connections, but nothing is delivered."""
        self._network.switch.configure(f"link set {self.port} down")

    def link_up(self) -> None:
        self._network.switch.configure(f"link set {self.port} up")

    def wait_empty(self) -> None:
        """Wait until all processes on this host have exited by themselves, including those that they start in
        the meantime.

        Bystanders stay.

        Raises:
            AssertionError: it has not; names what is there.
        """
        deadline = time.monotonic() + procs.HANG
        while running := [each.pid for each in self.processes() if each.pid not in procs.bystanders]:
            procs.assert_gone(running, deadline - time.monotonic())

    def power_off(self) -> None:
        """Disconnect the host and kill all its processes, as if it lost power. Its peers are not notified."""
        self.link_down()
        self.kill_all()

    def impair(self, seed: int, **how: float) -> PacketRelay:
        """Insert a relay into the cable, which loses, repeats, reorders and delays packets until it is
        closed.

        Args:
            seed: of its random numbers.
            how: see :class:`helpers.inside.packet_relay.Impairment`.
        """
        return self._network.impair(self, seed, **how)


class Network:
    """A switch and hosts in one subnet: 10.77.0.0/24, or fd77::/64 without IPv4.

    Args:
        folder: for the file of names.
        hosts: how many to begin with.
        is_ipv6_only: no host has an address of IPv4, but for loopback.
    """

    def __init__(self, folder: Path, hosts: int = 0, *, is_ipv6_only: bool = False) -> None:
        self.is_ipv6_only = is_ipv6_only
        self.hosts_file = folder / "hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n::1 localhost\n", encoding="utf-8")
        self.hosts: list[Host] = []
        self._relays: list[PacketRelay] = []
        self.switch = Namespaces(QUIET)
        try:
            self.switch.configure("link add br0 type bridge mcast_snooping 0", "link set br0 up")
            for _ in range(hosts):
                self.add_host()
        except BaseException:
            self.close()
            raise

    def address_of(self, number: int) -> str:
        """Return the address of the host with this number. The first host is number 1."""
        return f"fd77::{number:x}" if self.is_ipv6_only else f"10.77.0.{number}"

    def add_host(self) -> Host:
        """Add a host to the switch. All other hosts can resolve its name."""
        number = len(self.hosts) + 1
        # Append in place, because this file is mounted on every host.
        with self.hosts_file.open("a", encoding="utf-8") as names:
            names.write(f"{self.address_of(number)} node{number}\n")
        host = Host(self, number)
        self.hosts.append(host)
        self.switch.configure(
            f"link add {host.port} type veth peer name eth0 netns {host.pid}",
            f"link set {host.port} master br0",
            f"link set {host.port} up",
        )
        address = f"{host.address}/64 dev eth0 nodad" if self.is_ipv6_only else f"{host.address}/24 dev eth0"
        host.configure("link set eth0 up", f"address add {address}")
        return host

    def impair(self, host: Host, seed: int, **how: float) -> PacketRelay:
        """See :meth:`Host.impair`."""
        # Create a bridge with two ports: the cable, and one end of the relay. The other end takes the cable's
        # former place.
        number = host.port[1:]
        ends = (f"near{number}", f"far{number}")
        relay = PacketRelay(self.switch.prefix(), ends, seed, put_back=lambda: self._put_back(host))
        self._relays.append(relay)
        self.switch.configure(
            f"link add br{number} type bridge mcast_snooping 0",
            f"link set br{number} up",
            f"link set {ends[0]} master br{number} up",
            f"link set {ends[1]} master br0 up",
            f"link set {host.port} master br{number}",
        )
        relay.set(**how)
        return relay

    def name(self, **names: Host) -> None:
        """Give these hosts additional names. A name that is already in use is reassigned."""
        lines = self.hosts_file.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.split()[1] not in names]
        # Write once and in place, because this file is mounted on every host.
        text = "\n".join([*kept, *(f"{host.address} {name}" for name, host in names.items())]) + "\n"
        with self.hosts_file.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()

    def separate(self, *hosts: Host) -> None:
        """Block the traffic between these hosts. They can still reach all other hosts. No host is
        notified.
        """
        self.switch.configure(*(f"link set {host.port} type bridge_slave isolated on" for host in hosts))

    def reunite(self, *hosts: Host) -> None:
        """Undo :meth:`separate`."""
        self.switch.configure(*(f"link set {host.port} type bridge_slave isolated off" for host in hosts))

    def _put_back(self, host: Host) -> None:
        self.switch.configure(f"link set {host.port} master br0", f"link delete br{host.port[1:]}")

    def processes(self) -> list[procs.Process]:
        return [each for host in self.hosts for each in host.processes()]

    def close(self) -> list[str]:
        """Remove all hosts, and return the names of the processes that were still running."""
        for relay in self._relays:
            relay.close()
        left = [f"{each} on {host}" for host in self.hosts for each in host.close()]
        return left + self.switch.close()
