//! Ranks as real processes: they compute sums, are killed and stopped, and never outlive their
//! launcher.
//!
//! This program is its own launcher (`launch N MODE`), child entry point (`launch-child`) and rank
//! (`rank MODE`), so it has its own `main`.

#![cfg(target_os = "linux")]

mod hosts;
mod options;
mod rank;
mod restarts;
mod run;
mod stopping;
mod tree;

use std::{
    net::TcpListener,
    process::ExitCode,
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Failed, Trial};
use megaburn_launch::{LaunchOptions, launch, launch_child};
use nix::sys::signal::Signal;
use options::with_variables;
use run::Run;

/// The time limit of the tests: the timeout of collectives (`rank::TIMEOUT`) plus the promised 5 s.
const PROMISED: Duration = Duration::from_secs(rank::TIMEOUT.as_secs() + 5);

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let code = match args.next().as_ref().and_then(|arg| arg.to_str()) {
        Some("launch-child") => launch_child(args),
        Some("rank") => rank::run(
            &args
                .map(|arg| arg.into_string().unwrap())
                .collect::<Vec<_>>(),
        ),
        Some("launch") => {
            let nproc = args.next().unwrap().to_str().unwrap().parse().unwrap();
            let mut options = match std::env::var_os("TEST_SELF") {
                Some(_) => LaunchOptions::this_program(nproc, args),
                None => LaunchOptions::new(nproc, args.collect()),
            };
            options = options.with_log_dir(std::env::var_os("TEST_LOGS").map(Into::into));
            options = with_variables(options);
            match launch(&options) {
                Ok(outcome) => outcome.exit_code(),
                Err(error) => {
                    eprintln!("{error}");
                    error.exit_code()
                }
            }
        }
        _ => return libtest_mimic::run(&Arguments::from_args(), trials()).exit_code(),
    };
    ExitCode::from(code as u8)
}

type Test = fn() -> Result<(), Failed>;

fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 37] = [
        ("a_killed_rank_is_named_by_those_behind_it", tree::killed),
        ("a_failure_passes_a_stopped_rank", tree::passes_stopped),
        ("a_caller_without_the_token_is_no_launcher", hosts::stranger),
        (
            "spares_come_and_go_while_others_run",
            hosts::spares_come_and_go,
        ),
        (
            "a_coordinator_that_is_started_again_continues_the_launch",
            hosts::coordinator_again,
        ),
        (
            "a_signal_before_the_start_ends_all_launchers",
            hosts::stopped_before_the_start,
        ),
        ("ranks_that_fail_are_started_again", restarts::succeeds),
        (
            "ranks_that_lose_a_peer_restart_in_place_while_that_helps",
            restarts::in_place,
        ),
        (
            "ranks_that_wait_end_with_their_own_code_if_no_restart_is_left",
            restarts::in_place_without_restart,
        ),
        (
            "a_job_without_a_restart_left_ends_with_the_code_of_the_failure",
            restarts::spent,
        ),
        (
            "a_wrong_configuration_is_not_started_again",
            restarts::wrong_configuration,
        ),
        (
            "a_signal_in_the_pause_ends_the_job",
            restarts::stopped_in_pause,
        ),
        ("hosts_have_the_order_of_the_network", hosts::topology),
        ("a_killed_rank_restarts_all_hosts", hosts::killed_rank),
        ("a_spare_replaces_a_lost_host", hosts::lost_host),
        (
            "a_host_that_fails_repeatedly_gives_way_to_a_spare",
            hosts::repeated_failure,
        ),
        (
            "a_launcher_with_other_options_is_refused",
            hosts::other_options,
        ),
        (
            "ranks_end_when_the_coordinator_is_lost",
            hosts::lost_coordinator,
        ),
        ("processes_sum_over_tcp", processes_sum_over_tcp),
        (
            "a_killed_rank_is_named_and_ends_all",
            a_killed_rank_is_named_and_ends_all,
        ),
        (
            "a_stopped_rank_is_named_and_ends_all",
            a_stopped_rank_is_named_and_ends_all,
        ),
        (
            "a_failing_ranks_exit_code_is_the_runs",
            a_failing_ranks_exit_code_is_the_runs,
        ),
        (
            "a_killed_launcher_leaves_no_rank",
            a_killed_launcher_leaves_no_rank,
        ),
        (
            "a_program_starts_itself_as_ranks",
            a_program_starts_itself_as_ranks,
        ),
        (
            "a_killed_program_leaves_no_rank_of_itself",
            a_killed_program_leaves_no_rank_of_itself,
        ),
        (
            "a_signal_is_passed_on_and_ranks_may_finish",
            a_signal_is_passed_on,
        ),
        (
            "a_rank_that_ignores_sigterm_is_killed",
            a_rank_that_ignores_sigterm_is_killed,
        ),
        (
            "what_a_rank_started_ends_with_it",
            what_a_rank_started_ends_with_it,
        ),
        (
            "a_killed_launcher_leaves_nothing_that_a_shell_started",
            a_killed_launcher_of_shells,
        ),
        (
            "two_signals_within_a_second_are_one_request",
            two_quick_signals,
        ),
        (
            "a_program_saves_whose_shell_the_signal_killed",
            stopping::behind_a_shell,
        ),
        (
            "ranks_that_stop_with_one_code_may_take_their_time",
            stopping::with_one_code,
        ),
        ("ctrl_z_suspends_the_ranks_too", stopping::suspended),
        (
            "every_signal_that_asks_to_stop_is_passed_on",
            every_signal_is_passed_on,
        ),
        (
            "the_same_error_of_all_ranks_is_shown_once_and_logs_have_all",
            the_same_error,
        ),
        ("a_port_in_use_is_bad_input", a_port_in_use_is_bad_input),
        (
            "a_command_that_does_not_exist_is_named",
            a_command_that_does_not_exist_is_named,
        ),
    ];
    tests
        .into_iter()
        .map(|(name, test)| Trial::test(name, test))
        .collect()
}

fn processes_sum_over_tcp() -> Result<(), Failed> {
    let end = Run::ranks(3, &["sum"]).end(PROMISED);
    assert_eq!(end.code, Some(0), "{end:?}");
    for line in ["sum 6", "[rank 1] sum 6", "[rank 2] sum 6"] {
        assert!(
            end.out.iter().any(|out| out == line),
            "{line:?} is missing: {end:?}"
        );
    }
    Ok(())
}

fn a_killed_rank_is_named_and_ends_all() -> Result<(), Failed> {
    // Kill at different moments of the first all-reduces.
    for moment in [1, 30, 77] {
        let mut run = Run::ranks(3, &["loop"]);
        let pids = run.pids();
        std::thread::sleep(Duration::from_millis(moment));
        run::signal(pids[1], Signal::SIGKILL);
        let begin = Instant::now();
        let end = run.end(PROMISED);
        assert!(begin.elapsed() < PROMISED);
        assert_eq!(end.code, Some(128 + 9), "{end:?}");
        assert!(
            end.err
                .last()
                .unwrap()
                .contains("rank 1 was killed by SIGKILL"),
            "{end:?}"
        );
        for rank in ["rank 0, group world", "rank 2, group world"] {
            let named = |line: &&String| line.contains(rank) && line.contains("rank 1");
            assert!(
                end.err.iter().any(|line| named(&line)),
                "{rank} is missing: {end:?}"
            );
        }
        run::assert_gone(&pids);
    }
    Ok(())
}

fn a_stopped_rank_is_named_and_ends_all() -> Result<(), Failed> {
    let (mut run, folder) = Run::with_debugger(3, &["loop"]);
    let pids = run.pids();
    run::signal(pids[2], Signal::SIGSTOP);
    // Four seconds of `timeout` and a busy machine.
    let end = run.end(2 * PROMISED);
    assert_eq!(end.code, Some(4), "{end:?}");
    let stacks = std::fs::read_to_string(folder.join("rank-2.stacks"));
    let stopped = pids[2];
    assert_eq!(
        stacks?,
        format!("process {stopped}:\ncalls of -p {stopped}\n")
    );
    assert!(!folder.join("rank-0.stacks").exists());
    let cause = end
        .err
        .iter()
        .skip_while(|line| !line.starts_with("megaburn launch"));
    let text = cause.cloned().collect::<Vec<_>>().join("\n");
    assert!(
        text.contains("exited with code 4") && text.contains("rank 2"),
        "{end:?}"
    );
    run::assert_gone(&pids);
    Ok(())
}

fn a_failing_ranks_exit_code_is_the_runs() -> Result<(), Failed> {
    for code in [1, 3] {
        let mut run = Run::ranks(3, &["fail", &code.to_string()]);
        let pids = run.pids();
        let end = run.end(PROMISED);
        assert_eq!(end.code, Some(code), "{end:?}");
        let last: Vec<_> = end.err.iter().rev().take(2).rev().collect();
        assert!(
            last[0].contains(&format!("rank 1 exited with code {code}")),
            "{end:?}"
        );
        assert_eq!(last[1], "  its disk is full", "{end:?}");
        run::assert_gone(&pids);
    }
    Ok(())
}

fn a_killed_launcher_leaves_no_rank() -> Result<(), Failed> {
    let mut run = Run::ranks(3, &["patient"]);
    let pids = run.pids();
    run.signal(Signal::SIGKILL);
    run::assert_gone(&pids);
    Ok(())
}

fn a_program_starts_itself_as_ranks() -> Result<(), Failed> {
    let end = Run::of_itself(3, &["sum"]).end(PROMISED);
    assert_eq!(end.code, Some(0), "{end:?}");
    for line in ["sum 6", "[rank 1] sum 6", "[rank 2] sum 6"] {
        assert!(
            end.out.iter().any(|out| out == line),
            "{line:?} is missing: {end:?}"
        );
    }
    let end = Run::of_itself(3, &["fail", "3"]).end(PROMISED);
    assert_eq!(end.code, Some(3), "{end:?}");
    assert_eq!(end.err.last().unwrap(), "  its disk is full", "{end:?}");
    Ok(())
}

fn a_killed_program_leaves_no_rank_of_itself() -> Result<(), Failed> {
    let mut run = Run::of_itself(3, &["patient"]);
    let pids = run.pids();
    run.signal(Signal::SIGKILL);
    run::assert_gone(&pids);
    Ok(())
}

fn a_signal_is_passed_on() -> Result<(), Failed> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut run = Run::ranks(2, &["patient"]);
        let pids = run.pids();
        run.signal(signal);
        let end = run.end(PROMISED);
        assert_eq!(end.code, Some(0), "{end:?}");
        for line in ["saved", "[rank 1] saved"] {
            assert!(
                end.out.iter().any(|out| out == line),
                "{line:?} is missing: {end:?}"
            );
        }
        assert!(end.err.last().unwrap().contains(signal.as_str()), "{end:?}");
        run::assert_gone(&pids);
    }
    Ok(())
}

fn a_rank_that_ignores_sigterm_is_killed() -> Result<(), Failed> {
    let mut run = Run::ranks(2, &["stubborn"]);
    let pids = run.pids();
    run::signal(pids[0], Signal::SIGKILL);
    let end = run.end(PROMISED);
    assert_eq!(end.code, Some(128 + 9), "{end:?}");
    assert!(
        end.err
            .last()
            .unwrap()
            .contains("rank 0 was killed by SIGKILL"),
        "{end:?}"
    );
    run::assert_gone(&pids);
    Ok(())
}

fn what_a_rank_started_ends_with_it() -> Result<(), Failed> {
    let script = "sleep 600 & echo pid $!; exit 0";
    let mut run = Run::launch(2, &["sh", "-c", script], &[]);
    let pids = run.pids();
    let end = run.end(PROMISED);
    assert_eq!(end.code, Some(0), "{end:?}");
    run::assert_gone(&pids);
    Ok(())
}

fn a_killed_launcher_of_shells() -> Result<(), Failed> {
    // The shell waits for the program and for a background process that is not a rank.
    let script = "sleep 600 & echo pid $!; wait; echo done";
    let mut run = Run::launch(2, &["sh", "-c", script], &[]);
    let pids = run.pids();
    run.signal(Signal::SIGKILL);
    run::assert_gone(&pids);
    Ok(())
}

fn two_quick_signals() -> Result<(), Failed> {
    // Each rank takes longer to save than the launcher's grace period of 3 s.
    let mut run = Run::ranks(2, &["slow"]);
    run.pids();
    run.signal(Signal::SIGTERM);
    std::thread::sleep(Duration::from_millis(200));
    run.signal(Signal::SIGTERM);
    let end = run.end(PROMISED);
    assert_eq!(end.code, Some(0), "{end:?}");
    assert!(
        end.out.iter().any(|line| line == "[rank 1] saved"),
        "{end:?}"
    );
    Ok(())
}

fn every_signal_is_passed_on() -> Result<(), Failed> {
    let signals = [Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2];
    let mut runs = signals.map(|_| Run::ranks(1, &["patient"]));
    for (run, signal) in runs.iter_mut().zip(signals) {
        run.pids();
        run.signal(signal);
    }
    for (run, signal) in runs.into_iter().zip(signals) {
        let end = run.end(PROMISED);
        assert_eq!(end.code, Some(0), "{signal}: {end:?}");
        assert!(
            end.out.iter().any(|line| line == "saved"),
            "{signal}: {end:?}"
        );
    }
    Ok(())
}

fn the_same_error() -> Result<(), Failed> {
    let logs = std::env::temp_dir().join(format!("megaburn-logs-{}", std::process::id()));
    let script = "echo rank $RANK; echo 'error: no such key' >&2; exit 2";
    let env = [("TEST_LOGS", logs.to_str().unwrap())];
    let end = Run::launch(3, &["sh", "-c", script], &env).end(PROMISED);
    assert_eq!(end.code, Some(2), "{end:?}");
    let shown = end
        .err
        .iter()
        .filter(|line| line.ends_with("error: no such key"))
        .count();
    // The error appears twice: when it is written, and as the cause.
    assert_eq!(shown, 2, "{end:?}");
    assert!(
        end.err
            .iter()
            .any(|line| line.ends_with("wrote the same error")),
        "{end:?}"
    );
    for rank in 0..3 {
        let log = std::fs::read_to_string(logs.join(format!("rank-{rank}.log")))?;
        let mut lines: Vec<_> = log.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["error: no such key", &format!("rank {rank}")]);
    }
    Ok(std::fs::remove_dir_all(logs)?)
}

fn a_port_in_use_is_bad_input() -> Result<(), Failed> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port().to_string();
    let this = std::env::current_exe()?;
    let command = [this.to_str().unwrap(), "rank", "sum"];
    let end = Run::launch(2, &command, &[("TEST_PORT", &port)]).end(PROMISED);
    assert_eq!(end.code, Some(2), "{end:?}");
    let last = end.err.last().unwrap();
    assert!(
        last.contains(&format!("127.0.0.1:{port}")) && last.contains("in use"),
        "{end:?}"
    );
    Ok(())
}

fn a_command_that_does_not_exist_is_named() -> Result<(), Failed> {
    let end = Run::launch(2, &["no-such-program-anywhere"], &[]).end(PROMISED);
    assert_eq!(end.code, Some(127), "{end:?}");
    assert_eq!(end.err.len(), 1, "it is said once: {end:?}");
    assert!(end.err[0].contains("no-such-program-anywhere"), "{end:?}");
    Ok(())
}
