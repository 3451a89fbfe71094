//! The tests of all operations on a GPU. The executable made by `.ci/bundle` contains them too.
//!
//! ```sh
//! cargo test --workspace --features cuda --test gpu-kernels -- [NAME]
//! ```
//!
//! They also run, slowly, on a computer without a GPU: see `tools/cuda-emulator/run`.

mod ops;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Run tests one at a time: each has the GPU to itself.
    arguments.test_threads = Some(1);
    if let Err(error) = megaburn_cuda::start() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    let has_cudnn = ops::has_cudnn();
    let trials = ops::tests()
        .map(|(name, test)| {
            let is_left_out = !has_cudnn && name.starts_with(ops::OF_CUDNN);
            let trial = Trial::test(name, move || test().map_err(Failed::from));
            trial.with_ignored_flag(is_left_out)
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
