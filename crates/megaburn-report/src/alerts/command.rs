//! Passes an alert to a command.

use std::{
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

/// How long a command may take.
const LIMIT: Duration = Duration::from_secs(10);
/// The pause between two looks at a command that runs.
const TICK: Duration = Duration::from_millis(20);
/// How long the last words of a command that has ended are waited for.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// What is read of a command's standard error.
const LONGEST: u64 = 8 << 10;

/// Variables of a rank that a program must not take for its own.
const OF_RANKS: [&str; 9] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MEGABURN_JOB_TOKEN",
    "MEGABURN_LAUNCHER",
];

/// Runs a command of the shell with `input` as its standard input, for at most ten seconds.
///
/// # Errors
/// Why it did not succeed. One that takes too long is killed, with the processes that it started.
pub(super) fn run(command: &str, input: &str) -> Result<(), String> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).process_group(0);
    shell
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    for name in OF_RANKS {
        shell.env_remove(name);
    }
    let mut child = shell.spawn().map_err(|error| error.to_string())?;
    let said = last_words(&mut child);
    if let Some(mut stdin) = child.stdin.take() {
        // An alert fits into the pipe, and a command may leave it unread.
        let _ = writeln!(stdin, "{input}");
    }
    match end_of(&mut child, LIMIT).map_err(|error| error.to_string())? {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let said = said.recv_timeout(LAST_WORDS).unwrap_or_default();
            let last = said.trim_end().lines().next_back().unwrap_or_default();
            let last = match last {
                "" => String::new(),
                last => format!(": {last}"),
            };
            Err(format!("{status}{last}"))
        }
        None => {
            let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
            let _ = child.wait();
            Err(format!("it was killed after {} s", LIMIT.as_secs()))
        }
    }
}

/// Waits for a process; `None` if it takes longer than `limit`.
fn end_of(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let until = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        thread::sleep(TICK);
    }
}

/// Reads what a command writes to standard error, on a thread of its own, because a process that it
/// started may keep it open.
fn last_words(child: &mut Child) -> Receiver<String> {
    let (said, hears) = channel();
    if let Some(stderr) = child.stderr.take() {
        let read = move || {
            let mut bytes = Vec::new();
            let _ = stderr.take(LONGEST).read_to_end(&mut bytes);
            let _ = said.send(String::from_utf8_lossy(&bytes).into_owned());
        };
        // Without a thread there are no last words.
        let _ = thread::Builder::new().name("alert".into()).spawn(read);
    }
    hears
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_reads_the_alert_and_no_variables_of_ranks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("alert");
        let shown = path.display();
        run(
            &format!("cat > {shown}; echo \"rank=$RANK\" >> {shown}"),
            "{}",
        )
        .unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{}\nrank=\n");
        run("exec true", "unread").unwrap();
    }

    #[test]
    fn why_a_command_failed_is_said_with_its_last_line() {
        let why = run("echo one >&2; echo two >&2; exit 3", "{}").unwrap_err();
        assert_eq!(why, "exit status: 3: two");
        let why = run("/no/such/program", "{}").unwrap_err();
        assert!(why.starts_with("exit status: 127: "), "{why}");
    }

    #[test]
    fn a_command_that_hangs_is_noticed() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(end_of(&mut child, Duration::from_millis(50)).unwrap(), None);
        child.kill().unwrap();
        assert!(end_of(&mut child, LIMIT).unwrap().is_some());
    }
}
