//! `megaburn sweep`: trains the runs of a file, each in its own folder, and compares them.

mod file;
mod law;
mod outcome;
mod paths;
mod picture;
mod queue;
mod table;

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use clap::Args;
use megaburn_launch::stop_signals;
use megaburn_train::{Exit, TrainError};
use serde_json::json;

use super::{device::DeviceArg, print};
use file::{Fit, Sweep};
use law::{Law, law_of};
use outcome::Outcome;
use paths::{LOGS, make, write};

/// The exit code of a shell's command that SIGINT ended.
const INTERRUPTED: u8 = 130;

#[derive(Args)]
pub(super) struct SweepArgs {
    /// The TOML file of the sweep; docs/sweep.md describes its keys.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Only list the runs and how far they are.
    #[arg(long)]
    list: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// The device that the ranks of each run compute on; see `megaburn train --device`.
    #[arg(long, value_enum)]
    device: Option<DeviceArg>,
}

impl SweepArgs {
    /// Trains what is not finished, prints the table and draws the picture. Exits with 1 if a run
    /// failed, and with 130 if the sweep was interrupted.
    pub(super) fn run(self) -> Result<ExitCode, TrainError> {
        let sweep = Sweep::read(&self.file)?;
        let mut failed = Vec::new();
        let mut is_interrupted = false;
        if !self.list {
            make(&sweep.dir.join(LOGS))?;
            let stop = stop_flag()?;
            failed = queue::train_all(&sweep, self.device, &stop)?;
            is_interrupted = stop.load(Ordering::Relaxed);
        }
        let outcomes = Outcome::of_all(&sweep, &failed);
        let law = sweep.fit.map(|Fit::ScalingLaw| law_of(&outcomes));
        if !self.list {
            let picture = picture::draw(&sweep, &outcomes, law.as_ref());
            let picture = picture.map_err(TrainError::from)?;
            write(&sweep.dir.join("sweep.svg"), &picture)?;
            let found = self.found(&sweep, &outcomes, law.as_ref());
            write(&sweep.dir.join("results.json"), &format!("{found:#}\n"))?;
        }
        match self.json {
            true => print::result(self.found(&sweep, &outcomes, law.as_ref()))?,
            false => self.print(&sweep, &outcomes, law.as_ref())?,
        }
        Ok(match (is_interrupted, failed.is_empty()) {
            (true, _) => ExitCode::from(INTERRUPTED),
            (false, true) => Exit::Done.into(),
            (false, false) => Exit::Failed.into(),
        })
    }

    fn print(
        &self,
        sweep: &Sweep,
        outcomes: &[Outcome],
        law: Option<&Law>,
    ) -> Result<(), TrainError> {
        let lines = table::lines(sweep, outcomes);
        lines.iter().try_for_each(print::result)?;
        match law {
            Some(Ok((law, of))) => {
                print::result(format!("law      {}", law.law))?;
                for (residual, outcome) in law.residuals.iter().zip(of) {
                    let name = &outcomes[*outcome].name;
                    print::result(format!("residual {residual:+.5}  {name}"))?;
                }
            }
            Some(Err(why)) => print::result(format!("law      none: {why}"))?,
            None => {}
        }
        if !self.list {
            print::note(format!(
                "wrote    {}",
                sweep.dir.join("sweep.svg").display()
            ));
        }
        Ok(())
    }

    fn found(&self, sweep: &Sweep, outcomes: &[Outcome], law: Option<&Law>) -> serde_json::Value {
        let best = table::best(outcomes).map(|best| &best.name);
        let law = law.map(|law| match law {
            Ok((fit, _)) => json!(fit),
            Err(why) => json!({ "error": why }),
        });
        json!({
            "dir": sweep.dir,
            "keys": sweep.keys,
            "best": best,
            "runs": outcomes,
            "law": law,
        })
    }
}

/// A flag that the first signal to stop sets. A second one ends this program, and with it the runs.
fn stop_flag() -> Result<Arc<AtomicBool>, TrainError> {
    let stop = Arc::new(AtomicBool::new(false));
    let fail = |source| TrainError::Signals { source };
    for signal in stop_signals() {
        let again = stop.clone();
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, again)
            .map_err(fail)?;
        signal_hook::flag::register(signal, stop.clone()).map_err(fail)?;
    }
    Ok(stop)
}
