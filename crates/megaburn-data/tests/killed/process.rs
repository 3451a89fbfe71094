//! Processes that are killed. Each is this program, which runs one of its tests with a folder.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// The folder in which a process of these tests works.
const FOLDER: &str = "MEGABURN_KILLED_FOLDER";
/// The number of cases.
const CASES: &str = "MEGABURN_KILL_CASES";
const FEW_CASES: usize = 3;

/// The number of cases of a test.
pub(crate) fn num_cases() -> usize {
    env::var(CASES).map_or(FEW_CASES, |cases| cases.parse().unwrap())
}

/// The folder of this process, if it is one that others kill.
pub(crate) fn folder() -> Option<PathBuf> {
    env::var_os(FOLDER).map(PathBuf::from)
}

/// Random words in lines.
pub(crate) fn words(draw: &mut fastrand::Rng, num_bytes: usize) -> Vec<String> {
    let words: Vec<String> = (0..1000)
        .map(|_| (0..draw.usize(1..9)).map(|_| draw.lowercase()).collect())
        .collect();
    let mut lines = Vec::new();
    let mut size = 0;
    while size < num_bytes {
        let line = (0..draw.usize(0..2000)).map(|_| words[draw.usize(..words.len())].as_str());
        let line = line.collect::<Vec<_>>().join(" ");
        size += line.len() + 1;
        lines.push(line);
    }
    lines
}

/// All files below a folder, with their contents.
pub(crate) fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let (mut files, mut open) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let content = fs::read(&path).unwrap();
            files.push((path.strip_prefix(folder).unwrap().into(), content));
        }
    }
    files.sort();
    files
}

/// Starts the test `job` in a folder.
pub(crate) fn start(job: &str, folder: &Path) -> Child {
    spawn(Command::new(env::current_exe().unwrap()), job, folder)
}

/// Starts a job that cannot write files of more than a number of blocks of 512 bytes, as on a disk
/// that becomes full. Returns what was printed.
pub(crate) fn limited(job: &str, folder: &Path, num_blocks: usize) -> String {
    let mut shell = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -f {num_blocks}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script]).arg(env::current_exe().unwrap());
    let ended = spawn(shell, job, folder).wait_with_output().unwrap();
    String::from_utf8(ended.stdout).unwrap()
}

fn spawn(mut command: Command, job: &str, folder: &Path) -> Child {
    command
        .args(["--exact", job, "--nocapture"])
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until a process ends by itself. Returns what was printed.
pub(crate) fn end(process: Child) -> String {
    let ended = process.wait_with_output().unwrap();
    let shown = String::from_utf8(ended.stdout).unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{shown}\n{errors}");
    assert!(shown.contains("written "), "{shown}");
    shown
}

/// Runs a job to its end. Returns what was printed.
pub(crate) fn finish(job: &str, folder: &Path) -> String {
    end(start(job, folder))
}

/// Kills a process after a number of events and some time. Returns whether it was still running.
pub(crate) fn kill(mut process: Child, num_events: usize, time: Duration) -> bool {
    let shown = BufReader::new(process.stdout.take().unwrap());
    let events = shown
        .lines()
        .filter(|line| line.as_ref().unwrap().contains("event"));
    events.take(num_events).for_each(drop);
    let moment = Instant::now() + time;
    while Instant::now() < moment {
        std::hint::spin_loop();
    }
    process.kill().unwrap();
    !process.wait().unwrap().success()
}
