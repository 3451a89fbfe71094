//! Runs of models with experts, from the command line: resumed, killed, exported, used to generate.

use std::{
    fs,
    time::{Duration, Instant},
};

use megaburn::{
    mesh::Layout,
    report::metrics::{MetricsRecord, read_metrics},
};
use nix::sys::signal::Signal;
use rstest::rstest;

use crate::{
    context::grid::{Model, Texts},
    context::packed::with_evaluation,
    models::transformers::fixture,
    runs::child::Ranks,
    runs::resume::{assert_goes_on, train},
};
use megaburn_test_support::run::Run;

const MIXTRAL: [&str; 4] = [
    "model.family=mixtral",
    "moe.aux_loss=0.02",
    "moe.global_aux_loss=0.02",
    "moe.z_loss=1e-3",
];

fn mixtral(sets: &[&'static str]) -> Vec<&'static str> {
    [&MIXTRAL[..], sets].concat()
}

#[rstest]
fn a_resumed_run_with_experts_equals_the_uninterrupted_one_to_the_bit(
    #[values("tp1", "tp2-dp2-ep4-sp")] layout: &str,
    #[values("train.dtype=f32", "train.dtype=bf16")] dtype: &'static str,
    #[values("parallel.zero=0", "parallel.zero=3")] zero: &'static str,
) {
    let whole = Run::new();
    let halves = Run::new();
    let sets = mixtral(&[dtype, zero]);
    Ranks::threads(&whole.args(layout, 8, &sets)).finish();
    Ranks::threads(&halves.args(layout, 4, &sets)).finish();
    Ranks::threads(&halves.args(layout, 8, &sets)).finish();
    assert_eq!(
        (whole.numbers().len(), whole.numbers()),
        (8, halves.numbers())
    );
    assert_eq!(whole.tensors(8), halves.tensors(8));
    let told = whole.steps().pop().unwrap().experts.unwrap();
    assert_eq!(told.busiest.len(), 2);
    assert!(told.busiest[0] >= 1.0 && told.idlest[0] <= 1.0 && told.global_aux_loss > 0.0);
}

/// Covers the expert biases, in both ways in which steps update them.
#[rstest]
fn a_resumed_run_with_biases_equals_the_uninterrupted_one_to_the_bit(
    #[values("tp1", "dp2-ep2")] layout: &str,
    #[values("moe.bias_update=sign", "moe.bias_update=quantile")] update: &str,
    #[values("train.dtype=bf16", "train.dtype=f16")] dtype: &str,
) {
    let whole = Run::new();
    let halves = Run::new();
    let sets = [
        "model.family=deepseek_v3",
        "model.kv_heads=4",
        "model.experts.num=6",
        "moe.z_loss=1e-3",
        "moe.global_aux_loss=0.02",
        update,
        dtype,
    ];
    Ranks::threads(&whole.args(layout, 8, &sets)).finish();
    Ranks::threads(&halves.args(layout, 4, &sets)).finish();
    Ranks::threads(&halves.args(layout, 8, &sets)).finish();
    assert_eq!(
        (whole.numbers().len(), whole.numbers()),
        (8, halves.numbers())
    );
    assert_eq!(whole.tensors(8), halves.tensors(8));
}

#[test]
fn runs_go_on_under_other_expert_grids() {
    const STEPS: u64 = 10;
    let run = Run::new();
    let config = |layout: &str| {
        let mut config = run.config(layout, STEPS);
        config.model.family = "mixtral".parse().unwrap();
        config.moe.aux_loss = 0.02;
        config.moe.global_aux_loss = 0.02;
        config
    };
    let whole = train(config("dp4-ep4"), STEPS, STEPS / 2);
    for layout in [
        "tp1",
        "dp2-ep2",
        "tp2-dp2-ep2-etp2-sp",
        "pp2-dp2-ep2",
        "cp2-dp2-ep4",
        "dp8-ep8",
    ] {
        let resumed = train(config(layout), STEPS, 0);
        assert_goes_on(&resumed, &whole, STEPS / 2, layout);
    }
}

#[test]
fn processes_with_experts_train_as_threads_do() {
    let threads = Run::new();
    let processes = Run::new();
    fs::copy(threads.path("text.txt"), processes.path("text.txt")).unwrap();
    let sets = mixtral(&["parallel.zero=1"]);
    Ranks::threads(&threads.args("tp2-dp2-ep2-etp2-sp", 3, &sets)).finish();
    Ranks::processes(4, &processes.args("tp2-dp2-ep2-etp2-sp", 3, &sets)).finish();
    assert_eq!(threads.numbers(), processes.numbers());
    assert!(threads.tensors(3) == processes.tensors(3));
}

#[rstest]
fn a_rank_that_has_experts_and_dies_or_stops_ends_all_others(
    #[values(Signal::SIGKILL, Signal::SIGSTOP)] signal: Signal,
) {
    let run = Run::new();
    let sets = mixtral(&["train.timeout_seconds=4"]);
    let mut ranks = Ranks::processes(4, &run.args("dp4-ep4", 1_000_000, &sets));
    ranks.wait_until(|| run.steps().len() >= 2);
    ranks.signal(2, signal);
    let deadline = Instant::now() + Duration::from_secs(9);
    for rank in [0, 1, 3] {
        let ended = ranks.wait(rank, deadline);
        assert_eq!(ended.code, Some(4), "rank {rank}: {ended:?}");
    }
}

/// Ranks then have different documents and different numbers of tokens.
#[rstest]
fn documents_are_dealt_out_to_ranks_with_experts(
    #[values(
        "dp2-ep2",
        "dp4-ep4",
        "cp2-ep2",
        "dp2-cp2-ep4",
        "tp2-dp2-ep2-sp",
        "dp3-ep1"
    )]
    layout: &str,
    #[values(0, 3)] zero: u8,
) {
    let texts = Texts::write();
    let data = texts.path(true);
    let of: Layout = layout.parse().unwrap();
    let model = Model {
        heads: [16, 16],
        layers: 2,
        seq_len: 64,
        batch: 2 * of.dp,
        packed: Some(4),
    };
    let text = model
        .text(&data, 1)
        .replacen("[model]", "[model]\nfamily = \"mixtral\"", 1);
    let text = text + "\n[moe]\nglobal_aux_loss = 0.02\nz_loss = 1e-3";
    let dealt = format!("{text}\n[parallel]\nmax_tokens_per_rank = 40\nzero = {zero}");
    let found = with_evaluation(&dealt, layout).unwrap();
    let expected = with_evaluation(&text, "tp1").unwrap();
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let relative = (found - expected).abs() / expected;
        assert!(
            relative <= 2e-5,
            "{layout}, {zero}, {index}: {found}, not {expected}"
        );
    }
}

/// Padding is sent to no expert and counts in no loss.
#[rstest]
fn padding_is_no_token(
    #[values("tp1", "cp2-ep2", "pp2-dp2-ep2", "tp2-cp2-ep4-sp", "cp2-pp2")] layout: &str,
    #[values(None, Some(4))] packed: Option<usize>,
    #[values("probs", "position")] policy: &str,
) {
    let texts = Texts::write();
    let of: Layout = layout.parse().unwrap();
    // Packed rows have unused space at their end; other rows are padded for context parallelism.
    let seq_len = if packed.is_some() { 32 } else { 18 };
    let model = Model {
        heads: [4, 2],
        layers: 2,
        seq_len,
        batch: 2 * of.dp,
        packed,
    };
    let text = model.text(&texts.path(packed.is_some()), 1);
    let text = text.replacen("[model]", "[model]\nfamily = \"mixtral\"", 1)
        + "\n[moe]\naux_loss = 0.05\nseq_aux_loss = 0.05\nglobal_aux_loss = 0.05\nz_loss = 0.01"
        + &format!("\ncapacity_factor = 0.9\ndrop_policy = {policy:?}");
    let shared = format!("{text}\n[parallel]\ncp_pad = true\nbucket_size = 3000");
    let found = with_evaluation(&shared, layout).unwrap();
    let expected = with_evaluation(&text, "tp1").unwrap();
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let relative = (found - expected).abs() / expected;
        assert!(
            relative <= 2e-5,
            "{layout}, {index}: {found}, not {expected}"
        );
    }
}

#[rstest]
#[case(
    "dp2-ep2",
    "moe.aux_loss=0.1",
    "`moe.aux_loss` is 0.1: it must be 0 if documents are distributed"
)]
#[case(
    "dp2-ep2",
    "moe.capacity_factor=1",
    "`moe.capacity_scope` is sequence: it must be rank if documents"
)]
#[case(
    "dp2-ep2",
    "moe.pad_to_capacity=true",
    "`moe.pad_to_capacity` is true: it must be false if documents are distributed"
)]
#[case(
    "dp2-ep2",
    "moe.sinkhorn=true",
    "`moe.sinkhorn` is true: it must be false if documents are distributed"
)]
fn what_needs_micro_batches_in_common_is_refused_where_documents_are_dealt_out(
    #[case] layout: &str,
    #[case] set: &str,
    #[case] message: &str,
) {
    let run = Run::new();
    let sets = [
        "model.family=mixtral",
        "data.documents=true",
        "parallel.max_tokens_per_rank=32",
        set,
    ];
    let ended = Ranks::threads(&run.args(layout, 1, &sets))
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(message), "{ended:?}");
}

/// If all tokens are equal, they all go to the same experts, and most experts get none.
#[rstest]
fn experts_without_tokens_are_ordinary(
    #[values("dp4-ep4", "tp2-dp2-ep4-sp", "pp2-dp2-ep2")] layout: &str,
    #[values("parallel.zero=0", "parallel.zero=2", "parallel.zero=3")] zero: &'static str,
    #[values("moe.z_loss=0", "moe.capacity_factor=1")] capacity: &'static str,
) {
    // Equal tokens have equal weights except for rounding, so drop tokens by position.
    let capacity = [capacity, "moe.drop_policy=position"];
    let one = Run::new();
    let many = Run::new();
    for run in [&one, &many] {
        fs::write(run.path("text.txt"), "a".repeat(10_000)).unwrap();
    }
    Ranks::threads(&one.args("tp1", 3, &mixtral(&capacity))).finish();
    Ranks::threads(&many.args(layout, 3, &mixtral(&[&[zero], &capacity[..]].concat()))).finish();
    assert_eq!((one.steps().len(), many.steps().len()), (3, 3));
    for (one, many) in one.steps().into_iter().zip(many.steps()) {
        let told = one.experts.unwrap();
        let of_many = many.experts.unwrap();
        // All tokens are equal in the first layer, because it does not depend on the position.
        assert_eq!((told.busiest[0], told.idlest[0]), (4.0, 0.0));
        assert_eq!((of_many.busiest[0], of_many.idlest[0]), (4.0, 0.0));
        assert!(
            (one.loss - many.loss).abs() <= 1e-5 * one.loss,
            "{} {}",
            one.loss,
            many.loss
        );
        assert!((one.grad_norm - many.grad_norm).abs() <= 1e-4 * one.grad_norm);
    }
}

#[test]
fn evaluation_and_the_sample_are_those_of_one_rank() {
    let one = Run::new();
    let many = Run::new();
    fs::copy(one.path("text.txt"), many.path("text.txt")).unwrap();
    // With a small epsilon, the rounding of tiny gradients would become updates.
    let sets = mixtral(&[
        "generate.tokens=8",
        "generate.prompt=abc",
        "train.eval_interval=2",
        "optimizer.eps=1e-5",
        "optimizer.lr=1e-3",
    ]);
    let of_one = Ranks::threads(&one.args("tp1", 4, &sets)).finish();
    for layout in ["dp2-ep2", "tp2-dp2-ep4-sp", "pp2-dp2-ep2", "cp2-ep2"] {
        let found = Ranks::threads(&many.args(layout, 4, &sets)).finish();
        let evals = |run: &Run| -> Vec<f64> {
            let records = read_metrics(run.path("run/metrics.jsonl"))
                .unwrap()
                .into_iter();
            let eval = |record| match record {
                MetricsRecord::Eval(eval) => Some(eval.eval_loss),
                MetricsRecord::Step(_) => None,
            };
            records.filter_map(eval).collect()
        };
        assert_eq!(evals(&one).len(), evals(&many).len());
        for (a, b) in evals(&one).into_iter().zip(evals(&many)) {
            assert!((a - b).abs() <= 1e-5 * a, "{layout}: {a} {b}");
        }
        let sample = |stdout: &str| {
            stdout
                .lines()
                .rev()
                .find(|line| line.contains("abc"))
                .map(str::to_string)
        };
        assert!(sample(&of_one[0].stdout).is_some());
        assert_eq!(
            sample(&of_one[0].stdout),
            sample(&found[0].stdout),
            "{layout}"
        );
        fs::remove_dir_all(many.path("run")).unwrap();
    }
}

#[rstest]
fn a_trained_model_is_written_with_under_every_grid_and_goes_out_and_in_again(
    #[values("mixtral", "qwen3-moe", "qwen3-moe-plain")] name: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let hf = fixture(name);
    let checkpoint = dir.path().join("checkpoint");
    let out = dir.path().join("hf");
    let [hf, checkpoint, out] = [&hf, &checkpoint, &out].map(|path| path.to_str().unwrap());
    Ranks::command(&["convert", "import", hf, checkpoint]).finish();
    Ranks::command(&["convert", "export", checkpoint, out]).finish();
    let file = |folder: &str| fs::read(format!("{folder}/model.safetensors")).unwrap();
    let tensors = |bytes: &[u8]| {
        let all = safetensors::SafeTensors::deserialize(bytes).unwrap();
        let mut all: Vec<_> = all
            .tensors()
            .into_iter()
            .map(|(name, view)| (name, view.data().to_vec()))
            .collect();
        all.sort();
        all
    };
    assert!(tensors(&file(hf)) == tensors(&file(out)));
    let write = |layout: &str| {
        let ask = [
            "generate",
            checkpoint,
            "--max-tokens",
            "10",
            "--ignore-eos",
            "--layout",
            layout,
        ];
        let prompts = [
            "--prompt-ids",
            "5,17,3",
            "--prompt-ids",
            "9,8,7,6,5,4,3,2,1,40,41,42",
        ];
        Ranks::command(&[&ask[..], &prompts].concat()).finish()[0]
            .stdout
            .clone()
    };
    let expected = write("tp1");
    assert!(!expected.is_empty());
    for layout in [
        "dp2-ep2",
        "tp2-ep2-sp",
        "tp2-sp",
        "pp2",
        "pp2-dp2-ep2",
        "cp2-ep2",
        "dp2-etp2",
    ] {
        assert_eq!(write(layout), expected, "{layout}");
    }
}
