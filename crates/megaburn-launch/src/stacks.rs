//! The stacks of a rank that does not answer, as a debugger shows them.

use std::{
    env,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::unistd::Pid;

use crate::{child::group_members, output::complain};

/// The longest that a debugger may take for a rank. The process stands still meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the launcher looks whether it has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Writes the stacks of a rank into a file, and says where it is.
pub(crate) fn write(rank: usize, group: Pid, folder: Option<&Path>) {
    let path = match folder {
        Some(folder) => folder.join(format!("rank-{rank}.stacks")),
        None => env::temp_dir().join(format!("megaburn-{group}-rank-{rank}.stacks")),
    };
    let said = match write_to(&path, group) {
        Ok(()) => format!("what its threads call is in `{}`", path.display()),
        Err(why) => format!("what its threads call is not known: {why}"),
    };
    complain(&format!(
        "megaburn launch: rank {rank} does not answer; {said}"
    ));
}

fn write_to(path: &PathBuf, group: Pid) -> Result<(), String> {
    let cannot = |error: io::Error| format!("cannot write `{}`: {error}", path.display());
    let mut file = OpenOptions::new().create(true).append(true).open(path);
    let file = file
        .as_mut()
        .map_err(|error| format!("cannot open `{}`: {error}", path.display()))?;
    for pid in group_members(group) {
        writeln!(file, "process {pid}:").map_err(cannot)?;
        run_debugger(pid, file)?;
    }
    Ok(())
}

/// Lets the first debugger that is installed write the stacks of a process.
fn run_debugger(pid: Pid, to: &File) -> Result<(), String> {
    let number = pid.to_string();
    let of_gdb = "thread apply all backtrace 40";
    let debuggers: [(&str, &[&str]); 2] = [
        ("eu-stack", &["-p", &number]),
        ("gdb", &["-p", &number, "-batch", "-nx", "-ex", of_gdb]),
    ];
    for (debugger, args) in debuggers {
        match run(Command::new(debugger).args(args), to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            ended => return ended.map_err(|error| format!("{debugger}: {error}")),
        }
    }
    Err("neither `eu-stack` (elfutils) nor `gdb` is installed".into())
}

fn run(command: &mut Command, to: &File) -> io::Result<()> {
    let command = command.stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdout(to.try_clone()?).spawn()?;
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if child.try_wait()?.is_some() {
            return Ok(());
        }
        thread::sleep(LOOK);
    }
    // The kernel lets the process continue.
    child.kill()?;
    child.wait()?;
    Err(io::Error::other(format!(
        "it did not end within {PATIENCE:?}"
    )))
}
