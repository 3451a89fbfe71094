//! Full runs of pipelines and context parallelism: evaluations, a sample, checkpoints, the death of
//! a rank.

use std::time::{Duration, Instant};

use megaburn::{
    report::metrics::{MetricsRecord, read_metrics},
    train::{TrainConfig, config::Dtype},
};
use nix::sys::signal::Signal;
use rstest::rstest;

use crate::{
    precision::bf16::{bits, config, relative, saved, train},
    runs::child::Ranks,
};
use megaburn_test_support::{gather::relative_distance, run::Run};

/// The configuration keys of a pipeline for four layers.
fn keys(schedule: &str, zero: u8) -> Vec<String> {
    let chunks = match schedule {
        "interleaved" | "zb-v" => 2,
        _ => 1,
    };
    vec![
        "model.layers=4".to_string(),
        format!("parallel.schedule={schedule}"),
        format!("parallel.chunks={chunks}"),
        format!("parallel.zero={zero}"),
        "parallel.bucket_size=5000".to_string(),
    ]
}

#[rstest]
#[case("pp2", "1f1b", 0, true)]
#[case("pp4", "1f1b", 0, false)]
#[case("tp2-pp2-dp2-sp", "interleaved", 1, true)]
#[case("pp2-dp2", "zb-v", 3, true)]
#[case("tp2-pp2", "zb-h1", 0, false)]
#[case("pp2-dp3", "gpipe", 2, true)]
#[case("cp2", "1f1b", 2, true)]
#[case("tp2-cp2-dp2-sp", "1f1b", 3, false)]
#[case("cp4-pp2", "interleaved", 1, true)]
fn it_evaluates_writes_and_saves_as_one_rank_does(
    #[case] layout: &str,
    #[case] schedule: &str,
    #[case] zero: u8,
    #[case] tied: bool,
) {
    let of = |run: &Run, layout, keys: Vec<String>| {
        let more = [
            &format!("model.tied={tied}"),
            "train.global_batch=12",
            "train.eval_interval=2",
            "train.eval_batches=2",
            "generate.tokens=8",
            "generate.temperature=0",
            "optimizer.lr=1e-3",
            "optimizer.eps=1e-5",
            "train.log_num_zeros=true",
            "train.log_params_norm=true",
            "train.check_replicas_interval=1",
        ];
        let keys: Vec<&str> = keys.iter().map(String::as_str).chain(more).collect();
        let ended = Ranks::threads(&run.args(layout, 3, &keys))
            .finish()
            .remove(0);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let sample = ended
            .stdout
            .split("\nsample ")
            .nth(1)
            .expect("a sample")
            .to_string();
        let sample = sample.split("\nfinished").next().map(str::to_string);
        let first = ended
            .stdout
            .lines()
            .find(|line| line.starts_with("model "))
            .map(String::from);
        let evals = read_metrics(run.path("run/metrics.jsonl"))
            .unwrap()
            .into_iter();
        let evals = evals.filter_map(|record| match record {
            MetricsRecord::Eval(eval) => Some(eval.eval_loss),
            MetricsRecord::Step(_) => None,
        });
        (sample, first, evals.collect::<Vec<_>>(), run.steps())
    };
    let one = Run::new();
    let found = Run::new();
    let (sample, model, evals, steps) = of(&found, layout, keys(schedule, zero));
    let expected = of(&one, "tp1", vec!["model.layers=4".into()]);
    assert_eq!((sample, model), (expected.0, expected.1));
    assert!(evals.len() >= 2 && evals.len() == expected.2.len());
    for (found, expected) in evals.iter().zip(&expected.2) {
        assert!(relative(*found, *expected) < 1e-5, "{found} {expected}");
    }
    for (found, expected) in steps.iter().zip(&expected.3) {
        assert_eq!(
            (found.tokens, found.num_zeros),
            (expected.tokens, expected.num_zeros)
        );
        let norms = [found, expected].map(|step| step.params_norm.unwrap());
        let numbers = [
            [found.loss, expected.loss],
            [found.grad_norm, expected.grad_norm],
            norms,
        ];
        for [found, expected] in numbers {
            assert!(relative(found, expected) < 1e-5, "{found} {expected}");
        }
    }
    let expected = saved(&one);
    let found = saved(&found);
    assert!(found.keys().eq(expected.keys()));
    for (name, found) in found.iter().filter(|(name, _)| name.starts_with("model.")) {
        let distance = relative_distance(found, &expected[name]);
        assert!(distance < 1e-5, "{name} differs by {distance:e}");
    }
}

fn of_keys(run: &Run, layout: &str, schedule: &str, dtype: Dtype) -> TrainConfig {
    let mut config = config(run, layout, dtype);
    config.model.layers = 4;
    if layout.contains("pp") {
        config.parallel.schedule = Some(schedule.parse().unwrap());
    }
    config
}

#[rstest]
#[case("pp2", "zb-v", "tp1")]
#[case("tp2", "1f1b", "pp4")]
#[case("pp2-dp2", "interleaved", "tp2-pp2-dp2-sp")]
#[case("tp2-pp2-sp", "zb-h1", "dp2")]
#[case("cp2", "1f1b", "tp1")]
#[case("tp2-cp2-sp", "1f1b", "cp4")]
#[case("cp2-pp2", "zb-v", "tp2-cp2-dp2-sp")]
fn it_resumes_bit_for_bit_and_under_any_layout(
    #[case] layout: &str,
    #[case] schedule: &str,
    #[case] other: &str,
    #[values(Dtype::F32, Dtype::Bf16, Dtype::F16)] dtype: Dtype,
) {
    let [whole, parts] = [0; 2].map(|_| Run::new());
    let straight = train(of_keys(&whole, layout, schedule, dtype), 4);
    train(of_keys(&parts, layout, schedule, dtype), 2);
    let half = saved(&parts);
    train(of_keys(&parts, other, "1f1b", dtype), 2);
    assert_eq!(bits(&saved(&parts)), bits(&half));
    let rest = train(of_keys(&parts, layout, schedule, dtype), 4);
    let losses = |steps: &[megaburn::report::metrics::StepMetrics]| -> Vec<u64> {
        steps.iter().map(|step| step.loss.to_bits()).collect()
    };
    assert_eq!(losses(&rest), losses(&straight[2..]));
    assert_eq!(bits(&saved(&parts)), bits(&saved(&whole)));
}

#[rstest]
fn a_split_backward_gives_the_same_bits(
    #[values("pp2", "pp2-dp2", "tp2-pp2-sp")] layout: &str,
    #[values(0, 1, 3)] zero: u8,
    #[values(true, false)] tied: bool,
) {
    let found = ["1f1b", "zb-h1"].map(|schedule| {
        let run = Run::new();
        let mut config = of_keys(&run, layout, schedule, Dtype::F32);
        config.model.tied = tied;
        config.parallel.zero = zero;
        config.parallel.bucket_size = Some(5000);
        train(config, 3);
        saved(&run)
    });
    assert_eq!(bits(&found[0]), bits(&found[1]));
}

#[rstest]
fn the_death_or_silence_of_a_rank_ends_all_others_in_time(
    #[values("pp3", "cp3")] layout: &str,
    #[values(Signal::SIGKILL, Signal::SIGSTOP)] signal: Signal,
    #[values(0, 1, 2)] victim: usize,
) {
    const TIMEOUT: u64 = 4;
    let run = Run::new();
    let timeout = format!("train.timeout_seconds={TIMEOUT}");
    let sets = [
        "model.layers=3",
        "parallel.schedule=1f1b",
        "data.seq_len=48",
        &timeout,
    ];
    let mut ranks = Ranks::processes(3, &run.args(layout, 1_000_000, &sets));
    ranks.wait_until(|| run.steps().len() >= 2);
    ranks.signal(victim, signal);
    let deadline = Instant::now() + Duration::from_secs(TIMEOUT + 5);
    for rank in (0..3).filter(|rank| *rank != victim) {
        let ended = ranks.wait(rank, deadline);
        assert_eq!(ended.code, Some(4), "rank {rank}: {ended:?}");
        let what = match signal {
            Signal::SIGKILL => format!("lost rank {victim}: "),
            _ => "timed out after".to_string(),
        };
        assert!(ended.stderr.contains(&what), "rank {rank}: {ended:?}");
    }
}
