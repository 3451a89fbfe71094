//! `megaburn launch`: a program as several ranks on this host.

use std::{
    ffi::{OsStr, OsString},
    path::Path,
    process::ExitCode,
};

use clap::Args;
use megaburn_collective::launcher::{LaunchOptions, launch};
use megaburn_train::Exit;

use super::exit_code;

#[derive(Args)]
/// A program and how many ranks of it.
pub(super) struct LaunchArgs {
    /// Ranks on this host.
    #[arg(long, value_name = "N")]
    nproc: usize,
    /// Hosts, each with a launcher of its own.
    #[arg(long, value_name = "M", default_value_t = 1)]
    nnodes: usize,
    /// This host's number, from 0.
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: usize,
    /// Rank 0's host, needed with several hosts.
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,
    /// Rank 0's port, needed with several hosts.
    #[arg(long, value_name = "P")]
    master_port: Option<u16>,
    /// Ranks that have a GPU together: to try layouts of more ranks than there are GPUs, slowly.
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks_per_gpu: usize,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    pub(super) fn run(self) -> ExitCode {
        // Said once here, and not by each rank.
        if let Some(program) = self.command.first().filter(|program| !is_there(program)) {
            let program = program.display();
            eprintln!("error: cannot start `{program}`: there is no such program; check its path");
            return exit_code(NOT_FOUND);
        }
        let options = LaunchOptions::new(self.nproc, self.command)
            .with_nodes(self.nnodes, self.node_rank)
            .with_master(self.master_addr, self.master_port)
            .with_ranks_per_gpu(self.ranks_per_gpu);
        match launch(&options) {
            Ok(outcome) => exit_code(outcome.exit_code()),
            Err(error) => {
                eprintln!("error: {error}");
                Exit::BadInput.into()
            }
        }
    }
}

/// What a shell exits with where there is no program of a name.
const NOT_FOUND: i32 = 127;

/// Whether there is such a file, or, of a name without a folder, one in the folders of `PATH`.
fn is_there(program: &OsStr) -> bool {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return path.exists();
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(path).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_looked_for_as_a_shell_does() {
        assert!(is_there(OsStr::new("sh")) && is_there(OsStr::new("/bin/sh")));
        assert!(!is_there(OsStr::new("no-such-program")));
        assert!(!is_there(OsStr::new("./no-such-program")));
    }
}
