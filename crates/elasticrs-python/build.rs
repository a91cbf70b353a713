//! Builds the nursery's program, which the extension carries inside.
//!
//! A nested cargo with a target directory of its own (the outer one is locked) builds the `worker-nursery` binary of
//! `elasticrs-core`, statically linked: it starts faster, and runs on any libc. It comes with every way of installing,
//! because whatever builds the extension builds it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let core = Path::new(env!("CARGO_MANIFEST_DIR")).join("../elasticrs-core");
    for part in ["src", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", core.join(part).display());
    }
    let target = variable("TARGET");
    let target_dir = PathBuf::from(variable("OUT_DIR")).join("nursery");
    let mut cargo = Command::new(variable("CARGO"));
    cargo
        .args(["build", "--quiet", "--profile", "nursery", "--no-default-features", "--bin", "worker-nursery"])
        // Named, so that the flags below do not reach build scripts and macros, which must be dynamic.
        .args(["--target", &target])
        .arg("--target-dir")
        .arg(&target_dir)
        .arg("--manifest-path")
        .arg(core.join("Cargo.toml"))
        // Flags of the outer build are meant for the extension.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    let status = cargo.status().unwrap_or_else(|error| panic!("could not run {cargo:?}: {error}"));
    assert!(status.success(), "could not build the nursery: {status}");
    let program = target_dir.join(target).join("nursery/worker-nursery");
    println!("cargo::rustc-env=WORKER_NURSERY={}", program.display());
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("cargo sets {name}: {error}"))
}
