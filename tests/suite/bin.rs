//! The `megaburn` command, for tests to start.

use std::process::ExitCode;

fn main() -> ExitCode {
    megaburn::cli::main()
}
