"""Build the sdist, the wheel from nothing but the sdist, look into it, and run it in a fresh environment.

Going through the sdist proves both: that it holds every crate the extension needs, and that the wheel works
where the repository is not.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# One write: unbuffered, `print` makes several, and two workers share the descriptor.
WORKER = "import os\nos.write(1, 'rank {RANK} of {WORLD_SIZE}\\n'.format(**os.environ).encode())\n"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run to the end and return stdout; what goes wrong is shown and ends this script."""
    # Neither the source tree nor an activated environment may help.
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        told = f"{done.stdout}\n{done.stderr}"
        sys.exit(f"wheel: {' '.join(map(str, command))} failed with exit code {done.returncode}\n{told}")
    return done.stdout


def build(scratch: Path) -> Path:
    """The wheel, by way of the sdist; compiled into the tree's own target, so that repeating is quick."""
    run(sys.executable, "-m", "maturin", "sdist", "--out", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(scratch, filter="data")
        else:
            archive.extractall(scratch)
    (unpacked,) = scratch.iterdir()
    target = ROOT / "target"
    run(
        *(sys.executable, "-m", "maturin", "build", "--release", "--quiet"),
        *("--target-dir", target, "--out", DIST),
        cwd=unpacked,
    )
    (wheel,) = DIST.glob("*.whl")
    return wheel


def stray_files(wheel: Path) -> list[str]:
    """Members of the wheel that are neither ours nor its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    ours = subprocess.run(
        ("git", "ls-files", "-z", "python"), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    wanted = {name.removeprefix("python/") for name in ours.split("\0")} | {"elasticrs/_core.abi3.so"}
    return [name for name in names if name not in wanted and ".dist-info/" not in name]


def smoke(wheel: Path, scratch: Path) -> None:
    """Install into a fresh environment and launch two workers."""
    run(sys.executable, "-m", "venv", scratch / "venv")
    python = scratch / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(python, "-m", "elasticrs.launch", "--help", cwd=scratch)
    (scratch / "worker.py").write_text(WORKER, encoding="utf-8")
    for launcher in ((python, "-m", "elasticrs.launch"), (python.parent / "elasticrun",)):
        out = run(*launcher, "--standalone", "--nproc-per-node", "2", "worker.py", cwd=scratch)
        if sorted(out.splitlines()) != ["rank 0 of 2", "rank 1 of 2"]:
            sys.exit(f"wheel: {launcher[-1]} printed {out!r}")


def main() -> None:
    for old in (*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "source").mkdir()
        wheel = build(scratch / "source")
        if stray := stray_files(wheel):
            sys.exit(f"wheel: {wheel.name} holds files that do not belong there: {', '.join(stray)}")
        smoke(wheel, scratch)
    print(f"wheel: {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB, installs and launches")


if __name__ == "__main__":
    main()
