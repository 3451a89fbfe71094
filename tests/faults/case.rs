//! One case: a folder, a small model, a layout, and the numbers drawn from its seed.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use crate::{
    check::{self, Numbers},
    job::{Ended, Job, PATIENCE, megaburn, processes_of, wait_until},
    report::Recovery,
};

/// The number of steps of a complete run.
pub(crate) const STEPS: u64 = 14;
/// The number of steps of a run that a fault is meant to end.
pub(crate) const ENDLESS: u64 = 100_000;
/// `train.timeout_seconds` of the cases.
pub(crate) const TIMEOUT: f64 = 3.0;
/// How many seconds beyond its limit a job may take to end.
pub(crate) const GRACE: f64 = 5.0;
/// How long a job may take to end after a fault.
pub(crate) const ENDS: Duration = Duration::from_millis(((TIMEOUT + GRACE) * 1000.0) as u64);

const LAYOUTS: [&str; 9] = [
    "dp2",
    "tp2-sp",
    "pp2",
    "cp2",
    "tp2",
    "dp4",
    "tp2-dp2-sp",
    "pp2-dp2",
    "tp2-cp2-sp",
];

/// Settings of every case.
const SETTINGS: [&str; 13] = [
    "model.hidden=32",
    "model.ffn=64",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=4",
    "data.seq_len=32",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.eval_interval=0",
    "train.eval_batches=1",
    "train.log_interval=1",
    "generate.tokens=0",
    "optimizer.decay_steps=1000",
];

pub(crate) struct Case {
    dir: TempDir,
    rng: RefCell<fastrand::Rng>,
    /// The layout with which the case begins.
    pub(crate) layout: &'static str,
    /// Whether ranks are processes under `megaburn launch`, or threads.
    pub(crate) launched: bool,
    /// `train.async_save`.
    pub(crate) is_async: bool,
    jobs: Cell<usize>,
    seconds: Cell<f64>,
    recoveries: RefCell<Vec<Recovery>>,
    description: String,
}

impl Case {
    pub(crate) fn new(kind: &str, seed: u64, number: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed.wrapping_mul(1_000_003).wrapping_add(number));
        let layout = LAYOUTS[rng.usize(..LAYOUTS.len())];
        let launched = rng.bool();
        let is_async = rng.bool();
        let dir = tempfile::Builder::new()
            .prefix("megaburn-faults-")
            .tempdir()
            .unwrap();
        fs::write(dir.path().join("text.txt"), text()).unwrap();
        let ranks = if launched { "processes" } else { "threads" };
        let saves = if is_async { ", asynchronous saves" } else { "" };
        let description = format!("{kind}/{number} of seed {seed}: {layout}, {ranks}{saves}");
        Self {
            dir,
            rng: RefCell::new(rng),
            layout,
            launched,
            is_async,
            jobs: Cell::new(0),
            seconds: Cell::new(0.0),
            recoveries: RefCell::default(),
            description,
        }
    }

    /// A description of the case for the report of a failure.
    pub(crate) fn kept(&self) -> String {
        let mut text = self.description.clone();
        for entry in fs::read_dir(self.run()).into_iter().flatten().flatten() {
            write!(text, "\n  run/{}", entry.file_name().display()).unwrap();
        }
        for entry in fs::read_dir(self.checkpoints())
            .into_iter()
            .flatten()
            .flatten()
        {
            write!(text, "\n  run/checkpoints/{}", entry.file_name().display()).unwrap();
        }
        text
    }

    /// The slowest end after a fault, in seconds.
    pub(crate) fn fault_seconds(&self) -> f64 {
        self.seconds.get()
    }

    /// Records how long a job took to end after a fault.
    pub(crate) fn took(&self, seconds: f64) {
        self.seconds.set(self.seconds.get().max(seconds));
    }

    /// Records that a run came back after a fault.
    pub(crate) fn recovered(&self, recovery: Recovery) {
        self.recoveries.borrow_mut().push(recovery);
    }

    /// The faults after which a run came back.
    pub(crate) fn recoveries(&self) -> Vec<Recovery> {
        self.recoveries.take()
    }

    /// A random number below `end`.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.rng.borrow_mut().u64(..end)
    }

    /// A random one of some values.
    pub(crate) fn one_of<T: Copy>(&self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }

    pub(crate) fn layout_of(&self, ranks: usize) -> &'static str {
        let of_size: Vec<_> = LAYOUTS
            .into_iter()
            .filter(|layout| world_size(layout) == ranks)
            .collect();
        self.one_of(&of_size)
    }

    pub(crate) fn any_layout(&self) -> &'static str {
        self.one_of(&LAYOUTS)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.path("run")
    }

    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.run().join("checkpoints")
    }

    /// The arguments of `megaburn` that train to step `steps`.
    pub(crate) fn train_args(&self, layout: &str, steps: u64, sets: &[&str]) -> Vec<String> {
        let mut args = vec!["train".to_string()];
        args.extend(["--data".into(), self.path("text.txt").display().to_string()]);
        args.extend([
            "--layout".into(),
            layout.into(),
            "--steps".into(),
            steps.to_string(),
        ]);
        let dir = format!("run.dir={}", self.run().display());
        let timeout = format!("train.timeout_seconds={TIMEOUT:?}");
        let is_async = format!("train.async_save={}", self.is_async);
        let own = [
            dir.as_str(),
            &timeout,
            &is_async,
            "train.checkpoint_interval=3",
        ];
        for set in SETTINGS.iter().chain(&own).chain(sets) {
            args.extend(["--set".to_string(), set.to_string()]);
        }
        args
    }

    /// A command that trains, with ranks as processes or threads as the case requires.
    pub(crate) fn train(&self, layout: &str, steps: u64, sets: &[&str]) -> Command {
        let args = self.train_args(layout, steps, sets);
        if self.launched {
            self.launch(layout, &args)
        } else {
            megaburn(args)
        }
    }

    /// A `megaburn launch` command that starts `megaburn` with these arguments.
    pub(crate) fn launch(&self, layout: &str, args: &[String]) -> Command {
        let mut all = vec![
            "launch".to_string(),
            "--nproc".into(),
            world_size(layout).to_string(),
        ];
        all.extend(["--".to_string(), crate::job::binary().display().to_string()]);
        all.extend(args.iter().cloned());
        megaburn(all)
    }

    pub(crate) fn start(&self, command: Command) -> Job {
        let number = self.jobs.replace(self.jobs.get() + 1);
        Job::start(command, self.path(&format!("job-{number}")))
    }

    /// Starts an endless run and waits until it has done `steps` steps.
    pub(crate) fn start_and_wait(&self, steps: u64, sets: &[&str]) -> Result<Job, String> {
        let mut job = self.start(self.train(self.layout, ENDLESS, sets));
        self.wait_for_step(&mut job, steps)?;
        Ok(job)
    }

    /// Waits until the metrics contain step `step`.
    pub(crate) fn wait_for_step(&self, job: &mut Job, step: u64) -> Result<(), String> {
        let mut ended = false;
        wait_until(&format!("step {step}"), || {
            ended = !job.is_running();
            ended || check::last_step(&self.run()) >= step
        })?;
        if ended && check::last_step(&self.run()) < step {
            Err(format!(
                "the job ended before step {step}: {}",
                job.printed()
            ))
        } else {
            Ok(())
        }
    }

    /// Waits for the end of a job that a fault may hit at any time. A job that neither prints nor
    /// trains for [`ENDS`] counts as hung.
    pub(crate) fn wait_moving(&self, job: &mut Job) -> Result<Ended, String> {
        let metrics = self.run().join("metrics.jsonl");
        let seen = |job: &Job| {
            (
                job.printed().len(),
                fs::metadata(&metrics).map_or(0, |m| m.len()),
            )
        };
        let mut last = seen(job);
        let mut since = Instant::now();
        while job.is_running() {
            let now = seen(job);
            if now != last {
                last = now;
                since = Instant::now();
            }
            if since.elapsed() > ENDS {
                return Err(format!(
                    "nothing has happened for {ENDS:?}: {}",
                    job.printed()
                ));
            }
            thread::sleep(Duration::from_millis(50));
        }
        self.took(since.elapsed().as_secs_f64());
        job.wait(PATIENCE)
    }

    /// The numbers of an uninterrupted run of a layout, trained once in a campaign.
    pub(crate) fn reference(layout: &'static str) -> Result<Numbers, String> {
        type Known = Mutex<BTreeMap<&'static str, Arc<OnceLock<Result<Numbers, String>>>>>;
        static KNOWN: Known = Mutex::new(BTreeMap::new());
        let known = KNOWN.lock().unwrap().entry(layout).or_default().clone();
        let train = || {
            let mut case = Case::new("reference", 0, 0);
            case.layout = layout;
            case.launched = false;
            let mut job = case.start(case.train(layout, STEPS, &[]));
            job.wait(PATIENCE)?.expect(&[0])?;
            check::numbers(&case.run())
        };
        known.get_or_init(train).clone()
    }

    /// Starts the same training without a fault: it must finish with the numbers of a run that was
    /// never interrupted, and leave nothing over.
    pub(crate) fn recover(&self) -> Result<(), String> {
        self.recover_as(self.layout)
    }

    /// Like [`Self::recover`] under another layout, equal up to rounding.
    pub(crate) fn recover_as(&self, layout: &'static str) -> Result<(), String> {
        self.recover_with(layout, layout == self.layout)
    }

    /// Like [`Self::recover`] after steps under different layouts, equal up to rounding.
    pub(crate) fn recover_roughly(&self, layout: &'static str) -> Result<(), String> {
        self.recover_with(layout, false)
    }

    fn recover_with(&self, layout: &'static str, same: bool) -> Result<(), String> {
        let steps = STEPS.max(check::last_checkpoint(&self.run()));
        self.start(self.train(layout, steps, &[]))
            .wait(PATIENCE)?
            .expect(&[0])?;
        let found = check::numbers(&self.run())?;
        let bounds = if same { check::SAME } else { check::ROUNDING };
        check::same_numbers(&found, &Self::reference(self.layout)?, steps, bounds)?;
        self.check_nothing_left()
    }

    /// Checks that no process of the case and no file of an incomplete save is left.
    pub(crate) fn check_nothing_left(&self) -> Result<(), String> {
        check::no_leftovers(&self.run())?;
        check::no_processes(self.dir.path(), Duration::from_secs(2))
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Kills processes that a failed case may leave, so that they do not slow the others down.
impl Drop for Case {
    fn drop(&mut self) {
        for pid in processes_of(self.dir.path()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// The number of ranks of a layout of `LAYOUTS`.
pub(crate) fn world_size(layout: &str) -> usize {
    let degree = |part: &str| {
        part.trim_start_matches(char::is_alphabetic)
            .parse()
            .unwrap_or(1)
    };
    layout.split('-').map(degree).product()
}

/// The text, equal in all cases because the reference runs read it too.
fn text() -> String {
    let mut rng = fastrand::Rng::with_seed(1);
    (0..400)
        .map(|line| format!("line {line}: {}\n", rng.u64(..)))
        .collect()
}
