//! Runs the tests of all operations on a GPU.
//!
//! ```sh
//! cargo test --workspace --features cuda --test gpu-kernels -- [--quick] [NAME]
//! ```
//!
//! They also run, slowly, on a computer without a GPU: see `tools/cuda-emulator/README.md`.

use std::{ffi::OsString, process::ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use megaburn_kernel_tests::{OF_CUDNN, QUICK, has_cudnn, tests};

fn main() -> ExitCode {
    let mut command: Vec<OsString> = std::env::args_os().collect();
    let is_quick = command.iter().any(|argument| argument == "--quick");
    command.retain(|argument| argument != "--quick");
    let mut arguments = Arguments::from_iter(command);
    // Run tests one at a time: each has the GPU to itself.
    arguments.test_threads = Some(1);
    if let Err(error) = megaburn_cuda::start() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    let has_cudnn = has_cudnn();
    let trials = tests()
        .filter(|(name, _)| !is_quick || QUICK.iter().any(|start| name.starts_with(start)))
        .map(|(name, test)| {
            let is_left_out = !has_cudnn && name.starts_with(OF_CUDNN);
            let trial = Trial::test(name, move || test().map_err(Failed::from));
            trial.with_ignored_flag(is_left_out)
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
