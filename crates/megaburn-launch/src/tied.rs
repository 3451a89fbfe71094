//! Programs that this one starts, and that end with it.

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::child::LAUNCHER;

/// A program that calls [`tie_to_launcher`](crate::tie_to_launcher), such as `megaburn train`. The
/// kernel kills it when the thread that started it ends, even by SIGKILL; its own ranks die with it.
#[derive(Debug)]
pub struct TiedChild(Child);

impl TiedChild {
    /// This program, by the name that it was called by, since its behavior may depend on it.
    pub fn this_program() -> Command {
        Command::new(std::env::args_os().next().unwrap_or_default())
    }

    /// Starts a program in a process group of its own, so that a Ctrl-C reaches it only through
    /// [`ask_to_stop`](Self::ask_to_stop). The calling thread must live as long as the program.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(mut command: Command) -> io::Result<Self> {
        command.env(LAUNCHER, std::process::id().to_string());
        command.process_group(0).spawn().map(Self)
    }

    /// Sends SIGTERM, on which a run saves and stops.
    pub fn ask_to_stop(&self) {
        // A process that has ended, but was not waited for, keeps its number.
        let pid = i32::try_from(self.0.id()).map(Pid::from_raw);
        let _ = pid.map(|pid| kill(pid, Signal::SIGTERM));
    }

    /// Ends it at once, and waits until it has ended. A run does not save.
    ///
    /// # Errors
    /// The system refuses.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.0.kill()?;
        self.0.wait()
    }

    /// How it ended; `None` while it runs.
    ///
    /// # Errors
    /// The system cannot say.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.0.try_wait()
    }
}
