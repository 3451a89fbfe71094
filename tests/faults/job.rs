//! Processes of `megaburn` that a case starts, breaks and waits for.

use std::{
    fs::{self, File},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};

/// The longest that a case waits for anything that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// The tested binary: the build of this checkout, or the one that `MEGABURN` names.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("MEGABURN").map_or_else(
        || env!("CARGO_BIN_EXE_megaburn-under-test").into(),
        PathBuf::from,
    )
}

/// A `megaburn` command that computes on one thread and does not see a surrounding launcher.
pub(crate) fn megaburn<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    plain(binary(), args)
}

/// Like [`megaburn()`], for any program.
pub(crate) fn plain<S: AsRef<std::ffi::OsStr>>(
    program: impl AsRef<std::ffi::OsStr>,
    args: impl IntoIterator<Item = S>,
) -> Command {
    let mut command = Command::new(program);
    command
        .args(args)
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null());
    for name in [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RUST_LOG",
    ] {
        command.env_remove(name);
    }
    command
}

/// How a process ended. The code is its exit code, or 128 + the signal's number, as in a shell.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) seconds: f64,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// Returns an error unless the process ended with one of these codes.
    pub(crate) fn expect(self, codes: &[i32]) -> Result<Self, String> {
        if codes.contains(&self.code) {
            return Ok(self);
        }
        Err(format!(
            "exit code {}, expected one of {codes:?}\nstdout: {}\nstderr: {}",
            self.code,
            tail(&self.stdout),
            tail(&self.stderr)
        ))
    }

    /// Returns an error unless the output of the process contains one of these texts.
    pub(crate) fn says(self, texts: &[&str]) -> Result<Self, String> {
        let printed = format!("{}{}", self.stdout, self.stderr);
        if texts.iter().any(|text| printed.contains(text)) {
            return Ok(self);
        }
        Err(format!("none of {texts:?} was printed: {}", tail(&printed)))
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// A process in a process group of its own; the group is killed when this is dropped.
pub(crate) struct Job {
    child: Child,
    started: Instant,
    output: PathBuf,
}

impl Job {
    /// Starts `command` with its output in `output.out` and `output.err`.
    pub(crate) fn start(mut command: Command, output: PathBuf) -> Self {
        let file = |end| File::create(output.with_extension(end)).unwrap();
        command.stdout(file("out")).stderr(file("err"));
        Self::start_with_output(command, output)
    }

    /// Like [`Self::start`], for a command that sets its own output.
    pub(crate) fn start_with_output(mut command: Command, output: PathBuf) -> Self {
        let child = command.process_group(0).spawn().unwrap();
        Self {
            child,
            started: Instant::now(),
            output,
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Signals the process alone.
    pub(crate) fn signal(&self, signal: Signal) {
        // A process that has ended cannot be signalled.
        let _ = kill(Pid::from_raw(self.pid()), signal);
    }

    /// Signals every process that names `folder` on its command line: a launcher and its ranks.
    pub(crate) fn signal_all(&self, folder: &Path, signal: Signal) {
        let _ = killpg(Pid::from_raw(self.pid()), signal);
        for pid in processes_of(folder) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// The output of the process so far.
    pub(crate) fn printed(&self) -> String {
        let read = |end| fs::read(self.output.with_extension(end)).unwrap_or_default();
        String::from_utf8_lossy(&[read("out"), read("err")].concat()).into_owned()
    }

    /// Waits for the end of the process.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<Ended, String> {
        let from = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let read = |end| {
                    let bytes = fs::read(self.output.with_extension(end)).unwrap_or_default();
                    String::from_utf8_lossy(&bytes).into_owned()
                };
                let code = status.code().or(status.signal().map(|signal| 128 + signal));
                return Ok(Ended {
                    code: code.unwrap(),
                    seconds: from.elapsed().as_secs_f64(),
                    stdout: read("out"),
                    stderr: read("err"),
                });
            }
            if from.elapsed() > limit {
                return Err(format!(
                    "still running {:.1} s after its start, {:.1} s after the fault: {}",
                    self.started.elapsed().as_secs_f64(),
                    limit.as_secs_f64(),
                    tail(&self.printed())
                ));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.pid()), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// The processes that have `folder` in their command line.
pub(crate) fn processes_of(folder: &Path) -> Vec<i32> {
    let folder = folder.display().to_string();
    let own = std::process::id() as i32;
    let pids = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let names = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&folder)
    };
    pids.filter(|pid| *pid != own).filter(names).collect()
}

/// Waits until a condition holds.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) -> Result<(), String> {
    let from = Instant::now();
    while !is_so() {
        if from.elapsed() > PATIENCE {
            return Err(format!("{what} did not happen within {PATIENCE:?}"));
        }
        thread::sleep(Duration::from_millis(3));
    }
    Ok(())
}
