//! Ranks as processes compute what threads do, and the death of one neither hangs nor harms the
//! rest.

use std::{
    thread,
    time::{Duration, Instant},
};

use megaburn::{
    checkpoint::find_latest,
    collective::Group,
    mesh::{PositionRng, Purpose},
};
use nix::sys::signal::Signal;
use rstest::rstest;

use crate::runs::child::Ranks;
use megaburn_test_support::{
    layout_grid::{Matrix, Row},
    run::Run,
    text::fresh_seed,
};

/// More steps than any test waits for.
const ENDLESS: u64 = 1_000_000;

#[test]
fn the_smallest_rows_of_the_matrix_give_the_same_bits_as_processes_and_as_threads() {
    let Matrix { rows, models } = Matrix::read();
    let smallest = |row: &&Row| row.layout.world_size() == 2;
    let mut run_rows = 0;
    for row in rows.iter().filter(smallest) {
        let threads = Run::new();
        let processes = Run::new();
        for run in [&threads, &processes] {
            let data = run.path("text.txt");
            let model = &models[&row.model];
            let mut config =
                model.config(data.to_str().unwrap(), row.global_batch, row.micro_batch);
            config.run.dir = run.path("run").display().to_string();
            config.generate.tokens = 0;
            std::fs::write(run.path("config.toml"), config.to_toml()).unwrap();
        }
        let layout = row.layout.to_string();
        Ranks::threads(&threads.args(&layout, 3, &[])).finish();
        Ranks::processes(2, &processes.args(&layout, 3, &[])).finish();
        assert_eq!(threads.numbers().len(), 3);
        assert_eq!(
            threads.numbers(),
            processes.numbers(),
            "{} {layout}",
            row.model
        );
        assert!(
            threads.tensors(3) == processes.tensors(3),
            "{} {layout}",
            row.model
        );
        run_rows += 1;
    }
    assert!(run_rows >= 4, "{run_rows} rows were run");
}

#[rstest]
fn the_death_or_silence_of_a_rank_ends_all_others_in_time(
    #[values(Signal::SIGKILL, Signal::SIGSTOP)] signal: Signal,
    #[values(0, 2)] victim: usize,
) {
    const TIMEOUT: u64 = 4;
    let run = Run::new();
    let timeout = format!("train.timeout_seconds={TIMEOUT}");
    let mut ranks = Ranks::processes(4, &run.args("tp2-dp2-sp", ENDLESS, &[&timeout]));
    ranks.wait_until(|| run.steps().len() >= 2);
    ranks.signal(victim, signal);
    let deadline = Instant::now() + Duration::from_secs(TIMEOUT + 5);
    for rank in (0..4).filter(|rank| *rank != victim) {
        let ended = ranks.wait(rank, deadline);
        assert_eq!(ended.code, Some(4), "rank {rank}: {ended:?}");
        // A stopped rank also blocks the ranks that wait for it: any of them may be the first to
        // time out.
        let what = match signal {
            Signal::SIGKILL => format!("lost rank {victim}: "),
            _ => "timed out after".to_string(),
        };
        assert!(ended.stderr.contains(&what), "rank {rank}: {ended:?}");
        assert!(ended.stderr.contains("error: rank"), "{ended:?}");
    }
    if signal == Signal::SIGSTOP {
        let run = run.path("run").display().to_string();
        let compared = &Ranks::command(&["hang", &run]).finish()[0].stdout;
        let silent = format!("rank {victim:<3} no report: process ");
        for part in ["3 of 4 ranks have reported", &silent, " is stopped"] {
            assert!(compared.contains(part), "{compared}");
        }
        let look_at = format!("look at  rank {victim}, which waits for no other: no report");
        assert!(compared.contains(&look_at), "{compared}");
    }
}

/// Suspended as by Ctrl-Z and `fg`, `docker pause` or a frozen machine, for longer than any limit.
#[test]
fn a_run_that_is_suspended_goes_on_when_it_is_continued() {
    let run = Run::new();
    let limits = ["train.timeout_seconds=0.6", "train.checkpoint_interval=0"];
    let mut ranks = Ranks::threads(&run.args("pp2-dp2", ENDLESS, &limits));
    for times in 1..=4 {
        ranks.wait_until(|| run.steps().len() >= 3 * times);
        ranks.signal(0, Signal::SIGSTOP);
        thread::sleep(Duration::from_millis(750));
        ranks.signal(0, Signal::SIGCONT);
    }
    let steps = run.steps().len();
    ranks.wait_until(|| run.steps().len() >= steps + 3);
}

/// A rank whose data is missing, before or after the others have connected to it.
#[rstest]
fn a_rank_that_cannot_start_ends_the_others_at_once_with_its_error(
    #[values("data.path=nowhere.txt", "optimizer.lr=-1.0")] wrong: &str,
) {
    let run = Run::new();
    let begin = Instant::now();
    let good = run.args("dp2", ENDLESS, &[]);
    let bad = run.args("dp2", ENDLESS, &[wrong]);
    for ended in Ranks::different(&[good, bad]).wait_all() {
        assert_eq!(ended.code, Some(2), "{ended:?}");
        let key = wrong.split('=').next().unwrap();
        let named = ended.stderr.contains("nowhere.txt") || ended.stderr.contains(key);
        assert!(named, "{ended:?}");
    }
    assert!(
        begin.elapsed() < Duration::from_secs(20),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn killing_the_whole_run_at_any_moment_leaves_a_checkpoint_that_loads() {
    let run = Run::new();
    let args = |steps| run.args("tp2-sp", steps, &["train.checkpoint_interval=1"]);
    let rng = PositionRng::new(fresh_seed(), Purpose::Sampling, "kills");
    let latest = || find_latest(&run.checkpoints(), &Group::single(0)).unwrap();
    let mut saved = 0;
    for kill in 0..20 {
        let mut ranks = Ranks::processes(2, &args(ENDLESS));
        // Every fifth kill comes during the start, the others while the run trains and saves.
        if kill % 5 != 0 {
            ranks.wait_until(|| latest_step(&run) > saved);
        }
        thread::sleep(Duration::from_micros(rng.below(kill, 150_000)));
        ranks.kill_all();
        let found = latest();
        assert!(found.refused.is_empty(), "kill {kill}: {:?}", found.refused);
        let step = found.checkpoint.map_or(0, |checkpoint| checkpoint.step());
        assert!(step >= saved, "kill {kill}: step {step} after {saved}");
        saved = step;
    }
    assert!(saved >= 16, "only {saved} steps were saved");
    Ranks::processes(2, &args(saved + 2)).finish();
    let steps: Vec<u64> = run.steps().iter().map(|metrics| metrics.step).collect();
    assert_eq!(steps, (1..=saved + 2).collect::<Vec<_>>());
}

/// The highest step of a committed checkpoint, by folder name only.
fn latest_step(run: &Run) -> u64 {
    let Ok(entries) = std::fs::read_dir(run.checkpoints()) else {
        return 0;
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names
        .filter_map(|name| name.strip_prefix("step-")?.parse().ok())
        .max()
        .unwrap_or(0)
}

#[rstest]
#[case::threads(1)]
#[case::processes(4)]
fn sigterm_saves_and_the_same_command_goes_on(#[case] processes: usize) {
    let run = Run::new();
    let start = |steps| {
        let args = run.args("tp2-dp2-sp", steps, &[]);
        if processes == 1 {
            Ranks::threads(&args)
        } else {
            Ranks::processes(processes, &args)
        }
    };
    let mut ranks = start(ENDLESS);
    ranks.wait_until(|| run.steps().len() >= 2);
    // Only one rank receives the signal, but all leave together.
    ranks.signal(processes - 1, Signal::SIGTERM);
    let ended = ranks.finish();
    let stopped = run.steps().len() as u64;
    let line = format!("after step {stopped}, saved; the same command resumes from there");
    assert!(ended[0].stdout.contains(&line), "{ended:?}");

    let ended = start(stopped + 2).finish();
    assert!(
        ended[0]
            .stdout
            .contains(&format!("resumed  after step {stopped} ")),
        "{ended:?}"
    );
    let steps: Vec<u64> = run.steps().iter().map(|metrics| metrics.step).collect();
    assert_eq!(steps, (1..=stopped + 2).collect::<Vec<_>>());
}

#[test]
fn ranks_that_share_gpus_are_told_which_and_are_hosts_of_their_own() {
    let say = "echo $RANK $CUDA_VISIBLE_DEVICES $NCCL_HOSTID";
    let command = [
        "launch",
        "--nproc",
        "4",
        "--ranks-per-gpu",
        "2",
        "--",
        "sh",
        "-c",
        say,
    ];
    let ended = Ranks::command(&command).finish().remove(0);
    for told in ["0 0 0-0", "1 0 0-1", "2 1 0-2", "3 1 0-3"] {
        assert!(
            ended.stdout.lines().any(|line| line.ends_with(told)),
            "{told}: {ended:?}"
        );
    }
    let none = [
        "launch",
        "--nproc",
        "2",
        "--ranks-per-gpu",
        "0",
        "--",
        "true",
    ];
    let ended = Ranks::command(&none).wait_all().remove(0);
    assert!(
        ended.code == Some(2) && ended.stderr.contains("ranks per GPU must be at least 1"),
        "{ended:?}"
    );
    // An unset variable expands to the empty text, which would be no token at all.
    let empty = ["launch", "--nproc", "2", "--job-token", "", "--", "true"];
    let ended = Ranks::command(&empty).wait_all().remove(0);
    assert!(
        ended.code == Some(2) && ended.stderr.contains("'--job-token <TOKEN>'"),
        "{ended:?}"
    );
}
