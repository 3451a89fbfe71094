//! Runs with hybrid context parallelism: resumed, checked, non-finite, killed.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rstest::rstest;

use crate::runs::child::Ranks;
use megaburn_test_support::{
    run::Run,
    text::{fresh_seed, write_random_documents},
};

/// Documents of up to 20 tokens, at most 12 of them per rank.
const SETS: [&str; 4] = [
    "data.documents=true",
    "data.document_multiple=4",
    "data.seq_len=24",
    "parallel.max_tokens_per_rank=12",
];

/// A run on documents.
fn dealt(sets: &[&str]) -> (Run, Vec<String>) {
    let run = Run::new();
    let path = run.path("documents.jsonl");
    write_random_documents(&path, 1000, 20, fresh_seed());
    let sets = SETS.iter().chain(sets).map(|set| set.to_string());
    let sets = sets
        .chain([format!("data.path={}", path.display())])
        .collect();
    (run, sets)
}

fn args((run, sets): &(Run, Vec<String>), layout: &str, steps: u64) -> Vec<String> {
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    run.args(layout, steps, &sets)
}

/// Every pair of values of two columns occurs.
#[rstest]
#[case("dp2", "train.dtype=f32", "parallel.zero=1")]
#[case("dp2", "train.dtype=bf16", "parallel.zero=3")]
#[case("cp2", "train.dtype=f32", "parallel.zero=3")]
#[case("cp2", "train.dtype=bf16", "parallel.zero=1")]
#[case("dp2-cp2", "train.dtype=f32", "parallel.zero=1")]
#[case("dp2-cp2", "train.dtype=bf16", "parallel.zero=3")]
#[case("dp3", "train.dtype=f32", "parallel.zero=3")]
#[case("dp3", "train.dtype=bf16", "parallel.zero=1")]
#[case("tp2-dp2-sp", "train.dtype=f32", "parallel.zero=1")]
#[case("tp2-dp2-sp", "train.dtype=bf16", "parallel.zero=3")]
fn a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    #[case] layout: &str,
    #[case] dtype: &str,
    #[case] zero: &str,
) {
    let batch = if layout == "dp3" {
        "train.global_batch=6"
    } else {
        "train.global_batch=8"
    };
    // Fused linear cross-entropy processes ranks' different numbers of tokens in different numbers
    // of chunks.
    let fused = "train.fused_linear_cross_entropy=true";
    let sets = [dtype, zero, batch, fused, "train.check_replicas_interval=1"];
    let whole = dealt(&sets);
    let halves = dealt(&sets);
    Ranks::threads(&args(&whole, layout, 8)).finish();
    Ranks::threads(&args(&halves, layout, 4)).finish();
    Ranks::threads(&args(&halves, layout, 8)).finish();
    assert_eq!(
        (whole.0.numbers().len(), whole.0.numbers()),
        (8, halves.0.numbers())
    );
    assert_eq!(whole.0.tensors(8), halves.0.tensors(8));
}

#[test]
fn a_run_goes_on_where_documents_are_dealt_out_to_other_ranks() {
    let layouts = ["dp2", "tp2-cp2-sp", "dp2-cp2", "cp4", "dp4"];
    let whole = dealt(&[]);
    let halves = dealt(&[]);
    Ranks::threads(&args(&whole, "dp2", 10)).finish();
    for (index, layout) in layouts.iter().enumerate() {
        Ranks::threads(&args(&halves, layout, 2 * (index as u64 + 1))).finish();
    }
    let found = halves.0.steps();
    let expected = whole.0.steps();
    assert_eq!((found.len(), expected.len()), (10, 10));
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.tokens, expected.tokens);
        assert!(
            (found.loss - expected.loss).abs() <= 1e-4,
            "{found:?}, not {expected:?}"
        );
    }
}

/// The error also names the ranks.
#[test]
fn what_is_not_finite_is_named() {
    let run = dealt(&["optimizer.lr=1e30", "optimizer.warmup_steps=0"]);
    let ended = Ranks::threads(&args(&run, "dp2-cp2", 4))
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(
        ended.stderr.contains("error: step 2 is not finite (loss "),
        "{ended:?}"
    );
    assert!(
        ended.stderr.contains("; the weights are those of step 1"),
        "{ended:?}"
    );
    assert!(ended.stderr.contains("ranks 0, 1, 2, 3"), "{ended:?}");
}

#[rstest]
fn a_rank_that_dies_or_stops_ends_all_others(
    #[values(Signal::SIGKILL, Signal::SIGSTOP)] signal: Signal,
) {
    let run = dealt(&["train.timeout_seconds=4"]);
    let mut ranks = Ranks::processes(4, &args(&run, "dp2-cp2", 1_000_000));
    ranks.wait_until(|| run.0.steps().len() >= 2);
    ranks.signal(2, signal);
    let deadline = Instant::now() + Duration::from_secs(9);
    for rank in [0, 1, 3] {
        let ended = ranks.wait(rank, deadline);
        assert_eq!(ended.code, Some(4), "rank {rank}: {ended:?}");
    }
}
