"""Build the sdist and the wheel, install them into empty environments as a user would, and launch jobs.

- The wheel is made from nothing but the sdist, which proves that it holds every crate that the extension
  needs. Both are uploaded to a package index on this machine. From there, an environment of each Python that
  is here, from 3.10 on, installs the wheel by name: one wheel for all.
- A clone of the repository, as it is committed, is installed by ``pip install .``.

Needs a Python, Rust, and a package index for maturin; no environment of the tree.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
VERSIONS = tuple(f"3.{minor}" for minor in range(10, 16))
# `abi3t` is the stable ABI without the global interpreter lock.
EXTENSION = re.compile(r"elasticrs/_core\.(?:abi3|abi3t-(?:x86_64|aarch64)-linux-gnu)\.so")
# Write with a single call, because the workers share the descriptor, and unbuffered `print` makes several
# calls.
WORKER = "import os\nos.write(1, 'rank {RANK} of {WORLD_SIZE}\\n'.format(**os.environ).encode())\n"


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Run a command and return its stdout. If the command fails, exit with its output as the message.

    ``variables`` are added to the environment. ``stdin`` is its input.
    """
    # Hide the source tree and an activated environment, so that the test does not depend on them.
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    # Use one target directory, wherever the sources are, so that repeated builds are fast.
    env["CARGO_TARGET_DIR"] = str(ROOT / "target")
    env.update(variables or {})
    done = subprocess.run(command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        told = f"{done.stdout}\n{done.stderr}"
        sys.exit(f"wheel: {' '.join(map(str, command))} failed with exit code {done.returncode}\n{told}")
    return done.stdout


def environment(interpreter: str | Path, folder: Path) -> Path:
    """Create a virtual environment that contains only pip, and return its Python."""
    run(interpreter, "-m", "venv", folder)
    return folder / "bin" / "python"


def built() -> list[Path]:
    """Return the sdist and the wheels in ``dist/``, sorted by name."""
    return sorted((*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")))


def remove_old() -> None:
    """Remove the results of earlier builds."""
    for old in (*built(), *DIST.glob("SHA256SUMS")):
        old.unlink()


def requirement() -> str:
    """Return the maturin requirement from pyproject.toml."""
    (found,) = re.findall(r'^requires = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    return str(found)


def tracked_files(folder: str = ".") -> list[str]:
    """Return the paths of the files in ``folder`` that git tracks, relative to the project."""
    command = ("git", "ls-files", "-z", folder)
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name]


def with_public_links(readme: str, manifest: str) -> str:
    """Return a README whose links to files are links to the repository's public address, which the text of
    ``pyproject.toml`` has. Without an address, the README is returned as it is.
    """
    address = re.search(r'^Repository = "(.*)"$', manifest, re.MULTILINE)
    if address is None:
        return readme
    linked = re.sub(r"\]\((?!https?:|#)", f"]({address[1]}/blob/HEAD/", readme)
    return re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{address[1]}/raw/HEAD/', linked)


def unpacked_sdist(maturin: Path, folder: Path, variables: Mapping[str, str] | None = None) -> Path:
    """Build the sdist into ``dist/``, unpack it into ``folder``, and return the folder with the sources.

    If the repository has a public address, the links of the README in the sdist lead there.
    """
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "sources")
        for tracked in tracked_files():
            (copy / tracked).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / tracked, copy / tracked, follow_symlinks=False)
        readme = copy / "README.md"
        manifest = (copy / "pyproject.toml").read_text("utf-8")
        readme.write_text(with_public_links(readme.read_text("utf-8"), manifest), "utf-8")
        run(maturin, "sdist", "--out", DIST, cwd=copy, variables=variables)
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    return unpacked


def build(scratch: Path) -> Path:
    """Build the wheel from the sdist, and return its path."""
    python = environment(sys.executable, scratch / "maturin")
    run(python, "-m", "pip", "install", "--quiet", requirement())
    maturin = python.parent / "maturin"
    unpacked = unpacked_sdist(maturin, scratch / "sdist")
    run(maturin, "build", "--release", "--quiet", "--interpreter", python, "--out", DIST, cwd=unpacked)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def extension(wheel: Path) -> str:
    """Return the name of the extension module in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if EXTENSION.fullmatch(name)]
    return name


def check_files(wheel: Path) -> None:
    """Exit if the wheel lacks files of the project, or contains files other than these and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wanted = {name.removeprefix("python/") for name in tracked_files("python")} | {extension(wheel)}
    if stray := [name for name in names if name not in wanted and ".dist-info/" not in name]:
        sys.exit(f"wheel: {wheel.name} holds files that do not belong there: {', '.join(stray)}")
    if missing := sorted(wanted.difference(names)):
        sys.exit(f"wheel: {wheel.name} lacks files: {', '.join(missing)}")


def interpreters(versions: Iterable[str] = VERSIONS) -> dict[str, Path]:
    """Return the Python interpreters on PATH and, as version managers install them, in folders next to this
    interpreter's.
    """
    found: dict[str, Path] = {}
    for version in versions:
        name = f"python{version}"
        beside = Path(sys.base_prefix).parent.glob(f"*/bin/{name}")
        for candidate in (shutil.which(name), *sorted(beside)):
            # Run each candidate, because version managers put names on PATH that only print an error.
            if candidate is not None and _makes_environments(candidate):
                found[version] = Path(candidate)
                break
    return found


def _makes_environments(interpreter: str | Path) -> bool:
    command = (interpreter, "-c", "import ensurepip, venv")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def smoke(python: Path) -> None:
    """Launch two workers without torch, once through the launcher's module and once through its script."""
    folder = python.parent
    (folder / "worker.py").write_text(WORKER, encoding="utf-8")
    if run(python, "-c", "import importlib.util as it; print(it.find_spec('torch'))") != "None\n":
        sys.exit(f"wheel: {python} has torch, and proves nothing")
    for launcher in ((python, "-m", "elasticrs.launch"), (folder / "elasticrun",)):
        run(*launcher, "--help", cwd=folder)
        out = run(*launcher, "--standalone", "--nproc-per-node", "2", "worker.py", cwd=folder)
        if sorted(out.splitlines()) != ["rank 0 of 2", "rank 1 of 2"]:
            sys.exit(f"wheel: {launcher[-1]} printed {out!r}")


def install_everywhere(wheel: Path, scratch: Path, versions: Iterable[str] = VERSIONS) -> dict[str, Path]:
    """Install the wheel into an environment of each available Python, and launch a job there. Return these
    Pythons.
    """
    here = interpreters(versions)
    for version, interpreter in here.items():
        python = environment(interpreter, scratch / version)
        run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
        smoke(python)
    return here


@contextmanager
def package_index(files: Sequence[Path], scratch: Path) -> Iterator[str]:
    """Serve a package index on this machine to which the files were uploaded as to a public one. Yield its
    address.
    """
    python = environment(sys.executable, scratch / "index-tools")
    run(python, "-m", "pip", "install", "--quiet", "twine", "pypiserver")
    run(python, "-m", "twine", "check", "--strict", *files)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = scratch / "index"
    folder.mkdir()
    # Everyone may upload.
    arguments = (
        f"-m pypiserver run --interface 127.0.0.1 --port {port} --passwords . --authenticate .".split()
    )
    quiet = subprocess.DEVNULL
    with subprocess.Popen((python, *arguments, folder), stdout=quiet, stderr=quiet) as server:
        try:
            ends = time.monotonic() + 60
            while not _listens(port):
                if server.poll() is not None or time.monotonic() > ends:
                    sys.exit(f"wheel: pypiserver does not listen; its exit code is {server.returncode}")
                time.sleep(0.1)
            address = f"http://127.0.0.1:{port}"
            user = ["--username", "user", "--password", "none", "--non-interactive", "--disable-progress-bar"]
            run(python, "-m", "twine", "upload", "--repository-url", address, *user, *files)
            yield f"{address}/simple/"
        finally:
            server.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def install_by_name(files: Sequence[Path], scratch: Path) -> dict[str, Path]:
    """Upload the files to a package index. Install the project by its name into an environment of each
    available Python, and launch a job there. Return these Pythons.
    """
    here = interpreters()
    with package_index(files, scratch) as index:
        for version, interpreter in here.items():
            python = environment(interpreter, scratch / f"by-name-{version}")
            options = ["install", "--quiet", "--only-binary", ":all:", "--index-url"]
            run(python, "-m", "pip", *options, index, "elasticrs")
            smoke(python)
    return here


def install_clone(interpreter: Path, scratch: Path) -> None:
    """Install from a clone, as the first page of the documentation says, and launch a job."""
    run("git", "clone", "--quiet", ROOT, scratch / "clone")
    python = environment(interpreter, scratch / "from-clone")
    run(python, "-m", "pip", "install", "--quiet", ".", cwd=scratch / "clone")
    smoke(python)


def main() -> None:
    remove_old()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wheel = build(scratch)
        check_files(wheel)
        here = install_by_name(built(), scratch)
        oldest = next(iter(here.values()))
        install_clone(oldest, scratch)
    size = wheel.stat().st_size / 1e6
    versions = ", ".join(here)
    print(f"wheel: {wheel.relative_to(ROOT)}, {size:.1f} MB, installed by name with Python {versions}")
    absent = [version for version in VERSIONS if version not in here]
    print(f"wheel: so does a clone, by pip install .; not here: Python {', '.join(absent) or 'none'}")


if __name__ == "__main__":
    main()
