//! Starts, signals and waits for the process of one rank.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
};

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::{Pid, getppid},
};

use crate::{
    gpus, guard, in_place, job::Job, launched::Launch, options::LaunchOptions, output::complain,
};
use megaburn_collective::JobToken;

/// Exit codes for a command that cannot be started; shells use the same ones.
pub(crate) const EXIT_CANNOT_START: i32 = 126;
pub(crate) const EXIT_NOT_FOUND: i32 = 127;
/// The environment variable in which a rank finds its launcher's process id.
pub(crate) const LAUNCHER: &str = "MEGABURN_LAUNCHER";

/// Starts local rank `local_rank` as the leader of its own process group, so that everything it
/// starts can be killed with it. `connection` is its standard input, on which it hears from the
/// launcher.
pub(crate) fn start(
    options: &LaunchOptions,
    local_rank: usize,
    attempt: usize,
    job: &Job,
    connection: Option<Stdio>,
) -> io::Result<Child> {
    let LaunchOptions {
        nproc,
        nnodes,
        node_rank,
        ..
    } = options;
    let (program, arguments) = options
        .command
        .split_first()
        .expect("the options were validated");
    let launcher = std::process::id().to_string();
    let mut command = match &options.entry {
        Some(entry) => {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(entry).arg(&launcher).args(&options.command);
            command
        }
        None => {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        }
    };
    command
        .env(LAUNCHER, launcher)
        .env("RANK", (node_rank * nproc + local_rank).to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        .env("WORLD_SIZE", (nproc * nnodes).to_string())
        .env("LOCAL_WORLD_SIZE", nproc.to_string())
        .env("GROUP_RANK", node_rank.to_string())
        .env("MASTER_ADDR", &job.addr)
        .env("MASTER_PORT", job.port.to_string())
        .envs(job.launch.iter().flat_map(Launch::variables))
        .env(Launch::ATTEMPT, attempt.to_string())
        // A launcher that is a rank of another one has that one's.
        .env_remove(Launch::CAUSE)
        .envs(job.cause.iter().map(|cause| (Launch::CAUSE, cause)))
        .env(Launch::WORLD_SIZES, numbers(&job.world_sizes))
        .env(
            "TORCHELASTIC_MAX_RESTARTS",
            options.restart.restarts.to_string(),
        )
        .envs(
            job.token
                .as_ref()
                .map(|token| (JobToken::VARIABLE, token.text())),
        )
        .envs(gpus::of_rank(options, local_rank, |name| {
            std::env::var(name).ok()
        }))
        // A rank that starts another launcher does not pass on its own connection.
        .env_remove(in_place::VARIABLE)
        .envs(connection.iter().map(|_| (in_place::VARIABLE, "stdin")))
        .stdin(connection.unwrap_or_else(Stdio::null))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
}

/// The numbers with commas between them.
fn numbers(numbers: &[usize]) -> String {
    let numbers: Vec<_> = numbers.iter().map(usize::to_string).collect();
    numbers.join(",")
}

/// Waits until a child has ended and leaves it as a zombie, so that its process id and process
/// group id are not reused yet. Returns whether a signal killed it.
pub(crate) fn await_end(pid: Pid) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    loop {
        match waitid(Id::Pid(pid), flags) {
            Err(Errno::EINTR) => {}
            // Any other error means that there is no such child.
            status => return matches!(status, Ok(WaitStatus::Signaled(..))),
        }
    }
}

/// Whether a child runs. If it has ended, it stays to be waited for.
pub(crate) fn runs(pid: Pid) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    matches!(waitid(Id::Pid(pid), flags), Ok(WaitStatus::StillAlive))
}

/// Sends a signal to a rank and to everything it started that is still alive.
pub(crate) fn signal(pid: Pid, signal: Signal) {
    let _ = killpg(pid, signal);
}

/// Whether a process of the group still runs, as far as `/proc` shows. Zombies do not count as
/// running.
pub(crate) fn group_runs(group: Pid) -> bool {
    group_members(group).next().is_some()
}

/// The processes of the group that still run.
pub(crate) fn group_members(group: Pid) -> impl Iterator<Item = Pid> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_member = move |process: &fs::DirEntry| {
        let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        // The fields after the name (which may contain anything) are: state, parent, group.
        let Some((_, rest)) = stat.rsplit_once(") ") else {
            return false;
        };
        let mut fields = rest.split(' ');
        let runs = !fields
            .next()
            .is_some_and(|state| ["Z", "X"].contains(&state));
        runs && fields.nth(1).and_then(|of| of.parse().ok()) == Some(group.as_raw())
    };
    let pid = |process: fs::DirEntry| process.file_name().to_str()?.parse().ok();
    processes
        .filter(is_member)
        .filter_map(pid)
        .map(Pid::from_raw)
}

/// Implements the entry point that [`super::LaunchOptions::entry`] names: ties this process to the
/// launcher's life and then becomes the command. `args` are the arguments after the entry. Returns
/// an exit code if that fails.
///
/// The kernel kills a rank when its launcher dies, even by SIGKILL. The processes that a rank
/// starts (e.g. the commands of a shell script) are killed by the launcher's guard, which is this
/// function with another first argument.
pub fn launch_child(args: impl IntoIterator<Item = OsString>) -> i32 {
    let mut args = args.into_iter();
    let first = args.next();
    if first.as_ref().is_some_and(|first| first == guard::GUARD) {
        return guard::run(io::stdin().lock()).map_or(EXIT_CANNOT_START, |()| 0);
    }
    let launcher = first.and_then(|pid| pid.to_str()?.parse().ok());
    let (Some(launcher), Some(command)) = (launcher, args.next()) else {
        complain("launch-child is internal: use `megaburn launch`");
        return EXIT_CANNOT_START;
    };
    if let Err(error) = tie_to(Pid::from_raw(launcher)) {
        complain(&error.to_string());
        return EXIT_CANNOT_START;
    }
    let error = Command::new(&command).args(args).exec();
    complain(&format!("cannot start {}: {error}", command.display()));
    if error.kind() == io::ErrorKind::NotFound {
        EXIT_NOT_FOUND
    } else {
        EXIT_CANNOT_START
    }
}

/// Has the kernel kill this process when the launcher that started it dies. Programs that start
/// themselves as ranks ([`LaunchOptions::this_program`]) must call it before anything else. It does
/// nothing if the parent is not a megaburn launcher.
///
/// # Errors
/// The launcher is already gone, or the kernel refuses.
pub fn tie_to_launcher() -> io::Result<()> {
    let launcher = std::env::var(LAUNCHER)
        .ok()
        .and_then(|pid| pid.parse().ok());
    match launcher.map(Pid::from_raw) {
        // Processes that a rank starts inherit the variable, but must not be tied to the launcher.
        Some(launcher) if getppid() == launcher || kill(launcher, None).is_err() => {
            tie_to(launcher)
        }
        _ => Ok(()),
    }
}

fn tie_to(launcher: Pid) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(|error| {
        io::Error::other(format!("cannot tie this rank to its launcher: {error}"))
    })?;
    // The launcher may have died before the call above.
    if getppid() != launcher {
        return Err(io::Error::other("the launcher has exited"));
    }
    Ok(())
}
