//! Training runs as child processes of the tests.

use std::{
    ffi::OsString,
    fs,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use megaburn::report::metrics::{MetricsRecord, StepMetrics, read_metrics};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tempfile::TempDir;

use megaburn_test_support::text::write_random_text;

/// A small run: two layers, one short text.
const CONFIG: &str = "
[model]\nhidden = 256\nffn = 512\nlayers = 2\nheads = 4\nkv_heads = 2
[data]\nseq_len = 64
[train]\nglobal_batch = 8\nmicro_batch = 1\neval_interval = 0\neval_batches = 1
log_interval = 1000000\ncheckpoint_interval = 5\ntimeout_seconds = 10
[optimizer]\nwarmup_steps = 3\ndecay_steps = 100
[generate]\ntokens = 0
[run]\ndevice = \"cuda\"
";

/// A number of steps that no test waits for.
pub(crate) const ENDLESS: u64 = 1_000_000;

/// The folder of a run, which is removed when this is dropped.
pub(crate) struct Folder(TempDir);

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A running `megaburn train` and its child processes; killed when dropped.
pub(crate) struct Running<'a> {
    child: Child,
    folder: &'a Folder,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let folder = Self(tempfile::tempdir().expect("there is a folder for temporary files"));
        write_random_text(&folder.path("text.txt"), 50_000, 7);
        fs::write(folder.path("config.toml"), CONFIG).expect("a file can be written");
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Starts the run, with additional `KEY=VALUE` settings.
    pub(crate) fn train(&self, layout: &str, steps: u64, sets: &[&str]) -> Running<'_> {
        self.start(&self.arguments(layout, steps, sets))
    }

    /// Starts the run as `ranks` ranks; rank 1 has a different learning rate.
    pub(crate) fn train_at_odds(&self, layout: &str, ranks: usize) -> Running<'_> {
        const ODD: &str = "exec \"$@\" --set optimizer.lr=0.00$((1 + (RANK == 1)))";
        let launch = [
            "megaburn",
            "launch",
            "--nproc",
            &ranks.to_string(),
            "--",
            "sh",
            "-c",
            ODD,
        ];
        let exe = std::env::current_exe().expect("this program has a path");
        let mut arguments = launch.map(OsString::from).to_vec();
        arguments.extend(["sh".into(), exe.into_os_string()]);
        arguments.extend(self.arguments(layout, 5, &[]));
        self.start(&arguments)
    }

    fn arguments(&self, layout: &str, steps: u64, sets: &[&str]) -> Vec<OsString> {
        let config = self.path("config.toml");
        let data = self.path("text.txt");
        let run = format!("run.dir={}", self.path("run").display());
        let mut arguments = ["megaburn", "train", "--layout", layout]
            .map(OsString::from)
            .to_vec();
        arguments.extend(["--steps".into(), steps.to_string().into()]);
        arguments.extend([
            "--config".into(),
            config.into(),
            "--data".into(),
            data.into(),
        ]);
        let sets = std::iter::once(&*run).chain(sets.iter().copied());
        arguments.extend(sets.flat_map(|set| ["--set".into(), set.into()]));
        arguments
    }

    fn start(&self, arguments: &[OsString]) -> Running<'_> {
        let exe = std::env::current_exe().expect("this program has a path");
        let file = |name| fs::File::create(self.path(name)).expect("a file can be written");
        let mut command = Command::new(exe);
        command
            .args(arguments)
            .process_group(0)
            .stdin(Stdio::null());
        command.stdout(file("stdout")).stderr(file("stderr"));
        Running {
            child: command.spawn().expect("this program can be started"),
            folder: self,
        }
    }

    /// The steps in its metrics so far.
    pub(crate) fn steps(&self) -> Vec<StepMetrics> {
        let records = read_metrics(self.path("run/metrics.jsonl")).unwrap_or_default();
        let step = |record| match record {
            MetricsRecord::Step(step) => Some(step),
            _ => None,
        };
        records.into_iter().filter_map(step).collect()
    }
}

impl Running<'_> {
    /// Waits until a condition holds, while the run continues.
    pub(crate) fn wait_until(
        &mut self,
        patience: Duration,
        mut is_so: impl FnMut() -> bool,
    ) -> Result<(), String> {
        let until = Instant::now() + patience;
        while !is_so() {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                return Err(format!(
                    "the run ended early: {:?}",
                    self.ended(status.code())
                ));
            }
            if Instant::now() > until {
                return Err(format!(
                    "nothing happened in {patience:?}: {:?}",
                    self.ended(None)
                ));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits for the run to end, which must happen within `patience`.
    pub(crate) fn wait(&mut self, patience: Duration) -> Result<Ended, String> {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                return Ok(self.ended(status.code()));
            }
            if Instant::now() > until {
                return Err(format!(
                    "it did not end within {patience:?}: {:?}",
                    self.ended(None)
                ));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The process that started the ranks.
    pub(crate) fn launcher(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// The process ids of its ranks, in rank order.
    pub(crate) fn ranks(&self) -> Vec<Pid> {
        let mut ranks: Vec<(usize, Pid)> = children(self.child.id())
            .into_iter()
            .filter_map(|pid| {
                let environ = fs::read(format!("/proc/{pid}/environ")).ok()?;
                let rank = environ.split(|byte| *byte == 0).find_map(|entry| {
                    std::str::from_utf8(entry)
                        .ok()?
                        .strip_prefix("RANK=")?
                        .parse()
                        .ok()
                })?;
                Some((rank, Pid::from_raw(pid)))
            })
            .collect();
        ranks.sort_unstable();
        ranks.into_iter().map(|(_, pid)| pid).collect()
    }

    fn ended(&self, code: Option<i32>) -> Ended {
        let read = |name| fs::read_to_string(self.folder.path(name)).unwrap_or_default();
        Ended {
            code,
            stdout: read("stdout"),
            stderr: read("stderr"),
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = killpg(self.launcher(), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// The child processes of `parent`.
fn children(parent: u32) -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The fields after the name (in parentheses; it may contain anything) are the state and
            // the parent.
            let parent_of: u32 = stat
                .rsplit_once(')')?
                .1
                .split_whitespace()
                .nth(1)?
                .parse()
                .ok()?;
            (parent_of == parent).then_some(pid)
        })
        .collect()
}

/// Whether a process exists and is not a zombie.
pub(crate) fn is_alive(pid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit_once(')')
            .is_some_and(|(_, rest)| rest.starts_with(" Z"))
    })
}

/// Memory in use on each GPU in MiB, from `nvidia-smi`.
pub(crate) fn memory_used() -> Result<Vec<u64>, String> {
    let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"];
    let output = Command::new("nvidia-smi").args(query).output();
    let output = output.map_err(|error| format!("nvidia-smi: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .map(|line| {
            line.trim()
                .parse()
                .map_err(|_| format!("nvidia-smi: {text}"))
        })
        .collect()
}
