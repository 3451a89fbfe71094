//! What ranks write when they hang or disagree, and what it means.
//!
//! Each rank appends one line to `hangs.jsonl` in the run's folder: what it was doing, its last
//! collectives, its threads, and the processes of its host. The thread that watches a rank writes it,
//! so a rank whose own thread is stuck reports too. `megaburn hang` compares the lines.

mod analysis;
mod line;
mod system;
mod text;

use std::{
    collections::BTreeMap,
    env,
    fs::{File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use megaburn_collective::{CollectiveError, Group, host_name, objects};
use serde::{Deserialize, Serialize};

use crate::{
    run_folder::{Marker, names::HANGS},
    time::now,
};

pub use analysis::{Finding, HangAnalysis, What};
pub use line::{HangLine, ProcessState, read_hang};
pub use system::ThreadState;

/// How long a rank waits while others write to the file.
const PATIENCE: Duration = Duration::from_secs(2);

/// Writes a rank's line about a hang, once.
#[derive(Debug)]
pub(crate) struct HangReports {
    world: Group,
    place: OnceLock<Arc<Place>>,
    is_written: AtomicBool,
}

/// Where reports are written, and the processes of the run.
#[derive(Debug)]
struct Place {
    dir: PathBuf,
    run_id: String,
    start: String,
    processes: Vec<Process>,
}

/// The process of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    host: String,
    pid: u32,
}

impl HangReports {
    /// Reports of this rank. They have no place yet, so nothing is written.
    pub(crate) fn new(world: &Group) -> Arc<Self> {
        Arc::new(Self {
            world: world.clone(),
            place: OnceLock::new(),
            is_written: AtomicBool::new(false),
        })
    }

    /// Writes reports into the folder of run `run_id` from now on.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks.
    pub(crate) fn write_to(&self, dir: &Path, run_id: &str) -> Result<(), CollectiveError> {
        let own = Process {
            host: host_name(),
            pid: process::id(),
        };
        let all = objects::gather(&self.world, &own)?;
        let (start, processes) = objects::broadcast(&self.world, &(now(), all))?;
        let _ = self.place.set(Arc::new(Place {
            dir: dir.to_path_buf(),
            run_id: run_id.to_string(),
            start,
            processes,
        }));
        Ok(())
    }

    /// Reports a failure of this rank, or one that others reported to it, if it is a hang.
    pub(crate) fn look(&self) {
        if self.is_written.load(Ordering::Relaxed) {
            return;
        }
        if let Some(failure) = self.world.first_failure()
            && failure.is_hang
        {
            self.write(failure.why);
        }
    }

    /// Reports that this rank makes no progress, and ends the collectives of the others, which then
    /// report, too.
    pub(crate) fn end(&self, why: &str) {
        let line = self.line(why.to_string());
        self.world.abort_hang(why);
        line.into_iter().for_each(write);
    }

    fn write(&self, why: String) {
        self.line(why).into_iter().for_each(write);
    }

    /// The line of this rank, once, and its place.
    fn line(&self, why: String) -> Option<(Arc<Place>, HangLine)> {
        let place = self.place.get()?;
        if self.is_written.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some((place.clone(), place.line(why, &self.world)))
    }
}

/// Writes a line in a thread of its own, and waits for it only as long as a file system usually
/// takes: what hangs may be the file system.
fn write((place, line): (Arc<Place>, HangLine)) {
    let (done, is_done) = mpsc::channel();
    let write = move || {
        place.write(&line);
        let _ = done.send(());
    };
    if thread::Builder::new()
        .name("hang".into())
        .spawn(write)
        .is_ok()
    {
        let _ = is_done.recv_timeout(2 * PATIENCE);
    }
}

impl Place {
    fn line(&self, why: String, world: &Group) -> HangLine {
        let host = host_name();
        let pid = process::id();
        let others = self.processes.iter().enumerate();
        let others = others.filter(|(_, process)| process.host == host && process.pid != pid);
        let state = |pid| system::process_state(pid).unwrap_or_else(|| "has ended".into());
        let processes: BTreeMap<usize, ProcessState> = others
            .map(|(rank, process)| {
                let pid = process.pid;
                (
                    rank,
                    ProcessState {
                        pid,
                        state: state(pid),
                    },
                )
            })
            .collect();
        HangLine {
            start: self.start.clone(),
            time: now(),
            host,
            pid,
            why,
            report: world.report(),
            threads: system::own_threads(),
            processes,
        }
    }

    fn write(&self, line: &HangLine) {
        let is_first = !line.why.contains("was ended by rank");
        let path = self.path();
        match append(&path, line) {
            Ok(()) if is_first => tracing::error!(
                "what each rank did is in `{path}`: `megaburn hang {path}` compares them",
                path = path.display()
            ),
            Ok(()) => {}
            Err(error) => tracing::warn!("cannot write to `{}`: {error}", path.display()),
        }
    }

    /// The file: in the run's folder or, on a host that does not see it, in the system's folder of
    /// temporary files.
    fn path(&self) -> PathBuf {
        match Marker::read(&self.dir) {
            Ok(Some(marker)) if marker.run_id == self.run_id => self.dir.join(HANGS),
            _ => env::temp_dir().join(format!("megaburn-{}-{HANGS}", self.run_id)),
        }
    }
}

/// Appends a line. Ranks write one after the other, because a network file system does not append
/// atomically.
fn append(path: &Path, line: &HangLine) -> io::Result<()> {
    let mut file = File::options().create(true).append(true).open(path)?;
    let begin = Instant::now();
    while let Err(error) = file.try_lock() {
        match error {
            TryLockError::WouldBlock if begin.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(5));
            }
            // Better a line that may be mixed with another than none.
            TryLockError::WouldBlock => break,
            TryLockError::Error(_) => break,
        }
    }
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    file.write_all(text.as_bytes())?;
    file.sync_data()
}
