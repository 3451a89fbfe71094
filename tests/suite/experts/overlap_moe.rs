//! Products beside rows on their way to experts change no bit of a run.

use rstest::rstest;

use crate::runs::child::Ranks;
use megaburn_test_support::run::Run;

/// (The gradients of one matrix for embedding and head may be added in another order.)
const MODEL: [&str; 9] = [
    "model.layers=4",
    "model.tied=false",
    "train.global_batch=12",
    "train.micro_batch=1",
    "moe.aux_loss=0.02",
    "moe.capacity_factor=1.5",
    "parallel.bucket_size=3000",
    "optimizer.warmup_steps=0",
    "optimizer.clip_grad=0.5",
];

#[rstest]
#[case::alone("dp2-ep2", &["parallel.zero=1"])]
#[case::tensor_parallel("tp2-dp2-ep4-sp", &["recompute.method=block", "recompute.num_layers=1"])]
#[case::sequences("cp2-dp2-ep2", &["parallel.zero=1"])]
#[case::pipeline("pp2-dp2-ep2", &["parallel.zero=1"])]
#[case::interleaved("pp2-dp2-ep2", &["parallel.schedule=interleaved"])]
#[case::zero_bubble("pp2-dp2-ep2", &["parallel.schedule=zb-h1", "parallel.zero=1"])]
#[case::vee("pp2-dp2-ep2", &["parallel.schedule=zb-v", "recompute.modules=[\"mlp\"]"])]
fn four_steps_are_the_same_to_the_bit(
    #[case] layout: &str,
    #[case] sets: &[&str],
    #[values(
        &["model.family=mixtral"],
        &["model.family=deepseek_v3", "model.kv_heads=4", "model.experts.num=8"]
    )]
    family: &[&str],
    #[values("train.dtype=f32", "train.dtype=bf16")] dtype: &str,
) {
    let trained = |overlap: &str| {
        let run = Run::new();
        let sets = [&MODEL, family, sets, &[dtype, overlap]].concat();
        Ranks::threads(&run.args(layout, 4, &sets)).finish();
        (run.numbers(), run.tensors(4))
    };
    let found = trained("parallel.overlap_moe=true");
    assert_eq!(found.0.len(), 4);
    assert!(
        found == trained("parallel.overlap_moe=false"),
        "{layout} {sets:?} {family:?} {dtype}"
    );
}

#[test]
fn ranks_that_are_processes_compute_the_same_products() {
    let trained = |overlap: &str| {
        let run = Run::new();
        let sets = [&MODEL[..], &["model.family=mixtral", overlap]].concat();
        Ranks::processes(4, &run.args("tp2-dp2-ep4-sp", 4, &sets)).finish();
        (run.numbers(), run.tensors(4))
    };
    assert!(trained("parallel.overlap_moe=true") == trained("parallel.overlap_moe=false"));
}

/// The same number of gradients comes in each backward, of which the head has three.
#[test]
fn with_layers_that_predict_further_tokens_too() {
    let trained = |overlap: &str| {
        let run = Run::new();
        let more = [
            "model.family=deepseek_v3",
            "model.kv_heads=4",
            "model.mtp_layers=2",
            "train.fused_linear_cross_entropy=false",
            "parallel.zero=1",
        ];
        let sets = [&MODEL[..], &more, &["model.experts.num=8", overlap]].concat();
        Ranks::threads(&run.args("dp2-ep2", 4, &sets)).finish();
        (run.numbers(), run.tensors(4))
    };
    assert!(trained("parallel.overlap_moe=true") == trained("parallel.overlap_moe=false"));
}

#[test]
fn products_are_put_off_where_rows_are_sent() {
    let told = |layout: &str, overlap: &str| {
        let run = Run::new();
        let sets = [&MODEL[..], &["model.family=mixtral", overlap]].concat();
        let debug = [("RUST_LOG", "megaburn_pipeline=debug".to_string())];
        let ended = Ranks::with_env(&run.args(layout, 1, &sets), &debug)
            .finish()
            .remove(0);
        ended.stderr.matches("computed beside waits").count()
    };
    assert_eq!(told("dp2-ep2", "parallel.overlap_moe=true"), 2);
    assert_eq!(told("dp2-ep1", "parallel.overlap_moe=true"), 0);
    assert_eq!(told("dp2-ep2", "parallel.overlap_moe=false"), 0);
}

#[test]
fn where_sums_over_ranks_come_after_each_micro_batch_it_is_refused() {
    let run = Run::new();
    let sets = [
        "model.family=mixtral",
        "parallel.overlap_moe=true",
        "parallel.zero=2",
    ];
    let ended = Ranks::threads(&run.args("dp2-ep2", 4, &sets))
        .wait_all()
        .remove(0);
    let said = ["parallel.overlap_moe", "parallel.zero is 2"];
    assert!(
        ended.code == Some(2) && said.iter().all(|part| ended.stderr.contains(part)),
        "{ended:?}"
    );
}
