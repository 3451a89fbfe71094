//! Tests on several GPUs: starts this program as several ranks, as torchrun would.

use std::{ffi::OsString, process::ExitCode, thread};

use burn::prelude::Device;
use megaburn::cuda::libraries::num_gpus;
use megaburn::{
    collective::{ConnectOptions, Group, RankEnv, connect},
    launch::{LaunchOptions, launch, tie_to_launcher},
};

/// The argument before the name of a rank's test.
const RANK: &str = "rank-of";
/// The stack size of a rank's thread; autodiff walks deep graphs recursively.
const STACK_BYTES: usize = 64 << 20;

/// Runs a group test on `ranks` ranks, with `ranks_per_gpu` ranks on each GPU.
pub(crate) fn launch_test(name: &str, ranks: usize, ranks_per_gpu: usize) -> Result<(), String> {
    let options = LaunchOptions::this_program(ranks, [RANK, name].map(OsString::from))
        .with_ranks_per_gpu(ranks_per_gpu);
    let outcome = launch(&options.without_cause_report()).map_err(|error| error.to_string())?;
    match outcome.cause() {
        None => Ok(()),
        Some(_) => Err(outcome.to_string()),
    }
}

/// The group test that this process is a rank of, if any.
pub(crate) fn test_of_this_rank(command: &[OsString]) -> Option<String> {
    match command {
        [_, rank, name] if rank == RANK => name.to_str().map(String::from),
        _ => None,
    }
}

/// Runs one rank of a group test.
pub(crate) fn run(test: fn(&Group) -> Result<(), String>) -> ExitCode {
    let body = move || -> Result<(), String> {
        tie_to_launcher().map_err(|error| error.to_string())?;
        megaburn::cuda::start().map_err(|error| error.to_string())?;
        let env = RankEnv::from_env().map_err(|error| error.to_string())?;
        let env = env.ok_or("a rank has a launcher")?;
        let world = connect(&ConnectOptions::new(env)).map_err(|error| error.to_string())?;
        let result = test(&world);
        if let Err(error) = &result {
            world.abort(error);
        }
        result
    };
    let rank = thread::Builder::new().stack_size(STACK_BYTES).spawn(body);
    match rank.expect("the system can start a thread").join() {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
        // The panic message has already been printed.
        Err(_) => ExitCode::FAILURE,
    }
}

/// The GPU of this rank, or the first GPU without a launcher.
pub(crate) fn this_gpu() -> Device {
    let env = RankEnv::from_env().ok().flatten();
    let gpu = |env: RankEnv| env.gpu(num_gpus()).expect("the launcher counted them");
    Device::cuda(env.map_or(0, gpu))
}
