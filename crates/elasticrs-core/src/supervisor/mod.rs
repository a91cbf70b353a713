//! The workers of an attempt as one unit.
