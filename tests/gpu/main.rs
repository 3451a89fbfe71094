//! Tests on GPUs, and the executable of `.ci/bundle`: one file that contains several programs,
//! selected by the name it is called by or by its first argument.
//!
//! ```sh
//! cargo test --release -p megaburn-tests --features cuda --test gpu -- [--quick] [NAME]
//! ```
//!
//! Each test runs in its own process, with as many processes at a time as there are cores. Tests on
//! several GPUs start one rank per GPU, or `N` with `MEGABURN_RANKS_PER_GPU=N` in the environment.
//! `--quick` runs some tests of each kind (see `list.rs`); `--test-threads` sets the number of
//! processes at a time.

mod collectives;
mod contexts;
mod disagreements;
mod doctor;
mod experts;
mod failures;
mod fixtures;
mod fp8;
mod held;
mod interop;
mod launches;
mod layouts;
mod list;
mod offload;
mod pipelines;
mod profiles;
mod ranks;
mod regions;
mod rows;
mod runner;
mod runs;
mod saves;
mod sentences;
mod steps;
mod zero;

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::ExitCode,
};

use list::{GroupTest, Test};

/// A program, called with its command line including its name.
type Program = fn(Vec<OsString>) -> ExitCode;
/// The programs in this file.
fn programs() -> impl Iterator<Item = (&'static str, Program)> {
    let own: [(&str, Program); 3] = [
        ("megaburn", megaburn::cli::run),
        ("llama_pretrain", megaburn_examples::llama_pretrain),
        ("gpu-tests", tests),
    ];
    own.into_iter()
        .chain(megaburn_benches::PROGRAMS.iter().copied())
}

fn program(name: &OsStr) -> Option<Program> {
    programs()
        .find(|(known, _)| name == *known)
        .map(|(_, program)| program)
}

fn main() -> ExitCode {
    let command: Vec<OsString> = std::env::args_os().collect();
    let called = command.first().and_then(|path| Path::new(path).file_stem());
    if let Some(program) = called.and_then(program) {
        return program(command);
    }
    match command.get(1) {
        // `.ci/bundle` reads this list.
        Some(name) if name == "programs" => {
            programs().for_each(|(name, _)| println!("{name}"));
            ExitCode::SUCCESS
        }
        // `megaburn launch` starts its ranks like this.
        Some(name) if name == "launch-child" => megaburn::cli::run(command),
        Some(name) => match program(name) {
            Some(program) => program(command[1..].to_vec()),
            None => tests(command),
        },
        None => tests(command),
    }
}

fn tests(command: Vec<OsString>) -> ExitCode {
    if let Some(name) = ranks::test_of_this_rank(&command) {
        return ranks::run(list::group_test(&name).expect("the launcher knows it"));
    }
    match command.get(1) {
        Some(one) if one == runner::ONE => {
            let name = command
                .get(2)
                .map(|name| name.to_string_lossy().into_owned());
            runner::run_one(&name.unwrap_or_default())
        }
        _ => runner::run(command),
    }
}

/// The repository, or the folder that a bundle was unpacked into.
fn root() -> PathBuf {
    match std::env::var_os("MEGABURN_BUNDLE") {
        Some(bundle) => bundle.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
    }
}
