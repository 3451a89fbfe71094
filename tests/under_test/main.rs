//! The `megaburn` command, for tests to start.

mod faulty;

use std::process::ExitCode;

fn main() -> ExitCode {
    faulty::register();
    megaburn::cli::main()
}
