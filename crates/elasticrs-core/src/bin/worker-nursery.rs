//! The nursery's program; see `elasticrs_core::nursery`.

fn main() {}
