//! Executable of the nursery. See `elasticrs_nursery`.

use std::process::ExitCode;

fn main() -> ExitCode {
    elasticrs_nursery::server::run(std::env::args().nth(1).as_deref()).into()
}
