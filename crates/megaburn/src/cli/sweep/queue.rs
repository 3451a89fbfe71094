//! Trains the runs of a sweep that are not finished, some at a time.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use megaburn_collective::RankEnv;
use megaburn_launch::TiedChild;
use megaburn_train::TrainError;
use toml::Value;

use super::{
    file::{Sweep, SweepRun},
    outcome::{FailedRun, is_done, remember},
    paths::{LOGS, failed_to_write},
};
use crate::cli::{device::DeviceArg, print};

/// How often the runs are looked at.
const TICK: Duration = Duration::from_millis(50);
/// The end of a run's output that is searched for its error.
const LAST_BYTES: u64 = 4096;

/// A run in progress.
struct Running<'a> {
    run: &'a SweepRun,
    /// Which of the places at a time it has, which decides its GPUs.
    place: usize,
    child: TiedChild,
}

/// Trains the runs that are not finished. Runs that were cut off continue from their last
/// checkpoint. When `stop` is set, the runs in progress save and stop, and no further one starts.
///
/// # Errors
/// A run cannot be started, or its output cannot be written. A run that fails is no error.
pub(super) fn train_all(
    sweep: &Sweep,
    device: Option<DeviceArg>,
    stop: &AtomicBool,
) -> Result<Vec<FailedRun>, TrainError> {
    let mut waiting: Vec<&SweepRun> = Vec::new();
    for run in &sweep.runs {
        match is_done(sweep, run) {
            true => print::progress(format!("{}: finished before", run.name)),
            false => waiting.push(run),
        }
    }
    waiting.reverse();
    let mut running: Vec<Running<'_>> = Vec::new();
    let mut failed = Vec::new();
    let mut is_asked = false;
    loop {
        let stops = stop.load(Ordering::Relaxed);
        if stops && !is_asked {
            is_asked = true;
            running.iter().for_each(|run| run.child.ask_to_stop());
        }
        while !stops && running.len() < sweep.jobs {
            let Some(run) = waiting.pop() else { break };
            let is_free = |place: &usize| running.iter().all(|run| run.place != *place);
            let place = (0..sweep.jobs).find(is_free).unwrap_or(0);
            print::progress(format!("{}: starts", run.name));
            let child = start(sweep, run, place, device)?;
            running.push(Running { run, place, child });
        }
        if running.is_empty() {
            return Ok(failed);
        }
        let mut still = Vec::new();
        for mut one in running {
            let ended = one.child.try_wait();
            let name = &one.run.name;
            match ended {
                Ok(None) => still.push(one),
                Ok(Some(status)) if status.success() => {
                    remember(sweep, one.run)?;
                    let state = if is_done(sweep, one.run) {
                        "finished"
                    } else {
                        "stopped"
                    };
                    print::progress(format!("{name}: {state}"));
                }
                Ok(Some(status)) => {
                    let why = last_error(&log_of(sweep, name));
                    let why = why.unwrap_or_else(|| status.to_string());
                    print::progress(format!("{name}: failed: {why}"));
                    let name = name.clone();
                    failed.push(FailedRun { name, why });
                }
                Err(error) => {
                    return Err(TrainError::Launch {
                        why: format!("cannot wait for the run {name}: {error}"),
                    });
                }
            }
        }
        running = still;
        thread::sleep(TICK);
    }
}

fn log_of(sweep: &Sweep, name: &str) -> PathBuf {
    sweep.dir.join(LOGS).join(format!("{name}.log"))
}

/// Starts `megaburn train` with the settings of a run. Its output is appended to its log.
fn start(
    sweep: &Sweep,
    run: &SweepRun,
    place: usize,
    device: Option<DeviceArg>,
) -> Result<TiedChild, TrainError> {
    let fail = |error: io::Error| TrainError::Launch {
        why: format!("cannot start the run {}: {error}", run.name),
    };
    let mut command = TiedChild::this_program();
    command.arg("train");
    for file in &sweep.config {
        command.arg("--config").arg(file);
    }
    for (key, value) in &run.settings {
        command.arg("--set").arg(format!("{key}={value}"));
    }
    let dir = Value::String(sweep.dir.join(&run.name).display().to_string());
    command.arg("--set").arg(format!("run.dir={dir}"));
    if let Some(device) = device {
        command.args(["--device", device.name()]);
    }
    if let Some(gpus) = sweep.gpus {
        let visible = std::env::var(RankEnv::VISIBLE_GPUS).ok();
        let own = gpus_of(place, gpus, visible.as_deref()).map_err(|why| TrainError::Invalid {
            key: RankEnv::VISIBLE_GPUS,
            value: visible.clone().unwrap_or_default(),
            rule: why,
        })?;
        command.env(RankEnv::VISIBLE_GPUS, own);
    }
    let path = log_of(sweep, &run.name);
    let log = File::options().create(true).append(true).open(&path);
    let log = log.map_err(failed_to_write(&path))?;
    let errors = log.try_clone().map_err(failed_to_write(&path))?;
    command.stdin(std::process::Stdio::null());
    command.stdout(log).stderr(errors);
    TiedChild::spawn(command).map_err(fail)
}

/// The GPUs of a place: a part of those that are visible, which no other place has.
fn gpus_of(place: usize, count: usize, visible: Option<&str>) -> Result<String, String> {
    let first = place * count;
    let all: Vec<String> = match visible {
        None => (0..first + count).map(|gpu| gpu.to_string()).collect(),
        Some(list) => {
            let list = list.split(',').map(str::trim);
            let list = list.filter(|gpu| !gpu.is_empty());
            list.map(String::from).collect()
        }
    };
    match all.get(first..first + count) {
        Some(own) => Ok(own.join(",")),
        None => Err(format!(
            "a list of {} GPUs at least, for {} runs at a time with `gpus = {count}`",
            first + count,
            place + 1
        )),
    }
}

/// The last line with an error in the output of a run.
fn last_error(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LAST_BYTES)))
        .ok()?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let mut errors = text.lines().filter_map(|line| line.strip_prefix("error: "));
    errors.next_back().map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_at_a_time_have_gpus_of_their_own() {
        assert_eq!(gpus_of(1, 2, None).unwrap(), "2,3");
        assert_eq!(gpus_of(1, 1, Some("4, 7")).unwrap(), "7");
        assert!(
            gpus_of(1, 2, Some("4,7,9"))
                .unwrap_err()
                .contains("4 GPUs at least")
        );
    }
}
