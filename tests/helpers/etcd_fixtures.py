"""Fixtures for tests with a real etcd. Without the etcd program, the tests are skipped, or fail if skips are
not allowed.
"""

import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme

from helpers import ports
from helpers.etcd import Etcd, Files, binary


class Site(NamedTuple):
    """A cluster, and a key prefix that only one test uses."""

    server: Etcd
    prefix: str

    @property
    def endpoint(self) -> str:
        """The endpoints in the format of the command line."""
        return self.server.endpoint

    def keys(self) -> dict[str, bytes]:
        """Return all keys below the prefix, and their values. The returned names do not contain the
        prefix.
        """
        found = self.server.get(self.prefix)
        return {key.removeprefix(self.prefix): value for key, value in found.items()}

    def cards(self, scope: str) -> list[tuple[str, int]]:
        """Return the lease and the port of each session that other sessions can connect to, the
        oldest first.
        """
        below, found = f"~sessions/links/{scope}/", self.keys().items()
        return [
            (key.removeprefix(below), int(card.split()[0])) for key, card in found if key.startswith(below)
        ]

    def are_linked(self, scope: str, count: int, *, is_held: bool = False) -> bool:
        """Return true if there are ``count`` sessions, and another session is connected to each of them.

        With ``is_held``, a second process (the agent's nursery) must also hold a link of each session.
        """
        links = {each.link: each.port for each in ports.sockets() if each.state == ports.ESTABLISHED}
        called = {links[link] for link in held_twice(links)} if is_held else set(links.values())
        offered = {port for _, port in self.cards(scope)}
        return len(offered) == count and called >= offered


def held_twice(sockets: Collection[str]) -> set[str]:
    """Return the sockets that several processes have open, as link targets in ``/proc/PID/fd``."""
    holders: Counter[str] = Counter()
    for folder in Path("/proc").glob("[0-9]*"):
        holders.update({*ports.links_of(int(folder.name))}.intersection(sockets))
    return {name for name, count in holders.items() if count > 1}


def site(server: Etcd, below: str = "/tests/") -> Site:
    """Return a site with a new, unique prefix."""
    return Site(server, f"{below}{uuid.uuid4().hex}")


def serving(folder: Path, size: int = 1, files: Files | None = None, *options: str) -> Iterator[Etcd]:
    """Start a cluster, yield it, and close it."""
    if binary() is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    server = Etcd(folder, size, files, options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def etcd_program(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose the etcd program of the servers: the installed one, or the one with which a test module is
    parametrized.
    """
    with pytest.MonkeyPatch.context() as patch:
        if (program := getattr(request, "param", None)) is not None:
            patch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", program)
        yield


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory, etcd_program: None) -> Iterator[Etcd]:
    """One server without TLS, shared by all tests of this process."""
    yield from serving(tmp_path_factory.mktemp("etcd"))


@pytest.fixture
def etcd(etcd_server: Etcd) -> Site:
    """A new prefix on the shared server; see :class:`Site`."""
    return site(etcd_server)


@pytest.fixture(scope="session", params=["own", "etcd"])
def either_store(request: pytest.FixtureRequest) -> Etcd | None:
    """Run a test twice: with our own store (``None``), and with :func:`etcd_server`."""
    server: Etcd | None = request.getfixturevalue("etcd_server") if request.param == "etcd" else None
    return server


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory, etcd_program: None) -> Iterator[Etcd]:
    yield from serving(tmp_path_factory.mktemp("cluster"), 3)


@pytest.fixture
def etcd_cluster(_cluster: Etcd) -> Iterator[Site]:
    """A cluster of three members. Members that the test pauses or kills are brought back after it."""
    yield site(_cluster)
    _cluster.mend()


# --- TLS ---


class Authority:
    """A certificate authority that writes the certificates it issues to files."""

    def __init__(self, folder: Path) -> None:
        self._ca, self._folder = trustme.CA(), folder
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *identities: str, **how: Any) -> Files:
        """Issue a certificate for these addresses and names. ``how`` is passed to
        :meth:`trustme.CA.issue_cert`.
        """
        issued = self._ca.issue_cert(*(identities or ("127.0.0.1", "localhost", "::1")), **how)
        files = Files(self.ca, self._folder / f"{name}.pem", self._folder / f"{name}.key")
        for index, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(str(files.cert), append=index > 0)
        issued.private_key_pem.write_to_path(str(files.key))
        return files


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that issues the certificates of :func:`etcd_tls`."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, which no server trusts."""
    return Authority(tmp_path_factory.mktemp("other_authority"))


@pytest.fixture(scope="session")
def _tls_server(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, etcd_program: None
) -> Iterator[Etcd]:
    files = authority.issue("server")
    yield from serving(tmp_path_factory.mktemp("etcd_tls"), 1, files, "--client-cert-auth")


@pytest.fixture
def etcd_tls(_tls_server: Etcd) -> Site:
    """A server that requires a client certificate of :func:`authority`, such as ``server.files``."""
    return site(_tls_server)


# --- authentication ---


@pytest.fixture(scope="session")
def _auth_server(tmp_path_factory: pytest.TempPathFactory, etcd_program: None) -> Iterator[Etcd]:
    for server in serving(tmp_path_factory.mktemp("etcd_auth")):
        server.enable_auth("/mine/")
        yield server


@pytest.fixture
def etcd_auth(_auth_server: Etcd) -> Site:
    """A server that accepts only its ``user``, and only for keys below ``/mine/``."""
    return site(_auth_server, "/mine/")
