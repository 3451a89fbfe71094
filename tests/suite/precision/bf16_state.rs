//! Runs whose optimizer has no f32 state: it updates the bf16 parameters directly, and gradients
//! and moments are bf16.

use burn::tensor::DType;
use megaburn::{
    checkpoint::newest,
    train::{
        TrainConfig,
        config::{Dtype, StateDtype},
    },
};
use rstest::rstest;

use crate::{
    precision::bf16::{bits, config, relative, saved_in, train},
    runs::child::Ranks,
};
use megaburn_test_support::run::Run;

fn of_state(dtype: Dtype) -> StateDtype {
    match dtype {
        Dtype::Bf16 => StateDtype::Bf16,
        _ => StateDtype::F32,
    }
}

/// The configuration of a run that keeps every number in bf16.
fn narrow(run: &Run, layout: &str) -> TrainConfig {
    let mut config = config(run, layout, Dtype::Bf16);
    let optimizer = &mut config.optimizer;
    optimizer.main_params_dtype = Dtype::Bf16;
    optimizer.main_grads_dtype = Dtype::Bf16;
    optimizer.exp_avg_dtype = StateDtype::Bf16;
    optimizer.exp_avg_sq_dtype = StateDtype::Bf16;
    config
}

#[rstest]
#[case("tp1")]
#[case("dp2")]
#[case("tp2-sp")]
#[case("tp2-dp2-sp")]
fn it_trains_as_a_run_with_masters_does_up_to_rounding(#[case] layout: &str) {
    let found = train(narrow(&Run::new(), layout), 10);
    let expected = train(config(&Run::new(), "tp1", Dtype::Bf16), 10);
    assert!(
        expected[9].loss < expected[0].loss - 0.1,
        "it does not learn: {expected:?}"
    );
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            relative(found.loss, expected.loss) < 1e-2,
            "{found:?} {expected:?}"
        );
    }
    let same_layout = train(config(&Run::new(), layout, Dtype::Bf16), 10);
    assert_ne!(found[9].loss, same_layout[9].loss, "it has masters");
}

#[test]
fn each_part_of_the_state_is_kept_in_its_own_type() {
    // Vary the type of the masters and of each moment.
    for (masters, exp_avg, exp_avg_sq) in [
        (Dtype::F32, Dtype::Bf16, Dtype::F32),
        (Dtype::F32, Dtype::F32, Dtype::Bf16),
        (Dtype::Bf16, Dtype::F32, Dtype::F32),
    ] {
        let run = Run::new();
        let mut config = config(&run, "tp1", Dtype::Bf16);
        config.optimizer.main_params_dtype = masters;
        config.optimizer.exp_avg_dtype = of_state(exp_avg);
        config.optimizer.exp_avg_sq_dtype = of_state(exp_avg_sq);
        // Resume in between: loaded state must keep its type.
        train(config.clone(), 1);
        train(config, 2);
        let checkpoint = newest(&run.checkpoints()).unwrap().checkpoint.unwrap();
        for name in checkpoint.manifest().tensors.keys() {
            let of = match name.split('.').next().unwrap() {
                "model" => masters,
                "exp_avg" => exp_avg,
                "exp_avg_sq" => exp_avg_sq,
                other => panic!("{other}"),
            };
            let expected = if of == Dtype::F32 {
                DType::F32
            } else {
                DType::BF16
            };
            assert_eq!(checkpoint.dtype(name).unwrap(), expected, "{name}");
        }
    }
}

#[rstest]
#[case("tp1", "tp2-sp")]
#[case("tp2-dp2-sp", "tp1")]
fn it_resumes_bit_for_bit_and_under_any_layout(#[case] layout: &str, #[case] other: &str) {
    let [whole, parts] = [0; 2].map(|_| Run::new());
    let straight = train(narrow(&whole, layout), 4);
    train(narrow(&parts, layout), 2);
    let half = saved_in(&parts, DType::BF16);
    // Load under another layout and save at the same step.
    train(narrow(&parts, other), 2);
    assert_eq!(bits(&saved_in(&parts, DType::BF16)), bits(&half));
    let resumed = train(narrow(&parts, layout), 4);
    for (found, expected) in resumed.iter().zip(&straight[2..]) {
        assert_eq!(found.loss.to_bits(), expected.loss.to_bits());
        assert_eq!(found.grad_norm.to_bits(), expected.grad_norm.to_bits());
    }
    assert_eq!(
        bits(&saved_in(&parts, DType::BF16)),
        bits(&saved_in(&whole, DType::BF16))
    );
}

#[test]
fn a_run_may_go_on_with_masters_and_back() {
    let run = Run::new();
    train(narrow(&run, "tp1"), 2);
    let before = saved_in(&run, DType::BF16);
    train(config(&run, "tp1", Dtype::Bf16), 2);
    assert_eq!(bits(&saved_in(&run, DType::F32)), bits(&before));
    let next = train(config(&run, "tp2", Dtype::Bf16), 3).remove(0);
    let last = train(narrow(&run, "tp1"), 4).remove(0);
    let straight = train(narrow(&Run::new(), "tp1"), 4);
    for (found, expected) in [(next, &straight[2]), (last, &straight[3])] {
        assert!(
            relative(found.loss, expected.loss) < 4e-3,
            "{found:?} {expected:?}"
        );
        assert!(
            relative(found.grad_norm, expected.grad_norm) < 0.1,
            "{found:?} {expected:?}"
        );
    }
}

#[test]
fn a_run_that_rounds_what_it_goes_on_with_says_so() {
    let run = Run::new();
    let bf16 = "train.dtype=bf16";
    let keys = ["main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"];
    let notes = |steps, narrow: &[&str]| {
        let sets = narrow
            .iter()
            .map(|key| format!("optimizer.{key}=bf16"))
            .collect::<Vec<_>>();
        let sets = sets
            .iter()
            .map(String::as_str)
            .chain([bf16])
            .collect::<Vec<_>>();
        let ended = Ranks::threads(&run.args("tp1", steps, &sets))
            .finish()
            .remove(0);
        let note =
            |key| format!("note     the checkpoint has a higher precision than optimizer.{key}");
        keys.map(|key| ended.stdout.contains(&note(key)))
    };
    assert_eq!(notes(1, &[]), [false; 3]);
    assert_eq!(notes(2, &[]), [false; 3]);
    assert_eq!(notes(3, &keys[1..2]), [false, true, false]);
    // exp_avg has been bf16 since step 3, so only the others are rounded.
    assert_eq!(notes(4, &keys), [true, false, true]);
    assert_eq!(notes(5, &keys), [false; 3]);
    assert_eq!(notes(6, &[]), [false; 3]);
}
