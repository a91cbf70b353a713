//! Builds the nursery's program, which is embedded in the extension (`include_bytes!` in `src/nursery.rs`).
//!
//! This is a separate build with a different profile. It has its own target directory, because the outer build
//! holds the lock of its directory. It uses none of the outer build's flags, wrappers and lints, except for the
//! flags that remap paths.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variables of the outer build that must not reach the inner build.
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

/// A way to link the program.
struct Linking {
    /// Name of the subfolder for this build.
    folder: &'static str,
    target: String,
    flags: &'static str,
    /// Linker to use instead of the target's usual one.
    linker: Option<&'static str>,
}

fn main() {
    let crates = variable("CARGO_MANIFEST_DIR").join("..");
    for watched in ["elasticrs-nursery", "elasticrs-sys"] {
        for part in ["src", "Cargo.toml"] {
            println!("cargo::rerun-if-changed={}", crates.join(watched).join(part).display());
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    match build(&crates.join("elasticrs-nursery")) {
        Ok(path) => println!("cargo::rustc-env=ELASTICRS_NURSERY_IMAGE={}", path.display()),
        Err(error) => panic!("the nursery's program could not be built: {error}"),
    }
}

/// Builds the nursery and returns the path of the program. Each fallback to another libc prints a warning.
fn build(nursery: &Path) -> Result<PathBuf, String> {
    let target = text("TARGET");
    // With musl, the program is less than half as large as with static glibc. rustc contains all that is needed to
    // link it, even for another architecture.
    let musl = target.replace("-gnu", "-musl");
    if has_target(&musl) {
        let flags = "-C link-self-contained=yes";
        let linking = Linking { folder: "nursery-musl", target: musl, flags, linker: Some("rust-lld") };
        match linking.build(nursery) {
            Ok(path) => return Ok(path),
            Err(error) => println!("cargo::warning=the nursery is linked with glibc, musl failed: {error}"),
        }
    }
    // A static program starts without a loader, and uses half as much memory.
    let flags = "-C target-feature=+crt-static";
    Linking { folder: "nursery-static", target: target.clone(), flags, linker: None }.build(nursery).or_else(|error| {
        println!("cargo::warning=the nursery is linked dynamically, there is no static libc: {error}");
        Linking { folder: "nursery-dynamic", target, flags: "", linker: None }.build(nursery)
    })
}

/// Returns true if the compiler has a standard library for this target.
fn has_target(target: &str) -> bool {
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--print=target-libdir", "--target", target]);
    // The command fails if the compiler does not know the target.
    let Ok(output) = rustc.output() else { return false };
    output.status.success() && Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir()
}

fn variable(name: &str) -> PathBuf {
    env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}")).into()
}

fn text(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

impl Linking {
    fn build(&self, nursery: &Path) -> Result<PathBuf, String> {
        let folder = variable("OUT_DIR").join(self.folder);
        let setting = |key| format!("CARGO_TARGET_{}_{key}", self.target.to_uppercase().replace(['-', '.'], "_"));
        let mut cargo = Command::new(variable("CARGO"));
        cargo.args(["build", "--bin=worker-nursery", "--profile=nursery", "--locked", "--target", &self.target]);
        cargo.args([OsString::from("--target-dir"), folder.clone().into()]);
        cargo.arg("--manifest-path").arg(nursery.join("Cargo.toml"));
        for name in OUTER.into_iter().chain([setting("RUSTFLAGS").as_str()]) {
            cargo.env_remove(name);
        }
        cargo.env("CARGO_ENCODED_RUSTFLAGS", self.encoded_flags());
        if let Some(linker) = self.linker {
            cargo.env(setting("LINKER"), linker);
        }
        let output = cargo.output().map_err(|error| format!("cargo: {error}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', " | "));
        }
        Ok(folder.join(&self.target).join("nursery/worker-nursery"))
    }

    /// Returns the flags for rustc in cargo's encoding. The flags that remap paths are those of the outer build,
    /// because the extension contains the program.
    fn encoded_flags(&self) -> String {
        let outer = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
        let remapped = outer.split('\x1f').filter(|flag| flag.starts_with("--remap-path-prefix="));
        self.flags.split_whitespace().chain(remapped).collect::<Vec<_>>().join("\x1f")
    }
}
