//! A worker that misbehaves on request.

fn main() {}
