use rstest::rstest;

use super::*;
use crate::{diagnosis::NonFiniteOrigin, exit::Exit, state_name::StateKind};

#[rstest]
#[case(
    TrainError::NonFinite {
        step: 7,
        loss: f64::NAN,
        grad_norm: f64::INFINITY,
        diagnosis: Diagnosis::NonFiniteOrigin(NonFiniteOrigin {
            ranks: vec![2, 3],
            param: "head.weight".into(),
        }),
    },
    "step 7 is not finite (loss NaN, gradient norm inf, first in the backward pass in `head.weight`, on ranks 2, 3); the weights are those of step 6",
    Exit::NonFinite
)]
#[case(
    TrainError::NonFinite {
        step: 7,
        loss: 2.5,
        grad_norm: f64::INFINITY,
        diagnosis: Diagnosis::Finite,
    },
    "step 7 is not finite (loss 2.5, gradient norm inf, but each rank's gradients are finite \
    when recomputed: their sum overflows, or the hardware failed once); the weights are those of \
    step 6",
    Exit::NonFinite
)]
#[case(
    TrainError::ReplicasDiffer {
        step: 7,
        tensor: StateName { kind: StateKind::Weight, param: "head.weight".into() },
        ranks: [1, 3],
        is_second_wrong: false,
        is_own: false,
    },
    "after step 7 ranks 1 and 3 have different copies of the weight of `head.weight`: the memory or \
    the hardware of one of them failed, or they run different builds; resume from a checkpoint",
    Exit::PeerLost
)]
#[case(
    TrainError::ReplicasDiffer {
        step: 7,
        tensor: StateName { kind: StateKind::ExpAvg, param: "norm.gamma".into() },
        ranks: [0, 2],
        is_second_wrong: true,
        is_own: true,
    },
    "after step 7 ranks 0 and 2 have different copies of the exp_avg of `norm.gamma`: the memory or \
    the hardware of rank 2, which differs from most copies, failed, or they run different builds; \
    resume from a checkpoint",
    Exit::Failed
)]
#[case(
    TrainError::StateChanged {
        step: 8,
        rank: 3,
        tensor: StateName { kind: StateKind::Master, param: "head.weight".into() },
        is_own: true,
    },
    "on rank 3 the master of `head.weight` is not what step 7 left, found at the update of step 8: \
    the memory of rank 3 failed; resume the run without that GPU or host",
    Exit::Failed
)]
#[case(
    TrainError::TooManySkippedSteps {
        step: 107,
        skips: 100,
        loss: 2.5,
        grad_norm: 7.5,
        loss_scale: 1.0,
        diagnosis: Diagnosis::None,
    },
    "step 107 is the last of 100 skipped steps in a row (loss 2.5, gradient norm 7.5, loss scale 1); resume from a checkpoint with a smaller optimizer.lr, a larger optimizer.grad_norm_skip_threshold or train.dtype=bf16",
    Exit::NonFinite
)]
#[case(
    TrainError::Write { path: "a/b".into(), source: io::ErrorKind::StorageFull.into() },
    "cannot write `a/b`: no storage space",
    Exit::Failed
)]
#[case(
    TrainError::Read { path: "a/b".into(), source: io::ErrorKind::NotFound.into() },
    "cannot read `a/b`: entity not found",
    Exit::BadInput
)]
#[case(
    TrainError::Signals { source: io::ErrorKind::PermissionDenied.into() },
    "cannot install the handlers of signals that stop a run: permission denied",
    Exit::Failed
)]
#[case(
    TrainError::Report(ReportError::Plot { why: "no room".into() }),
    "cannot draw the loss curve: no room",
    Exit::Failed
)]
fn an_error_says_what_happened_and_how_to_exit(
    #[case] error: TrainError,
    #[case] message: &str,
    #[case] exit: Exit,
) {
    assert_eq!(error.to_string(), message);
    assert_eq!(error.exit(), exit);
}

#[test]
fn errors_stay_small_enough_to_return_by_value() {
    assert!(
        size_of::<TrainError>() <= 128,
        "{}",
        size_of::<TrainError>()
    );
}

#[test]
fn the_checkpoint_of_the_compared_step_is_suspect_if_memory_failed() {
    let tensor = StateName {
        kind: StateKind::Weight,
        param: "head.weight".into(),
    };
    let differ = TrainError::ReplicasDiffer {
        step: 12,
        tensor: tensor.clone(),
        ranks: [0, 1],
        is_second_wrong: false,
        is_own: false,
    };
    let changed = TrainError::StateChanged {
        step: 9,
        rank: 1,
        tensor,
        is_own: false,
    };
    // The state of step 8 changed after the ranks had compared it, and may have been saved since.
    assert_eq!(changed.suspect_step(8), Some(8));
    // Checkpoints are written after a comparison only.
    assert_eq!(differ.suspect_step(8), None);
}
