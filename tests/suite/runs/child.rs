//! Training runs as child processes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use megaburn::collective::free_port;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

/// The longest time that any child may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// How a child ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Processes of `megaburn`, killed when dropped.
pub(crate) struct Ranks {
    children: Vec<Child>,
    output: TempDir,
}

/// A `megaburn train` command.
fn pretrain(args: &[String]) -> Command {
    megaburn(&[&["train".to_string()], args].concat())
}

fn megaburn(args: &[String]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_megaburn-under-test"));
    command.args(args);
    alone(command)
}

/// Makes a command use one thread and hides any surrounding launcher from it.
fn alone(mut command: Command) -> Command {
    command.env("RAYON_NUM_THREADS", "1").stdin(Stdio::null());
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

impl Ranks {
    /// Starts `megaburn` with any subcommand.
    pub(crate) fn command(args: &[&str]) -> Self {
        let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
        Self::spawn(vec![megaburn(&args)])
    }

    /// Starts another program that has megaburn's commands.
    pub(crate) fn program(program: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(args);
        Self::spawn(vec![alone(command)])
    }

    /// Runs the lines of a script in the folder `dir`, up to the first that fails.
    pub(crate) fn shell(script: &str, dir: &Path) -> Self {
        let mut command = Command::new("sh");
        command.args(["-e", "-c", script]).current_dir(dir);
        Self::spawn(vec![alone(command)])
    }

    /// Starts one process whose ranks are all threads.
    pub(crate) fn threads(args: &[String]) -> Self {
        Self::spawn(vec![pretrain(args)])
    }

    /// Starts one process with these variables set.
    pub(crate) fn with_env(args: &[String], env: &[(&str, String)]) -> Self {
        let mut command = pretrain(args);
        command.envs(env.iter().map(|(name, value)| (name, value)));
        Self::spawn(vec![command])
    }

    /// Starts `megaburn train` as one process per rank, under a launcher's environment.
    pub(crate) fn processes(world_size: usize, args: &[String]) -> Self {
        Self::each_rank(world_size, &[&["train".to_string()], args].concat())
    }

    /// Starts `megaburn` with any subcommand as one process per rank.
    pub(crate) fn commands(world_size: usize, args: &[&str]) -> Self {
        let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
        Self::each_rank(world_size, &args)
    }

    fn each_rank(world_size: usize, args: &[String]) -> Self {
        Self::each_with(&vec![args.to_vec(); world_size])
    }

    /// Starts `megaburn train` as one process per rank, each with arguments of its own.
    pub(crate) fn different(args: &[Vec<String>]) -> Self {
        let train = |args: &Vec<String>| [&["train".to_string()], &args[..]].concat();
        Self::each_with(&args.iter().map(train).collect::<Vec<_>>())
    }

    /// Starts `megaburn train` as one process per rank, on hosts of these names.
    pub(crate) fn on_hosts(hosts: &[&str], args: &[String]) -> Self {
        let args = [&["train".to_string()], args].concat();
        let env = |host: &&str| vec![("MEGABURN_HOST", host.to_string())];
        let env: Vec<_> = hosts.iter().map(env).collect();
        Self::each_in(&vec![args; hosts.len()], &env)
    }

    fn each_with(args: &[Vec<String>]) -> Self {
        Self::each_in(args, &vec![Vec::new(); args.len()])
    }

    /// Starts `megaburn` as one process per rank, each with arguments and variables of its own.
    fn each_in(args: &[Vec<String>], env: &[Vec<(&str, String)>]) -> Self {
        let port = free_port().unwrap().to_string();
        let world_size = args.len();
        let rank = |rank: usize| {
            let mut command = megaburn(&args[rank]);
            command
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", world_size.to_string());
            command
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port);
            command.env("MEGABURN_JOB_TOKEN", "of this test");
            command.envs(env[rank].iter().map(|(name, value)| (name, value)));
            command
        };
        Self::spawn((0..world_size).map(rank).collect())
    }

    fn spawn(commands: Vec<Command>) -> Self {
        let output = tempfile::tempdir().unwrap();
        let mut ranks = Self {
            children: Vec::new(),
            output,
        };
        for (rank, mut command) in commands.into_iter().enumerate() {
            let file = |stream| fs::File::create(ranks.output_path(rank, stream)).unwrap();
            command.stdout(file("stdout")).stderr(file("stderr"));
            ranks.children.push(command.spawn().unwrap());
        }
        ranks
    }

    fn output_path(&self, rank: usize, stream: &str) -> PathBuf {
        self.output.path().join(format!("{rank}.{stream}"))
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill(Pid::from_raw(self.children[rank].id() as i32), signal).unwrap();
    }

    /// Kills every process, as simultaneously as possible.
    pub(crate) fn kill_all(&mut self) {
        for child in &mut self.children {
            // A process that has already ended cannot be killed.
            let _ = child.kill();
        }
        for child in &mut self.children {
            child.wait().unwrap();
        }
    }

    /// Waits until a condition holds, while all processes run.
    pub(crate) fn wait_until(&mut self, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so() {
            for rank in 0..self.children.len() {
                if let Some(status) = self.children[rank].try_wait().unwrap() {
                    panic!("rank {rank} ended early: {:?}", self.ended(rank, status));
                }
            }
            assert!(
                Instant::now() < deadline,
                "nothing happened in {PATIENCE:?}"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end of rank `rank`, which must come by `deadline`.
    pub(crate) fn wait(&mut self, rank: usize, deadline: Instant) -> Ended {
        loop {
            if let Some(status) = self.children[rank].try_wait().unwrap() {
                return self.ended(rank, status);
            }
            assert!(Instant::now() < deadline, "rank {rank} did not end in time");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end of each process.
    pub(crate) fn wait_all(&mut self) -> Vec<Ended> {
        let deadline = Instant::now() + PATIENCE;
        (0..self.children.len())
            .map(|rank| self.wait(rank, deadline))
            .collect()
    }

    /// Waits for the end of each process; all must succeed.
    pub(crate) fn finish(&mut self) -> Vec<Ended> {
        let ended = self.wait_all();
        assert!(
            ended.iter().all(|ended| ended.code == Some(0)),
            "{ended:#?}"
        );
        ended
    }

    fn ended(&self, rank: usize, status: ExitStatus) -> Ended {
        let read = |stream| {
            String::from_utf8_lossy(&fs::read(self.output_path(rank, stream)).unwrap()).into_owned()
        };
        Ended {
            code: status.code(),
            stdout: read("stdout"),
            stderr: read("stderr"),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill_all();
    }
}
