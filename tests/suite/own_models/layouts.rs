//! Every layout trains a program's own model as one rank does.

use megaburn_test_support::gather::relative_distance;
use rstest::rstest;

use super::model::{Trained, WAVES, Waves, train, trainers};

/// The largest relative difference of losses, gradient norms, metrics and parameters.
const TOLERANCE: f64 = 1e-4;

fn compare(found: &Trained, expected: &Trained, row: &str) {
    assert_eq!(found.steps.len(), 6);
    let first = expected.steps[0].loss;
    assert!(expected.steps[5].loss < 0.9 * first, "it does not learn");
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        for (what, found, expected) in [
            ("loss", found.loss, expected.loss),
            ("gradient norm", found.grad_norm, expected.grad_norm),
            ("metric", found.task["absolute"], expected.task["absolute"]),
        ] {
            let relative = (found - expected).abs() / expected;
            assert!(
                relative <= TOLERANCE,
                "{row}: {what} {found}, not {expected}"
            );
        }
        assert_eq!(found.tokens, 8, "{row}");
        assert!(found.tflops > 0.0, "{row}");
    }
    let relative = (found.eval_loss - expected.eval_loss).abs() / expected.eval_loss;
    assert!(
        relative <= TOLERANCE,
        "{row}: evaluation {}",
        found.eval_loss
    );
    assert!(found.params.keys().eq(expected.params.keys()), "{row}");
    for (path, params) in &found.params {
        let relative = relative_distance(params, &expected.params[path]);
        assert!(
            relative <= TOLERANCE,
            "{row}: {path} differs by {relative:e}"
        );
    }
}

#[test]
fn every_layout_trains_as_one_rank_does() {
    let expected = train(&["train.micro_batch=8"], "tp1");
    for (layout, sets) in [
        ("tp1", &[][..]),
        ("tp2", &["train.micro_batch=2"]),
        ("dp2", &["train.micro_batch=4"]),
        ("dp4", &["parallel.zero=1", "parallel.overlap=false"]),
        ("tp2-dp2", &["parallel.zero=2"]),
        ("tp2-dp2", &["parallel.zero=3"]),
        ("pp2", &[]),
        ("pp4", &["parallel.schedule=gpipe"]),
        ("pp2", &["parallel.schedule=interleaved"]),
        ("pp2-dp2", &["parallel.schedule=zb-h1", "parallel.zero=1"]),
        ("pp2", &["parallel.schedule=zb-v"]),
        ("tp2-pp2-dp2", &[]),
        (
            "tp2-pp2-dp2",
            &["parallel.schedule=interleaved", "parallel.zero=2"],
        ),
        (
            "tp2-pp2-dp2",
            &["parallel.schedule=zb-v", "parallel.zero=3"],
        ),
    ] {
        compare(
            &train(sets, layout),
            &expected,
            &format!("{layout} {sets:?}"),
        );
    }
}

#[test]
fn every_layout_drops_what_one_rank_drops() {
    let dropout = "net.dropout=0.3";
    let expected = train(&[dropout, "train.micro_batch=8"], "tp1");
    let without = train(&[], "tp1");
    assert!(
        expected.steps[0].loss != without.steps[0].loss,
        "nothing is dropped"
    );
    for layout in ["tp2", "dp4", "tp2-pp2-dp2"] {
        compare(&train(&[dropout], layout), &expected, layout);
    }
}

/// Five blocks do not split evenly over two stages.
#[test]
fn stages_may_have_different_numbers_of_blocks() {
    let five = ["net.blocks=5", "net.hidden=6"];
    let expected = train(&five, "tp1");
    compare(&train(&five, "pp2"), &expected, "five blocks");
    let first = [&five[..], &["parallel.first_stage_layers=1"]].concat();
    compare(&train(&first, "pp2"), &expected, "one block and four");
}

#[rstest]
#[case("bf16", 0.05)]
#[case("f16", 0.01)]
fn narrow_types_learn_what_f32_does(#[case] dtype: &str, #[case] tolerance: f64) {
    let expected = train(&[], "tp1");
    let dtype = format!("train.dtype={dtype}");
    let scale = "optimizer.initial_loss_scale=1024.0";
    let found = train(&[&dtype, scale], "tp2-pp2-dp2");
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        let relative = (found.loss - expected.loss).abs() / expected.loss;
        assert!(
            relative <= tolerance,
            "{} and {}",
            found.loss,
            expected.loss
        );
    }
}

#[rstest]
#[case("pp2", &["points.nan=0"], "`parallel.pp` is 2: it must be 1: `waves` does not name the blocks")]
#[case("dp3", &[], "`train.global_batch` is 8: it must be a multiple of train.micro_batch 1 x dp 3 = 3")]
#[case("cp2", &[], "`parallel.cp` is 2: it must be 1")]
#[case("tp1", &["points.validation=7"], "there are 7 validation samples: an evaluation needs")]
#[case("tp1", &["points.train=0"], "the task cannot use its data: there are no training samples")]
fn what_a_task_cannot_do_is_refused(
    #[case] layout: &str,
    #[case] sets: &[&str],
    #[case] message: &str,
) {
    let task = Waves {
        names_blocks: false,
    };
    for rank in trainers(task, sets, layout, |_| Ok(())) {
        let error = rank.unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_loss_that_is_not_finite_names_the_parameter_and_changes_nothing() {
    let ranks = trainers(WAVES, &["points.nan=0"], "pp2-dp2", |mut trainer| {
        let error = trainer.step().unwrap_err().to_string();
        assert_eq!(trainer.progress().step, 0);
        Ok(error)
    });
    for error in ranks {
        let error = error.unwrap();
        assert!(error.contains("step 1 is not finite"), "{error}");
        assert!(error.contains("`norm."), "{error}");
    }
}
