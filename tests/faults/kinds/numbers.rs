//! Numbers that overflow.

use crate::{
    case::{Case, STEPS},
    check,
    job::PATIENCE,
};

/// A learning rate at which everything overflows: a checkpoint from which training cannot continue
/// is never kept.
pub(super) fn absurd_rate(case: &Case) -> Result<(), String> {
    case.start(case.train(case.layout, 6, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let rate = case.one_of(&["1e20", "1e30", "1e38", "3e38"]);
    let lr = format!("optimizer.lr={rate}");
    let interval = 1 + case.below(3);
    let interval = format!("train.checkpoint_interval={interval}");
    let sets = [
        lr.as_str(),
        &interval,
        "optimizer.warmup_steps=0",
        "train.keep_checkpoints=1",
    ];
    case.start(case.train(case.layout, STEPS, &sets))
        .wait(PATIENCE)?
        .expect(&[0, 3])?;
    let steps = check::last_checkpoint(&case.run()) + 2;
    let sets = ["optimizer.lr=1e-4", "optimizer.min_lr=1e-5"];
    let mut job = case.start(case.train(case.layout, steps, &sets));
    // Weights of 1e30 are finite, so they are kept, but their loss is not finite.
    job.wait(PATIENCE)?.expect(&[0, 3])?.says(&["resumed"])?;
    case.check_nothing_left()
}
