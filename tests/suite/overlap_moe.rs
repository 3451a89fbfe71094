//! Products beside rows on their way to experts change no bit of a run.

use rstest::rstest;

use crate::{child::Ranks, run::Run};

/// (One matrix for embedding and head would get its two gradients in another order.)
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
    assert!(found == trained("parallel.overlap_moe=false"), "{layout} {sets:?} {family:?} {dtype}");
}

#[test]
fn where_sums_over_ranks_come_after_each_micro_batch_it_is_refused() {
    let run = Run::new();
    let sets = ["model.family=mixtral", "parallel.overlap_moe=true", "parallel.zero=2"];
    let ended = Ranks::threads(&run.args("dp2-ep2", 4, &sets)).wait_all().remove(0);
    let said = ["parallel.overlap_moe", "parallel.zero is 2"];
    assert!(
        ended.code == Some(2) && said.iter().all(|part| ended.stderr.contains(part)),
        "{ended:?}"
    );
}
