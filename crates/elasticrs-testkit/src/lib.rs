//! Helpers for tests: who is alive, who leaks.
