//! A launcher and its output, observed from outside.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A running launcher.
pub(crate) struct Run {
    launcher: Child,
    nproc: usize,
    out: Receiver<String>,
    err: Receiver<String>,
    seen: Vec<String>,
}

/// How a launcher ended, and its output.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) code: Option<i32>,
    pub(crate) out: Vec<String>,
    pub(crate) err: Vec<String>,
}

impl Run {
    /// Launches this program as ranks through `launch-child`.
    pub(crate) fn ranks(nproc: usize, mode: &[&str]) -> Self {
        let this = std::env::current_exe().unwrap();
        let command = [&[this.to_str().unwrap(), "rank"], mode].concat();
        Self::launch(nproc, &command, &[])
    }

    /// As [`Self::ranks`], with a debugger that only says its arguments, and the folder into which its
    /// words are written.
    pub(crate) fn with_debugger(nproc: usize, mode: &[&str]) -> (Self, PathBuf) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stacks");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let debugger = folder.join("eu-stack");
        fs::write(&debugger, "#!/bin/sh\necho calls of \"$@\"\n").unwrap();
        fs::set_permissions(&debugger, fs::Permissions::from_mode(0o755)).unwrap();
        let this = std::env::current_exe().unwrap();
        let command = [&[this.to_str().unwrap(), "rank"], mode].concat();
        let text = folder.to_str().unwrap();
        let path = format!("{text}:{}", std::env::var("PATH").unwrap_or_default());
        let env = [("TEST_STACKS", text), ("PATH", &path)];
        (Self::launch(nproc, &command, &env), folder)
    }

    /// Launches this program as ranks without `launch-child`: they tie themselves to the launcher.
    pub(crate) fn of_itself(nproc: usize, mode: &[&str]) -> Self {
        Self::launch(nproc, &[&["rank"], mode].concat(), &[("TEST_SELF", "1")])
    }

    /// Launches any command.
    pub(crate) fn launch(nproc: usize, command: &[&str], env: &[(&str, &str)]) -> Self {
        // Under `nohup` a launcher rightly ignores SIGHUP, but these tests send it.
        let mut launcher = Command::new("env")
            .arg("--default-signal=HUP")
            .arg(std::env::current_exe().unwrap())
            .args(["launch", &nproc.to_string()])
            .args(command)
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = lines(launcher.stdout.take().unwrap());
        let err = lines(launcher.stderr.take().unwrap());
        Self {
            launcher,
            nproc,
            out,
            err,
            seen: Vec::new(),
        }
    }

    /// The ranks' process ids, by rank; each rank prints its id first.
    pub(crate) fn pids(&mut self) -> Vec<i32> {
        let mut pids = vec![None; self.nproc];
        while pids.contains(&None) {
            let Ok(line) = self.out.recv_timeout(Duration::from_secs(30)) else {
                let err: Vec<_> = self.err.try_iter().collect();
                panic!("the ranks did not come: {:?}, {err:?}", self.seen);
            };
            let (rank, said) = match line.strip_prefix("[rank ") {
                Some(rest) => rest.split_once("] ").unwrap(),
                None => ("0", line.as_str()),
            };
            if let Some(pid) = said.strip_prefix("pid ") {
                let rank = rank.parse::<usize>().unwrap();
                // The launcher of another host than the first has other numbers.
                pids[rank % self.nproc] = Some(pid.parse().unwrap());
            }
            self.seen.push(line);
        }
        pids.into_iter().map(Option::unwrap).collect()
    }

    /// Waits until the launcher has written a line with this text to standard error.
    pub(crate) fn await_line(&mut self, text: &str) {
        let mut said = Vec::new();
        while !said.last().is_some_and(|line: &String| line.contains(text)) {
            let Ok(line) = self.err.recv_timeout(Duration::from_secs(30)) else {
                panic!("no line with {text:?}: {said:?}");
            };
            said.push(line);
        }
    }

    /// Sends a signal to the launcher.
    pub(crate) fn signal(&self, number: Signal) {
        signal(self.launcher.id().cast_signed(), number);
    }

    /// Waits for the launcher to end; panics after `limit`.
    pub(crate) fn end(mut self, limit: Duration) -> End {
        let until = Instant::now() + limit;
        let status = loop {
            match self.launcher.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > until => {
                    let said: Vec<_> = self.err.try_iter().collect();
                    panic!("the launcher hangs after {limit:?}: {said:?}");
                }
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut out = std::mem::take(&mut self.seen);
        out.extend(self.out.iter());
        let err = self.err.iter().collect();
        End {
            code: status.code(),
            out,
            err,
        }
    }
}

impl Drop for Run {
    /// Also after a failed test, no rank survives: the ranks die with their launcher.
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

fn lines(from: impl Read + Send + 'static) -> Receiver<String> {
    let (line, lines) = channel();
    thread::spawn(move || {
        BufReader::new(from)
            .lines()
            .map_while(Result::ok)
            .try_for_each(|said| line.send(said))
    });
    lines
}

/// Sends a signal to one process.
pub(crate) fn signal(pid: i32, number: Signal) {
    kill(Pid::from_raw(pid), number).unwrap();
}

/// Panics unless all processes end within 5 s. A process that ended but was not yet waited for by
/// its new parent counts as ended.
pub(crate) fn assert_gone(pids: &[i32]) {
    let until = Instant::now() + Duration::from_secs(5);
    for &pid in pids {
        while alive(pid) {
            assert!(
                Instant::now() < until,
                "process {pid} of {pids:?} was left behind"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn alive(pid: i32) -> bool {
    state(pid).is_some_and(|state| !['Z', 'X'].contains(&state))
}

/// The letter with which Linux shows the state of a process.
pub(crate) fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state follows the name, which is in parentheses and may contain anything.
    stat.rsplit_once(") ")?.1.chars().next()
}
