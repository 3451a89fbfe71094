//! The `megaburn` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    megaburn::cli::main()
}
