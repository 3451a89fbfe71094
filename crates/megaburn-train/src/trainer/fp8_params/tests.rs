//! Runs that send weights in FP8 compute the numbers of runs that do not.

use rstest::rstest;

use crate::{
    error::TrainError,
    trainer::{Trainer, testing::trainers},
};

const BASE: [&str; 4] = [
    "model.hidden=32",
    "model.ffn=64",
    "train.dtype=bf16",
    "optimizer.lr=0.01",
];
const KEY: &str = "precision.fp8_param_gather=true";

/// What a rank finds.
#[derive(Debug, PartialEq)]
struct Found {
    /// The loss and the norm of the gradient of each step.
    losses: Vec<[u64; 2]>,
    /// The loss of an evaluation after every second step.
    evals: Vec<u64>,
    /// What the metrics have of the precision.
    precision: Vec<String>,
    /// The masters in the end.
    masters: Vec<Vec<u32>>,
}

/// The number of weights of a rank that are in FP8.
fn in_fp8(trainer: &Trainer) -> usize {
    let paths = trainer.plan().iter();
    paths
        .filter(|(path, _)| trainer.core.sharding.is_in_fp8(path))
        .count()
}

fn masters(trainer: &Trainer) -> Vec<Vec<u32>> {
    let paths = trainer.plan().iter();
    let masters = paths.filter_map(|(path, _)| {
        let unused = || unreachable!("masters are stored in f32");
        let data = trainer.core.optimizer.master(path, unused)?.into_data();
        Some(data.iter::<f32>().map(f32::to_bits).collect())
    });
    masters.collect()
}

/// Some steps: what each rank finds, and how many weights it had in FP8 after each step.
fn run(sets: &[&str], layout: &str, steps: usize) -> (Vec<Found>, Vec<Vec<usize>>) {
    let sets = [&BASE, sets].concat();
    let ranks = trainers(&sets, layout, |mut trainer| {
        let mut found = Found {
            losses: Vec::new(),
            evals: Vec::new(),
            precision: Vec::new(),
            masters: Vec::new(),
        };
        let mut counts = Vec::new();
        for step in 0..steps {
            let metrics = trainer.step()?;
            let losses = [metrics.loss, metrics.grad_norm].map(f64::to_bits);
            found.losses.push(losses);
            found.precision.push(format!("{:?}", metrics.precision));
            counts.push(in_fp8(&trainer));
            if step % 2 == 0 {
                found.evals.push(trainer.evaluate()?.eval_loss.to_bits());
            }
        }
        trainer.check_replicas()?;
        found.masters = masters(&trainer);
        Ok::<_, TrainError>((found, counts))
    });
    ranks.into_iter().unzip()
}

/// Compares a run with the key to one without. Returns the number of weights that rank 0 had in FP8
/// after each step.
fn check(sets: &[&str], layout: &str, steps: usize) -> Vec<usize> {
    let (expected, none) = run(sets, layout, steps);
    let (found, mut counts) = run(&[sets, &[KEY]].concat(), layout, steps);
    assert!(none.iter().flatten().all(|count| *count == 0));
    assert_eq!(found, expected, "{sets:?} {layout}");
    counts.swap_remove(0)
}

#[rstest]
#[case("dp2", &["parallel.zero=1", "precision.recipe=tensorwise"], 8)]
#[case("dp2", &["parallel.zero=3", "precision.recipe=delayed", "parallel.bucket_size=2000"], 8)]
#[case(
    "tp2-dp2-sp",
    &["parallel.zero=2", "precision.recipe=tensorwise", "precision.power_of_two_scales=true"],
    8
)]
#[case(
    "tp2-dp2",
    &[
        "parallel.zero=1",
        "precision.recipe=delayed",
        "precision.margin=1",
        "precision.amax_history_len=2",
        "parallel.bucket_size=2000"
    ],
    8
)]
#[case(
    "pp2-dp2",
    &[
        "parallel.zero=3",
        "precision.recipe=tensorwise",
        "precision.num_layers_at_end_in_bf16=1",
        "parallel.overlap=true"
    ],
    4
)]
#[case(
    "tp2-dp2-etp2-sp",
    &["parallel.zero=1", "precision.recipe=tensorwise", "model.family=mixtral", "model.experts.num=2", "parallel.bucket_size=2000"],
    12
)]
fn no_number_of_the_training_changes(
    #[case] layout: &str,
    #[case] sets: &[&str],
    #[case] expected: usize,
) {
    let counts = check(sets, layout, 3);
    assert_eq!(counts, [expected; 3]);
}

/// Weights are in `train.dtype` where something reads them that is not quantised: in another phase,
/// in a step that counts what is lost, in a layer that fell back, and after the last step.
#[rstest]
#[case(
    &[
        "parallel.zero=1",
        "precision.recipe=delayed",
        "precision.schedule=[{from_step=3,recipe=\"bf16\"},{from_step=5,recipe=\"tensorwise\"}]"
    ],
    &[8, 0, 0, 0, 8]
)]
#[case(
    &["parallel.zero=1", "precision.recipe=tensorwise", "precision.log_interval=2"],
    &[0, 8, 0]
)]
#[case(&["parallel.zero=3", "precision.recipe=tensorwise", "train.steps=2"], &[8, 0])]
fn weights_are_whole_where_they_are_read(#[case] sets: &[&str], #[case] expected: &[usize]) {
    let counts = check(sets, "dp2", expected.len());
    assert_eq!(counts, expected);
}

/// That a layer falls back is known only after its weight was sent in FP8: it is sent again.
#[rstest]
#[case("dp2", "parallel.zero=1")]
#[case("tp2-dp2", "parallel.zero=3")]
fn a_layer_that_falls_back_gets_its_weight_again(#[case] layout: &str, #[case] zero: &str) {
    let sets = [
        zero,
        "precision.recipe=delayed",
        "precision.amax_compute=most_recent",
        "precision.fallback.max_saturated_share=1e-9",
        "precision.fallback.interval=3",
        "precision.fallback.duration_steps=1",
        "parallel.bucket_size=2000",
    ];
    let counts = check(&sets, layout, 5);
    assert_eq!(counts[..3], [8, 0, 8]);
    assert!(counts[3] < 8, "no layer fell back: {counts:?}");
}

/// A step that is skipped leaves the scales of delayed scaling as they were.
#[rstest]
fn a_skipped_step_sends_weights_again(#[values("parallel.zero=1", "parallel.zero=3")] zero: &str) {
    // The loss rises with this rate, and the norms of gradients soon are above that of the first step.
    let sets = [zero, "precision.recipe=delayed", "optimizer.lr=0.3"];
    let (found, _) = run(&sets, "dp2", 1);
    let first = f64::from_bits(found[0].losses[0][1]);
    let threshold = format!("optimizer.grad_norm_skip_threshold={first}");
    let counts = check(&[&sets[..], &[&threshold]].concat(), "dp2", 6);
    assert_eq!(counts[0], 8);
    assert!(counts.contains(&0), "no step was skipped: {counts:?}");
}

/// Clipping changes weights after they were sent.
#[rstest]
#[case("parallel.zero=1", 6)]
#[case("parallel.zero=3", 0)]
fn clipped_queries_and_keys_are_whole(#[case] zero: &str, #[case] expected: usize) {
    let sets = [
        zero,
        "precision.recipe=tensorwise",
        "optimizer.qk_clip=true",
        "optimizer.qk_clip_threshold=0.001",
    ];
    assert_eq!(check(&sets, "dp2", 3), [expected; 3]);
}

/// Checkpoints hold the masters, so a resumed run computes the bits of an uninterrupted one, with
/// the key or without.
#[rstest]
fn a_resumed_run_computes_the_same(
    #[values("parallel.zero=1", "parallel.zero=3")] zero: &str,
    #[values(&[], &[KEY])] after: &[&str],
) {
    let dir = tempfile::tempdir().unwrap();
    let dir = format!("run.dir={}", dir.path().display());
    let sets = [&BASE[..], &[zero, &dir, "precision.recipe=delayed"]].concat();
    let steps = |trainer: &mut Trainer| {
        let losses = (0..2).map(|_| Ok(trainer.step()?.loss.to_bits()));
        losses.collect::<Result<Vec<_>, TrainError>>()
    };
    let first = [&sets[..], &[KEY]].concat();
    let expected = trainers(&first, "dp2", |mut trainer| {
        steps(&mut trainer)?;
        trainer.save()?;
        let losses = steps(&mut trainer)?;
        Ok((losses, masters(&trainer)))
    });
    let found = trainers(&[&sets[..], after].concat(), "dp2", |mut trainer| {
        trainer.resume()?.expect("there is a checkpoint");
        assert_eq!(in_fp8(&trainer), 0);
        let losses = steps(&mut trainer)?;
        assert_eq!(in_fp8(&trainer) > 0, !after.is_empty());
        Ok((losses, masters(&trainer)))
    });
    assert_eq!(found, expected);
}
