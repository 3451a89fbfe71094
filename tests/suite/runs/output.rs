//! Output that cannot be written never changes how a program ends, and signals end it as the README
//! says.

use std::{
    fs,
    net::TcpStream,
    time::{Duration, Instant},
};

use megaburn::collective::free_port;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::runs::child::Ranks;
use megaburn_test_support::run::Run;

const MEGABURN: &str = env!("CARGO_BIN_EXE_megaburn-under-test");

/// Runs a script in which `$MB` is the program; returns the exit code of each line.
fn codes(script: &[&str]) -> Vec<i32> {
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<_> = script
        .iter()
        .map(|line| format!("({line}) && c=0 || c=$?"))
        .collect();
    let lines = lines.join("\necho code $c >&3\n") + "\necho code $c >&3";
    let script = format!("exec 3>&1\nMB={MEGABURN}\n{lines}");
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
        // The reader has closed the pipe, as `head` does.
        (piped.as_str(), 0),
        // A lost result is a failure.
        (&format!("{PLAN} > /dev/full"), 1),
        // A file that exceeds the limit is an error that names it, not a signal.
        (&limited, 1),
        // Errors that cannot be printed.
        ("$MB train --set nothing.like=this 2> /dev/full", 2),
        ("$MB launch --nproc 2 -- sh -c 'exit 3' 2> /dev/full", 3),
        ("$MB launch --nproc 2 -- no-such-program 2> /dev/full", 127),
        (
            "$MB tokenize --vocab 300 --out t --data nowhere.txt 2> /dev/full",
            2,
        ),
    ];
    let script = cases.map(|(line, _)| line);
    assert_eq!(codes(&script), cases.map(|(_, code)| code));
}

#[test]
fn a_signal_ends_a_rank_that_waits_for_others_and_files_have_no_colours() {
    let run = Run::new();
    let port = free_port().unwrap();
    let env = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
    ];
    let mut env: Vec<_> = env.map(|(name, value)| (name, value.to_string())).into();
    env.push(("MASTER_PORT", port.to_string()));
    env.push(("RUST_LOG", "warn".to_string()));
    let mut rank = Ranks::with_env(&run.args("dp2", 2, &[]), &env);
    // An unknown caller, for which the rank logs a warning.
    rank.wait_until(|| TcpStream::connect(("127.0.0.1", port)).is_ok());
    rank.signal(0, Signal::SIGTERM);
    let ended = rank.wait(0, Instant::now() + Duration::from_secs(5));
    assert_eq!(ended.code, Some(128 + 15), "{ended:?}");
    assert!(
        ended
            .stderr
            .contains("stopped by SIGTERM before training began"),
        "{ended:?}"
    );
    assert!(!ended.stderr.contains('\x1b'), "{ended:?}");
}

/// The weights are finite, but so large that the model's logits are not.
#[test]
fn a_sample_that_cannot_be_written_leaves_a_finished_run_finished() {
    let run = Run::new();
    let large = ["optimizer.lr=1e30", "model.family=gpt2", "model.kv_heads=4"];
    let sets = [
        &large[..],
        &["data.validation_fraction=0", "generate.tokens=1"],
    ]
    .concat();
    let ended = Ranks::threads(&run.args("tp1", 1, &sets))
        .finish()
        .remove(0);
    assert!(
        ended.stderr.contains("cannot generate a sample: "),
        "{ended:#?}"
    );
    assert!(ended.stdout.contains("finished 1 step"), "{ended:#?}");
    let state = fs::read_to_string(run.path("run/state.json")).unwrap();
    assert!(state.contains(r#""state":"finished","step":1"#), "{state}");
}

/// Its thread may hang anywhere, so the process exits without running its usual cleanup.
#[test]
fn a_rank_that_gives_no_sign_of_life_says_so_before_its_process_ends() {
    let run = Run::new();
    let args = run.args("tp1", 1_000_000, &["train.step_timeout_seconds=0.001"]);
    let ended = Ranks::threads(&args).wait_all().remove(0);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    // In which part of a step depends on the speed of the machine.
    for words in [
        "rank 0 has made no progress for 0 s",
        "(`train.step_timeout_seconds`)",
    ] {
        assert!(ended.stderr.contains(words), "{ended:?}");
    }
}

#[test]
fn a_run_that_stopped_is_told_from_one_that_finished() {
    let run = Run::new();
    let launch = |sets: &[&str]| {
        let mut args = vec!["launch", "--nproc", "2", "--", MEGABURN, "train"];
        let train = run.args("dp2", 4, sets);
        args.extend(train.iter().map(String::as_str));
        let ended = Ranks::command(&args).wait_all().remove(0);
        let state = fs::read_to_string(run.path("run/state.json")).unwrap();
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(state["steps"], 4);
        (ended, state)
    };
    let (ended, state) = launch(&["train.exit_at_step=2", "train.stopped_exit_code=75"]);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(
        ended
            .stdout
            .contains("stopped by train.exit_at_step after step 2, saved"),
        "{ended:?}"
    );
    assert_eq!(
        (&state["state"], &state["step"]),
        (&json!("stopped"), &json!(2))
    );
    assert_eq!(state["reason"], "train.exit_at_step");
    assert_eq!(run.steps().len(), 2);

    // A supervisor that restarted it unchanged would do so forever.
    let (ended, state) = launch(&["train.exit_at_step=2", "train.stopped_exit_code=75"]);
    assert_eq!(
        (ended.code, &state["state"]),
        (Some(2), &json!("stopped")),
        "{ended:?}"
    );
    assert!(
        ended
            .stderr
            .contains("`train.exit_at_step` is 2: it must be more than 2, the steps"),
        "{ended:?}"
    );

    // The start takes longer than that, and the run still makes progress.
    let (ended, state) = launch(&["train.exit_after_minutes=1e-9"]);
    assert_eq!(
        (ended.code, &state["reason"]),
        (Some(0), &json!("train.exit_after_minutes"))
    );
    assert_eq!(
        (&state["state"], &state["step"]),
        (&json!("stopped"), &json!(3))
    );

    let (ended, state) = launch(&["train.stopped_exit_code=75"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        (&state["state"], &state["step"], &state["reason"]),
        (&json!("finished"), &json!(4), &Value::Null)
    );
}

#[test]
fn a_run_that_is_killed_has_the_picture_of_its_last_evaluations() {
    let run = Run::new();
    let args = run.args("dp2", 1_000_000, &["train.eval_interval=3"]);
    let mut ranks = Ranks::threads(&args);
    let picture = run.path("run/loss.svg");
    let read = || std::fs::read_to_string(&picture).unwrap_or_default();
    ranks.wait_until(|| !read().is_empty());
    let first = read();
    ranks.wait_until(|| read() != first);
    ranks.kill_all();
    let last = read();
    assert!(
        last.starts_with("<svg") && last.contains("</svg>"),
        "{last}"
    );
}
