//! Kills the ranks' processes when the launcher dies before it can do so itself.
//!
//! The kernel kills a rank's own process together with the launcher ([`super::child`]), but not the
//! processes that it started: a shell dies, and the program that it was waiting for lives on. The
//! launcher therefore has a guard: a separate process that reads the list of process groups from a
//! pipe. When the pipe closes, for whatever reason, the guard kills the groups that are left.

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

/// The first argument that makes [`super::launch_child`] run as a guard.
pub(crate) const GUARD: &str = "--guard";

/// The launcher's handle of its guard process.
#[derive(Debug)]
pub(crate) struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Starts another process of this program, with the arguments of `entry`, as the guard.
    pub(crate) fn start(entry: &[OsString]) -> io::Result<Self> {
        // The guard gets its own process group, so that signals to the launcher's group miss it.
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

    /// Adds the process group of a new rank.
    pub(crate) fn add(&mut self, group: Pid) {
        self.say('+', group);
    }

    /// Removes the process group of a rank that has ended, since its id may be reused.
    pub(crate) fn remove(&mut self, group: Pid) {
        self.say('-', group);
    }

    fn say(&mut self, what: char, group: Pid) {
        if let Some(pipe) = &mut self.pipe {
            // A guard that was killed protects nothing more; the kernel still ties the ranks
            // themselves.
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

/// Runs the guard: reads `pipe` to its end and kills the groups that are left.
pub(crate) fn run(pipe: impl BufRead) -> io::Result<()> {
    // A signal that is sent to all processes at once must not stop the guard before the launcher.
    for signal in stop_signals() {
        flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    for group in left_over(pipe) {
        // Killing a group that has ended in the meantime fails, which is fine.
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
            // Groups 0 and 1 would address the guard's own group and all processes.
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
