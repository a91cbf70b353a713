//! Builds the nursery's program, which the extension carries in itself (`include_bytes!` in `src/nursery.rs`).
//!
//! It is a build of its own: another profile, another target directory (the outer build holds the lock of its own one),
//! and none of the flags, wrappers and lints of the outer build.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the outer build tells cargo and rustc, and must not reach the inner one.
const OUTER: [&str; 9] = [
    "CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_BUILD_TARGET",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_PROFILE",
    "CARGO_TARGET_DIR",
    "CLIPPY_ARGS",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTFLAGS",
];

fn main() {
    let crates = variable("CARGO_MANIFEST_DIR").join("..");
    for watched in ["elasticrs-nursery", "elasticrs-sys"] {
        for part in ["src", "Cargo.toml"] {
            println!("cargo::rerun-if-changed={}", crates.join(watched).join(part).display());
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    let nursery = crates.join("elasticrs-nursery");
    let target = text("TARGET");
    // A static program starts without a loader and weighs less: half of the resident size. Where there is no static
    // libc to link, the program is dynamic; nothing else changes.
    let image = build(&nursery, &target, "-C target-feature=+crt-static").or_else(|static_error| {
        println!("cargo::warning=the nursery is linked dynamically, there is no static libc: {static_error}");
        build(&nursery, &target, "")
    });
    match image {
        Ok(path) => println!("cargo::rustc-env=ELASTICRS_NURSERY_IMAGE={}", path.display()),
        Err(error) => panic!("the nursery's program could not be built: {error}"),
    }
}

fn variable(name: &str) -> PathBuf {
    env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}")).into()
}

fn text(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn build(nursery: &Path, target: &str, flags: &str) -> Result<PathBuf, String> {
    let kind = if flags.is_empty() { "nursery-dynamic" } else { "nursery-static" };
    let folder = variable("OUT_DIR").join(kind);
    let linker = format!("CARGO_TARGET_{}_RUSTFLAGS", target.to_uppercase().replace(['-', '.'], "_"));
    let mut cargo = Command::new(variable("CARGO"));
    cargo.args(["build", "--bin=worker-nursery", "--profile=nursery", "--locked"]);
    cargo.args([OsString::from("--target"), target.into(), "--target-dir".into(), folder.clone().into()]);
    cargo.arg("--manifest-path").arg(nursery.join("Cargo.toml"));
    for name in OUTER.into_iter().chain([linker.as_str()]) {
        cargo.env_remove(name);
    }
    cargo.env("RUSTFLAGS", flags);
    let output = cargo.output().map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', " | "));
    }
    Ok(folder.join(target).join("nursery/worker-nursery"))
}
