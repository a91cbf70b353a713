//! Helpers for tests with nurseries and groups of real processes.
#![allow(dead_code, reason = "each test uses its part")]

pub(crate) mod groups;

use std::path::Path;

use elasticrs_nursery::launch::NurseryImage;
use elasticrs_testkit::nursery;

/// Returns the program of the nurseries. Unlike `worker-nursery`, cargo builds it together with these tests.
pub(crate) fn nursery_program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_test-nursery"))
}

pub(crate) fn image() -> NurseryImage {
    nursery::image(nursery_program().to_owned())
}
