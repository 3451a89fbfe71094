//! The `megaburn` command.
fn main() {}
