//! Trains a few steps of a run that a search found.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use megaburn_launch::TiedChild;
use megaburn_plan::FoundRun;
use megaburn_report::metrics::{MetricsRecord, read_metrics};
use megaburn_train::{RunPaths, TrainError};
use serde::Serialize;

use crate::cli::{TrainArgs, device::DeviceArg};

/// Steps before those that count: kernels are compiled and tuned in them.
const WARM_UP: usize = 4;
/// Steps that count; their median is taken.
const STEPS: usize = 5;
/// How often the run is looked at.
const TICK: Duration = Duration::from_millis(100);
/// The longest that a run may take to its last step.
const PATIENCE: Duration = Duration::from_secs(1800);

/// What a run that was found reached, or why it failed.
#[derive(Debug, Serialize)]
pub(super) struct Measured<'a> {
    #[serde(rename = "flags", serialize_with = "flags")]
    pub(super) run: &'a FoundRun,
    /// Time of a step by prediction.
    pub(super) planned_ms: f64,
    /// Median time of a step.
    pub(super) step_ms: Option<f64>,
    /// The most memory of a rank's GPU after a step.
    pub(super) memory_bytes: Option<u64>,
    /// The last error of a run that failed.
    pub(super) error: Option<String>,
}

fn flags<S: serde::Serializer>(run: &FoundRun, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&run.flags)
}

/// Trains until enough steps are measured, and ends the run. Its folder, a temporary one, is
/// removed.
///
/// # Errors
/// A program or a folder cannot be made. A run that fails is no error.
pub(super) fn measure<'a>(
    run: &'a FoundRun,
    args: &TrainArgs,
    ranks: usize,
    device: Option<DeviceArg>,
) -> Result<Measured<'a>, TrainError> {
    let dir = TemporaryDir::new()?;
    let run_dir = dir.0.join("run");
    let log = dir.0.join("log");
    let mut child = start(args, ranks, device, &run_dir, &log).map_err(failed)?;
    let metrics = RunPaths::of(&run_dir).metrics;
    let start = Instant::now();
    let mut error = None;
    loop {
        let ended = child.try_wait().map_err(failed)?;
        let steps = steps(&metrics);
        if steps.len() >= WARM_UP + STEPS {
            break;
        }
        if let Some(status) = ended {
            error = Some(last_line(&log).unwrap_or_else(|| status.to_string()));
            break;
        }
        if start.elapsed() > PATIENCE {
            error = Some(format!(
                "{} steps took more than {} minutes",
                WARM_UP + STEPS,
                PATIENCE.as_secs() / 60
            ));
            break;
        }
        thread::sleep(TICK);
    }
    child.kill().map_err(failed)?;
    let mut steps = steps(&metrics);
    let counted = steps.split_off(steps.len().min(WARM_UP));
    let is_measured = error.is_none();
    let mut times: Vec<f64> = counted.iter().map(|(ms, _)| *ms).collect();
    times.sort_by(f64::total_cmp);
    Ok(Measured {
        run,
        planned_ms: run.step_ms,
        step_ms: times.get(times.len() / 2).copied().filter(|_| is_measured),
        memory_bytes: counted.iter().map(|(_, bytes)| *bytes).max(),
        error,
    })
}

/// The run that was the fastest, of those that were measured.
pub(super) fn fastest<'a>(measured: &[Measured<'a>]) -> Option<&'a FoundRun> {
    let times = measured
        .iter()
        .filter_map(|one| Some((one.step_ms?, one.run)));
    times
        .min_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, run)| run)
}

/// The measured runs as lines, in the order of the search.
pub(super) fn lines(measured: &[Measured<'_>]) -> Vec<String> {
    let best = fastest(measured).map(|run| &run.flags);
    let line = |(index, one): (usize, &Measured<'_>)| match (one.step_ms, &one.error) {
        (Some(ms), _) => format!(
            "measured {}: {ms:.1} ms a step, {:.2} times the predicted {:.1} ms{}",
            index + 1,
            ms / one.planned_ms,
            one.planned_ms,
            match best == Some(&one.run.flags) {
                true => ", the fastest",
                false => "",
            }
        ),
        (None, error) => format!(
            "measured {}: failed: {}",
            index + 1,
            error.as_deref().unwrap_or("no step was measured")
        ),
    };
    measured.iter().enumerate().map(line).collect()
}

fn start(
    args: &TrainArgs,
    ranks: usize,
    device: Option<DeviceArg>,
    run_dir: &Path,
    log: &Path,
) -> io::Result<TiedChild> {
    let mut command = TiedChild::this_program();
    command.arg("train");
    for file in &args.config {
        command.arg("--config").arg(file);
    }
    let dir = toml::Value::String(run_dir.display().to_string());
    let own = [
        format!("run.dir={dir}"),
        "train.eval_interval=0".to_string(),
        "train.checkpoint_interval=0".to_string(),
        "train.checkpoint_interval_minutes=0".to_string(),
        "train.log_interval=1".to_string(),
    ];
    for set in args.set.iter().chain(&own) {
        command.arg("--set").arg(set);
    }
    if let Some(layout) = &args.layout {
        command.args(["--layout", layout]);
    }
    command.args(["--ranks", &ranks.to_string()]);
    if let Some(device) = device {
        command.args(["--device", device.name()]);
    }
    let log = File::create_new(log)?;
    let errors = log.try_clone()?;
    command.stdin(Stdio::null()).stdout(log).stderr(errors);
    TiedChild::spawn(command)
}

/// Milliseconds and memory of each step so far. A line that is being written does not count.
fn steps(metrics: &Path) -> Vec<(f64, u64)> {
    let records = read_metrics(metrics).unwrap_or_default();
    let step = |record: MetricsRecord| match record {
        MetricsRecord::Step(step) if step.tokens_per_second > 0.0 => Some((
            step.tokens as f64 / step.tokens_per_second * 1e3,
            step.memory_bytes,
        )),
        _ => None,
    };
    records.into_iter().filter_map(step).collect()
}

/// The last line of a log that is not empty, or its last error.
fn last_line(log: &Path) -> Option<String> {
    let text = fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut errors = text.lines().filter_map(|line| line.strip_prefix("error: "));
    let last = errors.next_back().or_else(|| lines.next_back());
    last.map(str::to_string)
}

fn failed(error: io::Error) -> TrainError {
    TrainError::Launch {
        why: format!("cannot measure a run: {error}"),
    }
}

/// A new folder, which is removed with what the run wrote into it.
struct TemporaryDir(PathBuf);

impl TemporaryDir {
    fn new() -> Result<Self, TrainError> {
        let parent = std::env::temp_dir();
        for number in 0.. {
            let name = format!("megaburn-search-{}-{number}", std::process::id());
            let path = parent.join(name);
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(TrainError::Write { path, source }),
            }
        }
        unreachable!("a range without an end has ended")
    }
}

impl Drop for TemporaryDir {
    fn drop(&mut self) {
        // What cannot be removed is left to the system's cleaning of temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
