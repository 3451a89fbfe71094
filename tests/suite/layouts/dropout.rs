//! Training drops the same elements under every layout; evaluation drops none.

use std::sync::Arc;

use burn::prelude::Device;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, run_threads},
    models::Family,
    pipeline::ScheduleKind,
    train::{RunData, TrainConfig, TrainError, Trainer, config::Dtype},
};
use rstest::rstest;

use crate::precision::bf16::config;
use megaburn_test_support::run::Run;

const SHARES: [f64; 2] = [0.2, 0.3];

/// Loss and gradient norm of three steps with several micro-batches, and the loss of an evaluation
/// before them.
fn trained(
    layout: &str,
    [hidden, attention]: [f64; 2],
    change: impl Fn(&mut TrainConfig),
) -> (Vec<[f64; 2]>, f64) {
    let run = Run::new();
    let mut config = config(&run, layout, Dtype::F32);
    config.train.global_batch = 12;
    config.train.micro_batch = 1;
    config.model.layers = 4;
    config.train.hidden_dropout = hidden;
    config.train.attention_dropout = attention;
    config.optimizer.lr = 1e-3;
    change(&mut config);
    let layout = config.layout(None).unwrap();
    let seed = config.run.seed;
    let data = Arc::new(RunData::load(&config).unwrap());
    let config = Arc::new(config);
    let options = GroupOptions {
        seed,
        ..Default::default()
    };
    let mut ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        let evaluated = trainer.evaluate()?.eval_loss;
        let step = |_| trainer.step().map(|step| [step.loss, step.grad_norm]);
        let steps = (0..3).map(step).collect::<Result<_, _>>()?;
        Ok::<_, TrainError>((steps, evaluated))
    });
    ranks.remove(0).unwrap()
}

/// The largest relative difference between two lists of numbers.
fn distance(found: &[[f64; 2]], expected: &[[f64; 2]]) -> f64 {
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs
        .map(|(found, expected)| (found - expected).abs() / expected)
        .fold(0.0, f64::max)
}

#[rstest]
fn every_layout_drops_what_one_rank_drops(
    #[values(Family::LLAMA, Family::GPT2)] family: Family,
    #[values([0.2, 0.0], [0.0, 0.3], SHARES)] shares: [f64; 2],
) {
    let of_family = |config: &mut TrainConfig| {
        config.model.family = family;
        if family == Family::GPT2 {
            config.model.kv_heads = config.model.heads;
        }
    };
    // One micro-batch with all samples: dropout masks must not depend on the number of a
    // micro-batch.
    let (expected, evaluated) = trained("tp1", shares, |config| {
        of_family(config);
        config.train.micro_batch = 12;
    });
    let ways = [
        ("tp1", ScheduleKind::OneForwardOneBackward, 0),
        ("dp3", ScheduleKind::OneForwardOneBackward, 3),
        ("tp2-dp2", ScheduleKind::OneForwardOneBackward, 1),
        ("tp4-dp2-sp", ScheduleKind::OneForwardOneBackward, 2),
        ("pp2", ScheduleKind::ZbV, 0),
        ("tp2-pp2-dp2-sp", ScheduleKind::ZbH1, 2),
        ("cp2", ScheduleKind::OneForwardOneBackward, 1),
        ("tp2-cp2-sp", ScheduleKind::OneForwardOneBackward, 3),
        ("cp2-pp2-dp2", ScheduleKind::ZbH1, 0),
    ];
    for (layout, schedule, zero) in ways {
        let (found, evaluated_too) = trained(layout, shares, |config| {
            of_family(config);
            config.parallel.zero = zero;
            if layout.contains("pp") {
                config.parallel.schedule = Some(schedule);
            }
        });
        let distance = distance(&found, &expected);
        assert!(
            distance < 1e-5,
            "{layout}: {distance:e} from {expected:?}: {found:?}"
        );
        assert!(
            (evaluated_too - evaluated).abs() < 1e-5 * evaluated,
            "{layout}"
        );
    }
}

#[test]
fn each_share_is_dropped_in_training_and_none_in_evaluation() {
    let of = |shares| trained("tp1", shares, |_| ());
    let (kept, evaluated) = of([0.0, 0.0]);
    for shares in [[0.2, 0.0], [0.0, 0.3], SHARES] {
        let (dropped, too) = of(shares);
        assert!(
            distance(&dropped[..1], &kept[..1]) > 1e-4,
            "{shares:?}: {dropped:?}, {kept:?}"
        );
        assert_eq!(too.to_bits(), evaluated.to_bits());
    }
}

#[rstest]
#[case([1.0, 0.0], "`train.hidden_dropout` is 1: it must be at least 0 and below 1")]
#[case([f64::NAN, 0.0], "`train.hidden_dropout` is NaN")]
#[case([0.0, -0.1], "`train.attention_dropout` is -0.1: it must be at least 0 and below 1")]
fn shares_that_cannot_be_dropped_are_refused(#[case] shares: [f64; 2], #[case] message: &str) {
    let mut config = config(&Run::new(), "tp1", Dtype::F32);
    config.train.hidden_dropout = shares[0];
    config.train.attention_dropout = shares[1];
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}
