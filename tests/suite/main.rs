//! Tests that span crates, in one binary.

mod fixtures;
