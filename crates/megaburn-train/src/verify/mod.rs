//! Whether a layout computes what `transformers` computed: logits, loss, gradients, a training curve.

mod collect;
mod executor;
mod gradients;
mod rank;
mod reference;
mod report;

use burn::prelude::Device;
use megaburn_collective::{Group, GroupOptions, ProcessGroups, RankEnv};
use megaburn_mesh::Layout;

use crate::{TrainError, config::Dtype, device::Devices, ranks::run_ranks};
use collect::collect;
use gradients::compare_gradients;
use rank::VerifyRank;
pub use reference::Reference;
pub use report::{Report, Tolerances};

/// Runs the reference's model and batch on the ranks of `layout`, parameters and activations in
/// `dtype`, and compares: on threads of this process, or as one of several processes (`env`), where
/// every rank but the first reports an error of its own at most.
///
/// Without an error, every number is there that the reference has the counterpart of.
///
/// # Errors
/// None: a layout that the model refuses, or a failure, stands in the report.
///
/// # Collective
/// All ranks.
pub fn verify(
    reference: &Reference,
    layout: &Layout,
    dtype: Dtype,
    tolerances: &Tolerances,
    devices: Devices,
    env: Option<RankEnv>,
) -> Report {
    let run = || {
        let device = devices.of_this_process(layout, env.as_ref())?;
        let options = GroupOptions::default();
        let compare =
            |world: &Group| verify_on(world, reference, layout, dtype, tolerances, &device);
        Ok(run_ranks(layout, env, options, &device, compare)?.swap_remove(0))
    };
    run().unwrap_or_else(|error: TrainError| {
        Report::refused(reference, &layout.to_string(), error.to_string())
    })
}

/// As [`verify`], on ranks that there are already. All but rank 0 get a report without numbers.
///
/// # Errors
/// The layout cannot split model or batch; a failed collective or computation.
///
/// # Collective
/// All ranks.
pub fn verify_on(
    world: &Group,
    reference: &Reference,
    layout: &Layout,
    dtype: Dtype,
    tolerances: &Tolerances,
    device: &Device,
) -> Result<Report, TrainError> {
    reference.check(layout)?;
    let groups = ProcessGroups::new(world, *layout)?;
    let found = VerifyRank::new(reference, groups, dtype, &device.clone().autodiff())?.run()?;
    let mut report = Report::new(reference, layout.to_string());
    let Some(ranks) = collect(world, found)? else {
        return Ok(report);
    };
    let expected = reference.losses()?;
    for found in &ranks {
        report.logits(found.logits);
        report.losses(&expected, &found.losses);
    }
    let (gradients, skipped) = compare_gradients(reference, ranks.into_iter().map(|r| r.grads))?;
    report.gradients(gradients, skipped);
    report.judge(tolerances);
    Ok(report)
}
