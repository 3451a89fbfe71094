//! What cannot be written never changes how a program ends, and signals end it as the README says.

use std::{
    net::TcpStream,
    time::{Duration, Instant},
};

use megaburn::collective::free_port;
use nix::sys::signal::Signal;

use crate::{child::Ranks, run::Run};

/// The exit code of each line of a script, in which `$MB` is the program.
fn codes(script: &[&str]) -> Vec<i32> {
    let folder = tempfile::tempdir().unwrap();
    let mb = env!("CARGO_BIN_EXE_megaburn-under-test");
    let lines: Vec<_> = script.iter().map(|line| format!("({line}) && c=0 || c=$?")).collect();
    let lines = lines.join("\necho code $c >&3\n") + "\necho code $c >&3";
    let script = format!("exec 3>&1\nMB={mb}\n{lines}");
    let ended = Ranks::shell(&script, folder.path()).finish().remove(0);
    let code = |line: &str| line.strip_prefix("code ")?.parse().ok();
    ended.stdout.lines().filter_map(code).collect()
}

#[test]
fn output_that_cannot_be_written_changes_no_exit_code() {
    const PLAN: &str = "$MB plan --schedule gpipe --pp 2 --micro-batches 4";
    let piped =
        format!("exec 4>&1; c=$( ( (sleep 0.2; {PLAN} 2>&4; echo $? >&5) | true ) 5>&1 ); exit $c");
    let limited = format!(
        "ulimit -f 1; {PLAN} --svg p.svg > /dev/null 2> err; c=$?; grep -q p.svg err && exit $c"
    );
    let cases = [
        // A reader that has gone, as `head` does.
        (piped.as_str(), 0),
        // A result that is lost is a failure.
        (&format!("{PLAN} > /dev/full"), 1),
        // A file that outgrows the limit is an error that names it, not a signal.
        (&limited, 1),
        // Errors that nobody can read.
        ("$MB train --set nothing.like=this 2> /dev/full", 2),
        ("$MB launch --nproc 2 -- sh -c 'exit 3' 2> /dev/full", 3),
        ("$MB launch --nproc 2 -- no-such-program 2> /dev/full", 127),
        ("$MB tokenize --vocab 300 --out t --data nowhere.txt 2> /dev/full", 2),
    ];
    let script = cases.map(|(line, _)| line);
    assert_eq!(codes(&script), cases.map(|(_, code)| code));
}

#[test]
fn a_signal_ends_a_rank_that_waits_for_others_and_files_have_no_colours() {
    let run = Run::new();
    let port = free_port().unwrap();
    let env =
        [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")];
    let mut env: Vec<_> = env.map(|(name, value)| (name, value.to_string())).into();
    env.push(("MASTER_PORT", port.to_string()));
    env.push(("RUST_LOG", "warn".to_string()));
    let mut rank = Ranks::with_env(&run.args("dp2", 2, &[]), &env);
    // A stranger, of whom it warns.
    rank.wait_until(|| TcpStream::connect(("127.0.0.1", port)).is_ok());
    rank.signal(0, Signal::SIGTERM);
    let ended = rank.wait(0, Instant::now() + Duration::from_secs(5));
    assert_eq!(ended.code, Some(128 + 15), "{ended:?}");
    assert!(ended.stderr.contains("stopped by SIGTERM before training began"), "{ended:?}");
    assert!(!ended.stderr.contains('\x1b'), "{ended:?}");
}
