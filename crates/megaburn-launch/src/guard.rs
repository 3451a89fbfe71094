//! What ends the ranks' processes when the launcher dies without a chance to do it itself.
//!
//! The kernel kills a rank's own process with the launcher ([`super::child`]), but not what that
//! process started: a shell dies, and the program that it waits for lives on. So the launcher has a
//! guard, a process beside it that reads from a pipe which process groups there are. When the pipe
//! ends, however that came about, the guard kills the groups that are left.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    io::{self, BufRead, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, atomic::AtomicBool},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use signal_hook::flag;

use crate::signals::stop_signals;

/// What [`super::launch_child`] is called with to become a guard.
pub(crate) const GUARD: &str = "--guard";

/// The launcher's end of a guard.
#[derive(Debug)]
pub(crate) struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Starts this program once more, called as `entry` says, as the guard.
    pub(crate) fn start(entry: &[OsString]) -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(entry)
            .arg(GUARD)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let pipe = process.stdin.take();
        Ok(Self { process, pipe })
    }

    /// The process group of a rank was made.
    pub(crate) fn add(&mut self, group: Pid) {
        self.say('+', group);
    }

    /// The process group of a rank has ended; its number may soon be another's.
    pub(crate) fn remove(&mut self, group: Pid) {
        self.say('-', group);
    }

    fn say(&mut self, what: char, group: Pid) {
        if let Some(pipe) = &mut self.pipe {
            // A guard that was killed guards nothing; the ranks are still tied by the kernel.
            let _ = writeln!(pipe, "{what}{group}");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pipe = None;
        let _ = self.process.wait();
    }
}

/// Does a guard's work: reads from `pipe` to its end and kills the groups that are left.
pub(crate) fn run(pipe: impl BufRead) -> io::Result<()> {
    // Who stops everything at once must not stop the guard before the launcher.
    for signal in stop_signals() {
        flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    for group in left_over(pipe) {
        // A group that has ended meanwhile cannot be killed.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    Ok(())
}

/// The groups that were added and not removed.
fn left_over(pipe: impl BufRead) -> BTreeSet<i32> {
    let mut groups = BTreeSet::new();
    for line in pipe.lines().map_while(Result::ok) {
        let group = line.get(1..).and_then(|group| group.parse::<i32>().ok());
        match (line.as_bytes().first(), group) {
            // 0 and 1 would mean the guard's own group and all processes.
            (Some(b'+'), Some(group)) if group > 1 => drop(groups.insert(group)),
            (Some(b'-'), Some(group)) => drop(groups.remove(&group)),
            _ => {}
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_that_are_left_are_killed() {
        let said = b"+7\n+9\n-7\n+0\n+1\n+x\n\n+12\n-9";
        assert_eq!(left_over(&said[..]), BTreeSet::from([12]));
        assert!(left_over(&b""[..]).is_empty());
    }
}
