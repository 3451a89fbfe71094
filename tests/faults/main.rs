//! A seeded campaign of faults: each case trains a small model, breaks something, and checks that
//! nothing was lost, nothing hung and the exit code is right.
//!
//! ```sh
//! # A short campaign.
//! cargo test --workspace --test faults
//! MEGABURN_FAULT_CASES=1500 MEGABURN_FAULT_SEED=7 cargo test --workspace --test faults
//! # Repeat one case.
//! MEGABURN_FAULT_SEED=7 cargo test --workspace --test faults -- --exact kill_rank/31
//! ```
//!
//! A case's name is its kind and its number. Together with the seed, the number decides everything
//! that the case draws, so a failure can be repeated. `MEGABURN_FAULT_REPORT=FILE` writes a table
//! by kind.
//!
//! `restarts` runs on several hosts, which are network namespaces if it has the rights of root, and
//! makes `MEGABURN_FAULTS_PER_RUN` faults (3) in each run:
//!
//! ```sh
//! MEGABURN_FAULT_CASES=5200 MEGABURN_FAULTS_PER_RUN=10 cargo test --workspace --test faults -- restarts
//! ```
//!
//! `MEGABURN_GOODPUT_SECONDS=3600` measures instead how much of an hour a run trains that a fault
//! ends every two minutes.

mod case;
mod check;
mod goodput;
mod job;
mod kinds;
mod memory;
mod network;
mod progress;
mod report;
mod restarted;
mod shim;

use std::{env, process::ExitCode, sync::Arc};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::{case::Case, kinds::KINDS, report::Report};

/// The default of `MEGABURN_FAULT_CASES`: one case of each kind of fault.
const CASES: u64 = KINDS.len() as u64;
/// The default of `MEGABURN_FAULT_SEED`, so that plain `cargo test` repeats its cases.
const SEED: u64 = 1;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Many cases wait for a timeout, so run more of them concurrently than there are cores.
    arguments.test_threads.get_or_insert(4);
    let cases = number("MEGABURN_FAULT_CASES").unwrap_or(CASES);
    let seed = number("MEGABURN_FAULT_SEED").unwrap_or(SEED);
    if let Some(seconds) = number("MEGABURN_GOODPUT_SECONDS") {
        let measured = goodput::measure(seconds, seed);
        return match measured {
            Ok(()) => ExitCode::SUCCESS,
            Err(what) => {
                eprintln!("{what}");
                ExitCode::FAILURE
            }
        };
    }
    if !arguments.list {
        println!(
            "{cases} cases of {} kinds, MEGABURN_FAULT_SEED={seed}",
            KINDS.len()
        );
    }
    let report = Arc::new(Report::default());
    // A case that is selected by name may have any number.
    let named = arguments
        .filter
        .as_deref()
        .and_then(|name| name.split_once('/')?.1.parse().ok());
    let trials = (0..cases)
        .chain(named.filter(|number| *number >= cases))
        .map(|number| {
            let (name, run) = KINDS[number as usize % KINDS.len()];
            let report = report.clone();
            Trial::test(format!("{name}/{number}"), move || {
                let case = Case::new(name, seed, number);
                let result = run(&case);
                report.add(name, case.fault_seconds(), &result, case.recoveries());
                // After each case, so that a campaign that is interrupted leaves its result.
                report.write(cases, seed);
                result.map_err(|what| Failed::from(format!("{what}\n{}", case.kept())))
            })
        });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is `{text}`: it must be a number")),
    )
}
