//! Checkpoints in a folder of each host: kills, failing file operations, and lost folders.

use std::{collections::BTreeSet, ffi::OsString, fs, process::Command};

use nix::errno::Errno;

use crate::{
    case::{Case, STEPS, world_size},
    check,
    job::{PATIENCE, binary, megaburn},
    shim::FileFault,
};

/// Ranks as processes that are spread over hosts.
struct Cluster<'a> {
    case: &'a Case,
    layout: &'static str,
    num_hosts: usize,
    replicas: usize,
}

impl<'a> Cluster<'a> {
    fn new(case: &'a Case, replicas: usize) -> Self {
        Self::with_layout(case, replicas, |layout| world_size(layout) > 1)
    }

    /// Ranks of which each writes parts of what others read, without copies: every start from a
    /// checkpoint fetches chunks.
    fn that_fetches(case: &'a Case) -> Self {
        let shares = |layout: &str| world_size(layout) > 1 && !layout.contains("pp");
        Self::with_layout(case, 0, shares)
    }

    fn with_layout(case: &'a Case, replicas: usize, fits: impl Fn(&str) -> bool) -> Self {
        let layout = loop {
            let layout = case.any_layout();
            if fits(layout) {
                break layout;
            }
        };
        let num_hosts = case.one_of(&[2, world_size(layout)]);
        Self {
            case,
            layout,
            num_hosts,
            replicas,
        }
    }

    fn train(&self) -> Command {
        let dir = self.case.path("local/{host}");
        let sets = [
            format!("train.local_checkpoint_dir={}", dir.display()),
            format!("train.checkpoint_replicas={}", self.replicas),
            "train.checkpoint_interval=1".to_string(),
        ];
        let sets: Vec<_> = sets.iter().map(String::as_str).collect();
        let num_ranks = world_size(self.layout);
        let num_hosts = self.num_hosts;
        let on_host = format!("MEGABURN_HOST=h$((RANK * {num_hosts} / {num_ranks})) exec \"$@\"");
        let launch = ["launch", "--nproc", &num_ranks.to_string(), "--"].map(String::from);
        let shell = ["sh", "-c", &on_host, "sh"].map(String::from);
        let program = [binary().display().to_string()];
        let args = self.case.train_args(self.layout, STEPS, &sets);
        megaburn(launch.into_iter().chain(shell).chain(program).chain(args))
    }

    /// Trains until a process dies at one of its first operations on a file of fetched chunks.
    fn train_until_killed_in_fetch(&self) -> Result<(), String> {
        let case = self.case;
        let mut command = self.train();
        kill(case).add(&mut command, case, 1 + case.below(4), None);
        let hit = case.path("hit");
        command
            .env("FILE_FAULT_FOLDER", case.path("local"))
            .env("FILE_FAULT_NAME", ".fetched")
            .env("FILE_FAULT_HIT", &hit);
        case.wait_moving(&mut case.start(command))?;
        match hit.exists() {
            true => Ok(()),
            false => Err("no process died while it fetched chunks".to_string()),
        }
    }

    /// Whether some checkpoint is complete on all hosts.
    fn has_checkpoint(&self) -> bool {
        let mut common: Option<BTreeSet<OsString>> = None;
        for host in 0..self.num_hosts {
            let folder = self.case.path(&format!("local/h{host}"));
            let names = fs::read_dir(folder).into_iter().flatten().flatten();
            let names = names.map(|entry| entry.file_name());
            let complete = names.filter(|name| {
                let name = name.to_string_lossy();
                name.starts_with("step-") && !name.contains('.')
            });
            let here: BTreeSet<_> = complete.collect();
            common = Some(match common {
                Some(before) => before.intersection(&here).cloned().collect(),
                None => here,
            });
        }
        common.is_some_and(|common| !common.is_empty())
    }

    /// Trains until a fault at some operation in the folders of the hosts or of the run.
    fn train_until(&self, fault: FileFault, codes: Option<&[i32]>) -> Result<(), String> {
        let case = self.case;
        let mut command = self.train();
        let rank = case.below(world_size(self.layout) as u64) as usize;
        fault.add(&mut command, case, 1 + case.below(200), Some(rank));
        let folder = case.one_of(&["local", "local", "run"]);
        command.env("FILE_FAULT_FOLDER", case.path(folder));
        let ended = case.wait_moving(&mut case.start(command))?;
        match codes {
            Some(codes) => ended.expect(codes).map(drop),
            None => Ok(()),
        }
    }

    /// The same training without a fault must finish with the numbers of an uninterrupted run.
    fn recover(&self) -> Result<(), String> {
        let ended = self.case.start(self.train()).wait(PATIENCE)?;
        ended.expect(&[0])?;
        let found = check::numbers(&self.case.run())?;
        check::same_numbers(&found, &Case::reference(self.layout)?, STEPS, check::SAME)?;
        for host in 0..self.num_hosts {
            check::no_leftovers_in(&self.case.path(&format!("local/h{host}")))?;
        }
        self.case.check_nothing_left()
    }
}

fn kill(case: &Case) -> FileFault {
    FileFault::Kill(case.one_of(&["before", "after", "torn"]))
}

/// A process dies before, in or after one file operation, with and without copies.
pub(super) fn killed(case: &Case) -> Result<(), String> {
    let cluster = Cluster::new(case, case.one_of(&[0, 1, 2]));
    cluster.train_until(kill(case), None)?;
    cluster.recover()
}

/// A process dies, and another one while the next start fetches what its hosts lack.
pub(super) fn killed_again(case: &Case) -> Result<(), String> {
    let cluster = Cluster::that_fetches(case);
    while !cluster.has_checkpoint() {
        cluster.train_until(kill(case), None)?;
    }
    cluster.train_until_killed_in_fetch()?;
    cluster.recover()
}

/// One file operation fails on one host.
pub(super) fn fails(case: &Case) -> Result<(), String> {
    let cluster = Cluster::new(case, case.one_of(&[0, 1, 2]));
    let errno = case.one_of(&[Errno::EIO, Errno::ENOSPC, Errno::EDQUOT, Errno::EACCES]);
    cluster.train_until(FileFault::Fails(errno as i32), Some(&[0, 1, 2]))?;
    cluster.recover()
}

/// A process dies at a file operation, and then a host has lost its folder.
pub(super) fn lost(case: &Case) -> Result<(), String> {
    let cluster = Cluster::new(case, 1);
    cluster.train_until(kill(case), None)?;
    let host = case.below(cluster.num_hosts as u64);
    // The kill may have come before there was a folder.
    let _ = fs::remove_dir_all(case.path(&format!("local/h{host}")));
    cluster.recover()
}
